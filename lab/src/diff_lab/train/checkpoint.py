"""Writes and reads the checkpoints of a run in safetensors and JSON: complete or not there at all, nothing pickled.

A tensor of a model may be the same on all ranks, or a `DTensor`, of which each rank has a part. A checkpoint is read by
any number of ranks in any sharding, whichever wrote it. A function called on one rank is called on all of them; they
must see the same file system.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from diff_lab.files import full_disk
from diff_lab.train.distributed import all_gather_object, is_rank0, on_rank0, propagate_errors, rank, reshard
from diff_transformer.utils import manifest
from diff_transformer.utils.files import clean_up, clean_up_all, commit, present_folders, read_json, unfinished_path

_PREFIX = "step-"  # of the folder of a checkpoint
STATE, _OPTIMIZER, _RANDOM = "state.json", "optimizer", "random.safetensors"


@dataclass
class RunState:
    """The progress of a run, which a checkpoint holds beside weights, optimizer state and random numbers."""

    data: str  # a fingerprint, so that a run is not resumed on other data
    step: int = 0  # how many optimizer steps are done
    seconds: float = 0.0  # the time they took
    spike_detector: dict[str, Any] | None = None  # its state after the first step, as JSON
    unlogged: dict[str, Any] | None = None  # the step's metrics, if its evaluation failed


def read_state(checkpoint: Path) -> RunState:
    """Read the progress of a run from a checkpoint of this version, or of earlier ones, which hold more."""
    saved = read_json(checkpoint / STATE)
    detector = saved.get("spike_detector", saved.get("watch"))
    return RunState(saved["data"], saved["step"], saved["seconds"], detector, saved.get("unlogged"))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a progress bar for each file."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name. Tied parameters appear under their first name alone."""
    reshard(model)
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Return the optimizers' state by "parameter/key".

    Not `torch.distributed.checkpoint.state_dict`, which takes a step of its own if an optimizer has no state yet, as
    after skipped first steps; the resumed run would count one step more.
    """
    reshard(model)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": tensor
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        for key, tensor in entries.items()
    }


def save_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write configuration, weights and tokenizer as `from_pretrained` reads them.

    The model is without DDP's wrapper. Its weights become one safetensors file, which rank 0 writes: of a sharded model
    it holds all of them meanwhile, in the memory of its host.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in weights_of(model).items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if is_rank0():
            weights[name] = full.cpu()

    def save() -> None:
        with without_progress_bars():
            model.save_pretrained(folder, state_dict=weights, max_shard_size="1TB")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    on_rank0(save)


def save_training_state(
    folder: Path, state: RunState, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Write the parts of a checkpoint beside the model: optimizers, every rank's random numbers, progress."""
    tensors = optimizer_tensors(model, optimizers)
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):  # a file for each rank
        writer = HuggingFaceStorageWriter(str(folder / _OPTIMIZER), save_distributed=True)
        dcp.save(dict(tensors), storage_writer=writer)
    else:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        on_rank0(lambda: save_file(contiguous, folder / f"{_OPTIMIZER}.safetensors"))
    here = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        here["cuda"] = torch.cuda.get_rng_state()
    random = {f"{name}/{number}": s for number, each in enumerate(all_gather_object(here)) for name, s in each.items()}
    on_rank0(lambda: save_file(random, folder / _RANDOM))
    on_rank0(lambda: (folder / STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8"))


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> RunState:
    """Restore a model's weights, the optimizers and torch's random numbers in place, and return the run's progress.

    The model is without DDP's wrapper, sharded or not, whichever way it was when it was saved; the optimizers are made
    on its parameters, as the saved ones were. Raises OSError if a file cannot be read; nothing has been restored then.
    """
    with propagate_errors():
        try:
            files = TensorFiles(checkpoint)
            optimizer_files = TensorFiles(checkpoint / _OPTIMIZER) if (checkpoint / _OPTIMIZER).is_dir() else files
            random = load_file(checkpoint / _RANDOM)
            weights = weights_of(model)
            # All optimizers are read before the weights change, so that what fails leaves the model as it was.
            states = [_read_optimizer(model, optimizer, optimizer_files) for optimizer in optimizers]
            files.read(weights)
        except SafetensorError as error:
            raise OSError(f"The checkpoint {str(checkpoint)!r} cannot be read: {error}.") from error
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        # A rank that the saved run did not have resumes with rank 0's numbers: a run seeds all alike.
        torch.set_rng_state(random.get(f"cpu/{rank()}", random["cpu/0"]))
        if torch.cuda.is_available() and "cuda/0" in random:
            torch.cuda.set_rng_state(random.get(f"cuda/{rank()}", random["cuda/0"]))
    return read_state(checkpoint)


def _read_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, files: "TensorFiles"
) -> dict[int, dict[str, Tensor]]:
    """Read the state of an optimizer by the number of its parameters, as its state dictionary has it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {names[parameter]: number for number, parameter in enumerate(parameters)}
    state: dict[int, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for full_name, shape in files.shapes.items():
        name, _, key = full_name.rpartition("/")
        if name in numbers:
            parameter = parameters[numbers[name]].detach()
            # As the parameter is sharded; only a count of steps has another shape.
            like = parameter if shape == parameter.shape else torch.empty(shape)
            tensors[full_name] = torch.empty_like(like, dtype=files.dtypes[full_name])
            state.setdefault(numbers[name], {})[key] = tensors[full_name]
    files.read(tensors)
    return dict(sorted(state.items()))  # as the optimizer itself makes it: what is sharded is written in this order


class TensorFiles:
    """The tensors in the safetensors files of a folder: by name their full `shapes` and their `dtypes`."""

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        tensors: dict[str, Any] = self._metadata.state_dict_metadata
        self.shapes: dict[str, torch.Size] = {name: entry.size for name, entry in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in tensors.items()}

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, or this rank's parts of them, in place. No rank waits for another."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        self._reader.read_data(planner.finish_plan(plan), planner).wait()


def checkpoints_by_step(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder by their step, the oldest first."""
    folders = present_folders(folder, f"{_PREFIX}*").items()
    numbers = {name.removeprefix(_PREFIX): path for name, path in folders}
    return dict(sorted((int(number), path) for number, path in numbers.items() if number.isdecimal()))


@contextmanager
def collective_directory(target: Path, *, intact: str = "") -> Iterator[Path]:
    """Yield a folder for all ranks to fill, which takes the place of `target` at the end.

    After an error, which must be one of all ranks (see `propagate_errors`), `target` is as it was, and nothing else is
    left behind. If the folder cannot be written, OSError names the folder, the reason, and the files that are still
    intact (`intact`).
    """
    unfinished = unfinished_path(target)

    def begin() -> None:
        clean_up(target)
        unfinished.mkdir(parents=True)

    try:
        on_rank0(begin)
        with propagate_errors():
            if not unfinished.is_dir():
                raise OSError("this rank does not see the folder: all ranks must share the file system")
        yield unfinished
        on_rank0(lambda: commit(unfinished, target, replace=True))
    except BaseException as error:
        if is_rank0():
            clean_up(target)
        if not isinstance(error, (OSError, SafetensorError, CheckpointException)):
            raise
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # of torch: the errors of all processes
            process, (cause, _) = min(error.failures.items())
            cause = cause if process == 0 else OSError(f"Process {process}: {cause}")
        reason = full_disk(cause, target) or " ".join(str(cause).split())
        raise OSError(f"{str(target)!r} cannot be written: {reason}{intact and '; '}{intact}.") from error
    on_rank0(lambda: clean_up(target))


class Checkpoints:
    """The folder of a run's checkpoints, `step-000100/` and so on, of which the `keep` newest complete ones stay.

    A checkpoint can be used like a finished model: it holds the configuration and the tokenizer as well. Rank 0 is told
    about each checkpoint that is passed over.
    """

    def __init__(self, folder: Path, keep: int, tell: Callable[[str], None] = warnings.warn) -> None:
        self.folder, self.keep, self.tell = folder, keep, tell
        self.last: Path | None = None  # the newest complete checkpoint that was found or written
        self._damaged: dict[int, str] = {}  # by step, what `newest` found wrong

    def newest(self) -> Path | None:
        """Find the newest complete checkpoint; None if there is none at all. Changes nothing.

        Raises OSError if none of several is complete: to begin anew would lose their progress.
        """

        def find() -> tuple[Path | None, dict[int, str]]:
            damaged: dict[int, str] = {}
            for step, path in reversed(checkpoints_by_step(self.folder).items()):
                reason = manifest.why_incomplete(path) or manifest.why_changed(path)
                if reason is None:
                    return path, damaged
                damaged[step] = reason
            return None, damaged

        self.last, self._damaged = on_rank0(find)
        reasons = {f"{_PREFIX}{step:06d}": reason for step, reason in self._damaged.items()}
        if reasons and self.last is None:
            raise OSError(
                f"No checkpoint in {str(self.folder)!r} can be resumed from "
                f"({'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}): put a complete one "
                "back, or begin anew with --overwrite (in Python overwrite=True)."
            )
        for name, reason in reasons.items() if is_rank0() else ():
            self.tell(f"The checkpoint {str(self.folder / name)!r} cannot be used and is passed over: {reason}.")
        return self.last

    def save(
        self,
        state: RunState,
        model: Any,
        optimizers: Sequence[torch.optim.Optimizer],
        tokenizer: PreTrainedTokenizerFast | None,
    ) -> Path:
        """Write a checkpoint of `state.step` and delete those that are too old. Returns its folder.

        If it cannot be written, the checkpoints before are as they were.
        """
        target = self.folder / f"{_PREFIX}{state.step:06d}"
        on_rank0(lambda: clean_up_all(self.folder, f"{_PREFIX}*"))
        with collective_directory(target, intact=self.intact()) as folder:
            save_model(folder, model, tokenizer)
            save_training_state(folder, state, model, optimizers)
            on_rank0(lambda: manifest.write_manifest(folder, manifest.digests(folder, manifest.sizes_in(folder))))
        self.last = target
        self._damaged.pop(state.step, None)

        def delete_old() -> None:  # and what is damaged from before this one
            folders = checkpoints_by_step(self.folder)
            damaged = {step for step, path in folders.items() if step in self._damaged or manifest.why_incomplete(path)}
            old = sorted(folders.keys() - damaged)[: -self.keep]
            for step in (*old, *(step for step in damaged if step < state.step)):
                shutil.rmtree(folders[step])

        on_rank0(delete_old)
        return target

    def intact(self) -> str:
        """Say which checkpoint a failed run can be resumed from, as a part of a message."""
        return "there is no checkpoint" if self.last is None else f"the checkpoint {str(self.last)!r} is intact"
