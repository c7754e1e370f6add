"""The folder of a run: who may write into it, and what may be deleted."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from diff_transformer.train.recipe import Recipe, differences, dump_recipe, load_recipe
from diff_transformer.train.start import check_start

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
MODEL = "model"
START = ".unfinished-start"  # weights on their way to several processes
LOCK = ".lock"
DIVERGENCE = "divergence.json"
# The recipe goes last: as long as it is there, the folder is known as ours.
_UNFINISHED_MODELS = tuple(f".{why}-{MODEL}" for why in ("unfinished", "replaced"))
_OURS = (START, METRICS, TENSORBOARD, CHECKPOINTS, MODEL, *_UNFINISHED_MODELS, DIVERGENCE, RECIPE)
_UNFINISHED_RECIPE = f".unfinished-{RECIPE}"
_BEGUN = {_UNFINISHED_RECIPE, LOCK}  # all that is in the folder of a run that was killed when it began
_NAMED = 4  # differing settings that a message names
_FREE = ("train.timeout_minutes ",)  # what may change when a run goes on, as no number of it depends on that
_HEADING = "# A training run of diff-transformer, every setting spelled out.\n"

# "auto": where there is a run.
Resume = bool | Literal["auto"]


def is_resumed(folder: Path, resume: Resume) -> bool:
    """Whether a run in `folder` goes on, or begins.

    Raises:
        ValueError: `resume` is neither a truth value nor "auto".
    """
    if resume not in (True, False, "auto"):
        raise ValueError(f"resume is True, False or 'auto', got {resume!r}.")
    return is_run_folder(folder) if resume == "auto" else bool(resume)


def check_run_folder(folder: Path, recipe: Recipe, *, resume: Resume, overwrite: bool) -> None:
    """Say why a run of `recipe` cannot have `folder`, or cannot start from the model it names. Changes nothing.

    Raises:
        ValueError: both `resume` and `overwrite` are asked for; or the run to resume had another recipe.
        FileNotFoundError: there is no run to resume; "auto" begins one.
        FileExistsError: the folder holds a run (and neither is asked for), or something that is not a run.
    """
    if resume and overwrite:
        raise ValueError("A run is either resumed or overwritten, not both.")
    is_run = is_run_folder(folder)
    if is_resumed(folder, resume):
        if not is_run:
            raise FileNotFoundError(f"There is no run to resume in {str(folder)!r}.")
        changed = [text for text in differences(load_recipe(folder / RECIPE), recipe) if not text.startswith(_FREE)]
        if changed:
            more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            raise ValueError(
                f"The run in {str(folder)!r} was started with another recipe; (then, now) differ in: "
                f"{', '.join(changed[:_NAMED])}{more}; choose another --output (in Python output_dir) or replace it "
                "with --overwrite (overwrite=True)."
            )
        return
    if is_run and not overwrite:
        raise FileExistsError(
            f"The output folder {str(folder)!r} already holds a run; "
            "choose another --output (in Python output_dir), go on with --resume (resume=True), or replace it with "
            "--overwrite (overwrite=True)."
        )
    if not is_run and folder.exists() and not (folder.is_dir() and {p.name for p in folder.iterdir()} <= _BEGUN):
        raise FileExistsError(f"{str(folder)!r} exists and is not a run of ours, so nothing is written there.")
    check_start(recipe)


def begin_run_folder(folder: Path, recipe: Recipe) -> None:
    """Make `folder`, which `check_run_folder` has allowed, ready for a new run of `recipe`.

    Overwriting deletes what a run writes (`recipe.yaml`, `metrics.jsonl`, `tensorboard/`, `checkpoints/`, `model/`)
    and nothing else, and only in a folder whose `recipe.yaml` a run has written.
    """
    if is_run_folder(folder):
        for name in _OURS:
            _delete(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed when it is whole: with half of one the folder would be nobody's.
    (folder / _UNFINISHED_RECIPE).write_text(_HEADING + dump_recipe(recipe), encoding="utf-8")
    os.replace(folder / _UNFINISHED_RECIPE, folder / RECIPE)


def require_run_folder(folder: Path) -> None:
    """Raises FileNotFoundError where the folder of a run that goes on has been removed, or moved away."""
    if not folder.is_dir():
        raise FileNotFoundError(f"The output folder {str(folder)!r} was removed during training.")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other process from training in `folder`, until this one is through with it or dead.

    Raises:
        ValueError: another one trains there now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process trains in {str(folder)!r} now: wait for it, or end it.") from None
    except NotImplementedError:  # a file system without locks
        yield
        return
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def is_run_folder(folder: Path) -> bool:
    """Whether a training run has written this folder."""
    recipe = folder / RECIPE
    return recipe.is_file() and recipe.read_text(encoding="utf-8", errors="replace").startswith(_HEADING)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
