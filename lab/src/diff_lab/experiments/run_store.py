"""Stores trained runs in folders named by a hash of their origin: experiments share them, and none is trained twice."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from diff_lab.data import Batches
from diff_lab.files import read_metrics
from diff_lab.results_files import capture_environment, write_json
from diff_lab.train import Data, DivergenceError, Progress, Recipe, build_data, train
from diff_lab.train.checkpoint import without_progress_bars
from diff_lab.train.run_setup import CHECKPOINTS, METRICS, MODEL, WITHOUT_EFFECT
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.utils.files import read_json

RUN = "run"
BEGUN, TRAINED = "begun.json", "trained.json"


def training_device(recipe: Recipe) -> torch.device:
    """Return the device on which a single process trains by a recipe on this machine."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if recipe.train.device == "cpu" or device is None else device


def load_trained(recipe: Recipe, model_folder: Path) -> LanguageModel:
    """Load the model in a folder in evaluation mode, on the device of the recipe's training."""
    with without_progress_bars():
        model_class = language_model_class(DiffTransformerConfig.from_pretrained(model_folder))
        return model_class.from_pretrained(model_folder).eval().to(training_device(recipe))


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Its key is the hash of its origin, and names the folder that `folder`, the run's own, lies in. `diverged` says why
    there is no model, if so; `commit` is of the code that finished its training, and `begun_at` of the code that began
    it, None outside git; `seconds` of training; `device` the name of the one that finished it.
    """

    key: str
    folder: Path
    diverged: str | None
    commit: str | None
    begun_at: str | None
    seconds: float
    device: str

    @property
    def model_folder(self) -> Path:
        return self.folder / MODEL

    @property
    def measured(self) -> Path:
        """The folder of its measurements."""
        return self.folder.parent / "measured"

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of its `metrics.jsonl`; none of a run that diverged before the first of them."""
        path = self.folder / METRICS
        return read_metrics(path) if path.is_file() else []


class Store:
    """A folder of runs, made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> FinishedRun | None:
        """Return the finished run of that key, or None."""
        file = self._folder / key / TRAINED
        if not file.is_file():
            return None
        outcome = read_json(file)
        names = ("diverged", "commit", "begun_at", "seconds", "device")
        return FinishedRun(key, self._folder / key / RUN, *(outcome[name] for name in names))

    def train(
        self,
        key: str,
        recipe: Recipe,
        on_evaluate: Callable[[Batches], Callable[[Any, int], dict[str, float]]],
        commit: str | None,
        data: Data | None,
        progress: Progress,
    ) -> FinishedRun:
        """Return the finished run of that key: as it lies there, or trained, resuming an interrupted training.

        The commit is of the code, to be remembered. Data are made here if they come as None, as where another process
        is to call this. Raises ValueError if another process is training the run, and TrainingInterrupted as `train`;
        the next call resumes.
        """
        folder = self._folder / key / RUN
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder.parent / ".lock", timeout=0):
                if self.find(key) is None:
                    seconds, diverged = 0.0, None
                    begun = folder.parent / BEGUN
                    if not begun.is_file():
                        write_json(begun, {"commit": commit})
                    data = data or build_data(recipe)
                    settings: dict[str, Any] = {"data": data, "on_evaluate": on_evaluate(data.batches)}
                    try:
                        seconds = train(recipe, folder, resume="auto", progress=progress, **settings).seconds
                    except DivergenceError as error:
                        diverged = str(error)
                    outcome = {"commit": commit, "begun_at": read_json(begun)["commit"]}
                    outcome |= {"diverged": diverged, "seconds": seconds}
                    environment = capture_environment(str(training_device(recipe)))
                    write_json(folder.parent / TRAINED, {**vars(environment), **outcome})
                    begun.unlink()
                    # They hold the optimizer's state, twice the size of the model, and nothing resumes from a finished
                    # run's.
                    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        except Timeout:
            raise ValueError(
                f"Another command is training the run in {str(folder.parent)!r}; wait for it, or choose another "
                "--output."
            ) from None
        run = self.find(key)
        assert run is not None  # it has been there, or was just written
        return run


def run_key(recipe: Recipe, batches: Batches, before: str | None = None, logs: str = "") -> str:
    """Return 16 hexadecimal digits for the origin of a run: the settings of its recipe, its data, the run it starts
    from, and its logged validation, if that is not the usual.

    Data are known by their source and by the first batch of training and of validation: the same text gives the same
    key wherever it lies. If a recipe starts from another run's model, that run's key, `before`, stands for the folder.
    """
    settings = recipe.model_dump(mode="json")
    for name in WITHOUT_EFFECT:
        section, _, key = name.partition(".")
        settings[section].pop(key, None)  # not every kind of data has each
    # What is off unless asked for is left out where nobody has asked: so a setting that is new changes no key.
    for section in ("model", "data", "train"):
        part = getattr(recipe, section)
        for name, field in type(part).model_fields.items():
            if (field.default is None or field.default is False) and getattr(part, name) is field.default:
                settings[section].pop(name, None)
    if before is not None:
        settings["model"]["init_from"] = before
    digest = hashlib.sha256(json.dumps([settings, logs, batches.source], sort_keys=True).encode())
    for batch in (batches.train_batch(1), next(iter(batches.validation_batches()))):
        for name, tensor in sorted(batch.items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]
