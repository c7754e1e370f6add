"""Checkpoints: everything a run needs to go on, in safetensors and JSON. Nothing is pickled.

What one process or several have written, in whichever way they shared the model, any number of processes can read.
"""

import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from diff_transformer.files import follow_umask
from diff_transformer.train.optimizer_state import by_name, empty_state, reshard, tensors_of
from diff_transformer.train.run_state import RunState, read_state
from diff_transformer.train.tensor_files import TensorFiles, bytes_of, is_split, write_plain, write_split, write_weights
from diff_transformer.train.together import gathered, is_first, rank, together
from diff_transformer.train.whole_folder import (
    candidates,
    clean_up,
    left_behind,
    seal,
    why_damaged,
    why_torn,
    written_whole,
)

__all__ = ["Checkpoints", "RunState", "load_checkpoint", "save_model", "weights_of", "written_whole"]

_PREFIX = "step-"
_STATE, _OPTIMIZER, _RANDOM = "state.json", "optimizer", "random.safetensors"


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws a progress bar for each file; training shows its own, or none."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a model: parameters and buffers by name, what is tied under its first name alone."""
    reshard(model)
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def save_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write configuration, weights and tokenizer as `from_pretrained` reads them. Called on every process.

    Args:
        folder: is there already; for one that is whole or not there, see `written_whole`.
        model: no wrapper (of DDP, say) around it. One that is the same on all processes becomes one safetensors file,
            written by the first; one that is split (FSDP2, tensor parallelism) as many as there are processes.
        tokenizer: None for data that never was text.
    """
    weights = weights_of(model)
    split = is_split(weights.values())
    with together():
        if is_first():
            with without_bars():
                if split:
                    _save_configuration(folder, model)
                else:
                    model.save_pretrained(folder, max_shard_size="1TB")
                    follow_umask(folder.glob("*.safetensors"))
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    if split:
        write_weights(folder, weights)


class Checkpoints:
    """The folder of a run's checkpoints, `step-000100/` and so on; only the `keep` newest complete ones stay.

    A checkpoint can be used like a finished model: it holds the configuration and the tokenizer as well. It is
    complete with its manifest `complete.json`, which has the size and the SHA-256 of every file.

    Args:
        folder: may be missing. All processes must see the same file system there.
        keep: how many checkpoints stay.
        tell: is told, in the first process, which checkpoint is passed over and why.

    Attributes:
        last: the newest complete checkpoint that `newest` found or `save` wrote; None before.
    """

    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        self.last: Path | None = None
        self._damaged: dict[int, str] = {}  # by step, what `newest` found wrong

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None where there is none at all. Called on every process; changes nothing.

        Raises:
            OSError: there are checkpoints, but none is complete: to begin anew would lose what they hold.
        """
        with together():
            found = self._all() if is_first() else {}
        self.last, self._damaged = None, {}
        for step, path in reversed(gathered(found)[0].items()):
            reason = why_damaged(path)
            if reason is None:
                self.last = path
                break
            self._damaged[step] = reason
        if self._damaged and self.last is None:
            wrong = "; ".join(f"{self._path(step).name}: {why}" for step, why in self._damaged.items())
            raise OSError(
                f"No checkpoint in {str(self.folder)!r} can be used to go on from ({wrong}): put a complete one back, "
                "or begin anew with --overwrite (in Python overwrite=True)."
            )
        for step, why in self._damaged.items():
            if is_first():
                self.tell(f"The checkpoint {str(self._path(step))!r} cannot be used and is passed over: {why}.")
        return self.last

    def save(
        self,
        state: RunState,
        model: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        tokenizer: PreTrainedTokenizerFast | None,
    ) -> Path:
        """Write a checkpoint of `state.step` and delete those that are too old. Called on every process.

        Args: as `save_model`; each optimizer's parameters are the model's.

        Returns:
            The checkpoint's folder.

        Raises:
            OSError: it cannot be written, as where the disk is full; the checkpoints before are as they were.
        """
        final = self._path(state.step)
        moments = tensors_of(model, optimizers)
        split = is_split(moments.values())
        random = _random_state()
        with together():
            if is_first():
                for target in left_behind(self.folder, f"{_PREFIX}*"):
                    clean_up(target)
        room = bytes_of(weights_of(model).values()) + bytes_of(moments.values())
        with written_whole(final, room=room, intact=self.intact()) as folder:
            save_model(folder, model, tokenizer)
            if split:
                write_split(folder / _OPTIMIZER, moments)
            else:
                write_plain(folder / f"{_OPTIMIZER}.safetensors", moments)
            write_plain(folder / _RANDOM, random)
            with together():
                if is_first():
                    (folder / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
            seal(folder)
        self.last = final
        self._damaged.pop(state.step, None)
        with together():
            if is_first():
                self._delete_old(state.step)
        return final

    def intact(self) -> str:
        """What there is to go on from, as a part of a message."""
        return "there is no checkpoint" if self.last is None else f"the checkpoint {str(self.last)!r} is intact"

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    def _delete_old(self, step: int) -> None:
        """Beyond the newest `keep`; what is torn and older than the checkpoint of `step`, which is complete."""
        found = self._all()
        torn = {number for number, path in found.items() if number in self._damaged or why_torn(path) is not None}
        old = sorted(found.keys() - torn)[: -self.keep]
        for number in (*old, *(number for number in torn if number < step)):
            shutil.rmtree(found[number])

    def _all(self) -> dict[int, Path]:
        """By step, the oldest first."""
        found = candidates(self.folder, f"{_PREFIX}*").items()
        numbers = {name.removeprefix(_PREFIX): path for name, path in found}
        return dict(sorted((int(number), path) for number, path in numbers.items() if number.isdecimal()))


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> RunState:
    """Restore a model's weights, the optimizers and torch's random numbers in place. Called on every process.

    Args:
        checkpoint: a complete one, see `Checkpoints.newest`.
        model: no wrapper around it; the same on all processes or split over them, however it was when it was saved.
        optimizers: made on the model's parameters, as those were that were saved.

    Returns:
        How far the run was.

    Raises:
        ValueError: `state.json` is broken, or the weights are those of another model; nothing has been restored.
        OSError: a file cannot be read.
    """
    with together():
        state = read_state(checkpoint / _STATE)
        try:
            _restore(checkpoint, model, optimizers)
        except SafetensorError as error:
            raise OSError(f"The checkpoint {str(checkpoint)!r} cannot be read: {error}.") from error
    return state


def _restore(checkpoint: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    files, folder = TensorFiles(checkpoint), checkpoint / _OPTIMIZER
    weights = weights_of(model)
    here = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    there = {name: tuple(shape) for name, shape in files.shapes.items() if "/" not in name}  # as other names have
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            wrong = f"has shape {there.get(name)} in it and {here.get(name)} here"
            if name not in here or name not in there:
                wrong = f"is {'not ' if name not in there else ''}in it, and {'not ' if name not in here else ''}here"
            raise ValueError(f"The checkpoint {str(checkpoint)!r} is not one of this model: {name} {wrong}.")
    moment_files = TensorFiles(folder) if folder.is_dir() else files
    moments = [empty_state(model, optimizer, moment_files) for optimizer in optimizers]
    random = load_file(checkpoint / _RANDOM)
    files.read(weights)
    for optimizer, state in zip(optimizers, moments, strict=True):
        moment_files.read(by_name(model, optimizer, state))
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(_of_this_process(random, "cpu"))
    if torch.cuda.is_available() and "cuda/0" in random:
        torch.cuda.set_rng_state(_of_this_process(random, "cuda"))


def _save_configuration(folder: Path, model: Any) -> None:
    """As `save_pretrained`, which would put all weights together on the first process."""
    config = copy.deepcopy(model.config)
    # FSDP2 puts a class of its own before the model's.
    config.architectures = [next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _random_state() -> dict[str, Tensor]:
    """Of every process, by "device/rank"."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    return {f"{device}/{process}": s for process, each in enumerate(gathered(own)) for device, s in each.items()}


def _of_this_process(random: dict[str, Tensor], device: str) -> Tensor:
    """A process that was not there before goes on like the first one: a run seeds all alike."""
    return random.get(f"{device}/{rank()}", random[f"{device}/0"])
