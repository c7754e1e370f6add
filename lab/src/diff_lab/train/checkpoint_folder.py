"""Keeps the checkpoints of a run, folders that several processes write and that are complete or not there at all."""

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedTokenizerFast

from diff_lab.train.checkpoint import (
    RunState,
    bytes_of,
    optimizer_tensors,
    save_model,
    save_training_state,
    weights_of,
)
from diff_lab.train.process_errors import gathered, is_first, local_part, on_first, propagate_errors
from diff_transformer.utils import manifest
from diff_transformer.utils.files import (
    clean_up,
    clean_up_all,
    commit,
    free_bytes,
    full_disk,
    present_folders,
    unfinished_path,
)

_PREFIX = "step-"


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their step, the oldest first."""
    folders = present_folders(folder, f"{_PREFIX}*").items()
    numbers = {name.removeprefix(_PREFIX): path for name, path in folders}
    return dict(sorted((int(number), path) for number, path in numbers.items() if number.isdecimal()))


@contextmanager
def collective_directory(target: Path, *, size: int | None = None, intact: str = "") -> Iterator[Path]:
    """A folder that several processes fill and that takes the place of `target` at the end. Called on every process.

    After an error, which must be one of all processes (see `propagate_errors`), `target` is as it was, and nothing else
    is left behind. Where the folder cannot be written, or the disk has less than `size` bytes, OSError says which
    folder, why, and what the user still has (`intact`).
    """
    unfinished = unfinished_path(target)

    def begin() -> None:
        clean_up(target)
        if size is not None and free_bytes(target) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        unfinished.mkdir(parents=True)

    try:
        on_first(begin)
        with propagate_errors():
            if not unfinished.is_dir():
                raise OSError("this process does not see the folder: all of them must share the file system")
        yield unfinished
        on_first(lambda: commit(unfinished, target, replace=True))
    except BaseException as error:
        if is_first():
            clean_up(target)
        if not isinstance(error, (OSError, SafetensorError, CheckpointException)):
            raise
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # of torch: the errors of all processes
            process, (cause, _) = min(error.failures.items())
            cause = cause if process == 0 else OSError(f"Process {process}: {cause}")
        reason = full_disk(cause, target, size) or " ".join(str(cause).split())
        raise OSError(f"{str(target)!r} cannot be written: {reason}{intact and '; '}{intact}.") from error
    on_first(lambda: clean_up(target))


def write_manifest(folder: Path) -> None:
    """Write the manifest, the last file of a folder. Called on every process: each hashes its share of the files."""
    names = local_part(on_first(lambda: manifest.sizes_in(folder)))
    with propagate_errors():
        digests = manifest.digests(folder, names)
    all_digests = {name: digest for each in gathered(digests) for name, digest in each.items()}
    on_first(lambda: manifest.write_manifest(folder, all_digests))


def validation_error(folder: Path) -> str | None:
    """What makes a folder with a manifest incomplete, or which file does not have the SHA-256 that the manifest says.

    None where nothing does. Called on every process, as each reads its share of the files. All get the same answer.
    """
    if reason := on_first(lambda: manifest.why_incomplete(folder)):
        return reason
    sizes = {name: size for name, (size, _) in on_first(lambda: manifest.read_manifest(folder)).items()}
    return next(filter(None, gathered(manifest.why_changed(folder, local_part(sizes)))), None)


class Checkpoints:
    """The folder of a run's checkpoints, `step-000100/` and so on, of which the `keep` newest complete ones stay.

    A checkpoint can be used like a finished model: it holds the configuration and the tokenizer as well. All processes
    must see the same file system; the first one is told about each checkpoint that is passed over.
    """

    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        self.last: Path | None = None  # the newest complete checkpoint that was found or written
        self._damaged: dict[int, str] = {}  # by step, what `newest` found wrong

    def newest(self) -> Path | None:
        """The newest complete checkpoint; None where there is none at all. Called on every process; changes nothing.

        Raises OSError where none of several is complete: to begin anew would lose what they hold.
        """
        self.last, self._damaged = None, {}
        for step, path in reversed(on_first(self._all).items()):
            reason = validation_error(path)
            if reason is None:
                self.last = path
                break
            self._damaged[step] = reason
        if self._damaged and self.last is None:
            reasons = "; ".join(f"{self._path(step).name}: {reason}" for step, reason in self._damaged.items())
            raise OSError(
                f"No checkpoint in {str(self.folder)!r} can be used to go on from ({reasons}): put a complete one "
                "back, or begin anew with --overwrite (in Python overwrite=True)."
            )
        for step, reason in self._damaged.items() if is_first() else ():
            self.tell(f"The checkpoint {str(self._path(step))!r} cannot be used and is passed over: {reason}.")
        return self.last

    def save(
        self,
        state: RunState,
        model: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        tokenizer: PreTrainedTokenizerFast | None,
    ) -> Path:
        """Write a checkpoint of `state.step` and delete those that are too old. Returns its folder.

        Called on every process. Where it cannot be written, the checkpoints before are as they were.
        """
        target = self._path(state.step)
        on_first(lambda: clean_up_all(self.folder, f"{_PREFIX}*"))
        size = bytes_of(weights_of(model).values()) + bytes_of(optimizer_tensors(model, optimizers).values())
        with collective_directory(target, size=size, intact=self.intact()) as folder:
            save_model(folder, model, tokenizer)
            save_training_state(folder, state, model, optimizers)
            write_manifest(folder)
        self.last = target
        self._damaged.pop(state.step, None)
        on_first(lambda: self._delete_old(state.step))
        return target

    def intact(self) -> str:
        """Which checkpoint a failed run can be resumed from, as a part of a message."""
        return "there is no checkpoint" if self.last is None else f"the checkpoint {str(self.last)!r} is intact"

    def _path(self, step: int) -> Path:
        return self.folder / f"{_PREFIX}{step:06d}"

    def _delete_old(self, newest: int) -> None:
        """Delete all complete checkpoints but the newest `keep`, and the damaged ones from before step `newest`."""
        folders = self._all()
        damaged = [step for step, path in folders.items() if step in self._damaged or manifest.why_incomplete(path)]
        old = sorted(folders.keys() - damaged)[: -self.keep]
        for number in (*old, *(number for number in damaged if number < newest)):
            shutil.rmtree(folders[number])

    def _all(self) -> dict[int, Path]:
        return checkpoints_by_step(self.folder)
