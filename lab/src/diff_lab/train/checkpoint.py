"""Writes and reads everything that a run needs to resume, in safetensors and JSON. Nothing is pickled.

A tensor of a model may be the same on all processes, or a `DTensor`, of which each process has a part. A checkpoint is
read by any number of processes in any sharding, whichever wrote it.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.checkpoint as dcp
from pydantic import AliasChoices, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from diff_lab.train.distributed import reshard
from diff_lab.train.process_errors import balanced_parts, count, gathered, on_first, propagate_errors, rank
from diff_transformer.utils.files import read_json
from diff_transformer.utils.suggestions import quoted

_STATE, _OPTIMIZER, _RANDOM = "state.json", "optimizer", "random.safetensors"


@dataclass(config=ConfigDict(strict=True, extra="forbid"))
class RunState:
    """The progress of a run, which a checkpoint holds beside weights, optimizer state and random numbers."""

    data: str  # a fingerprint, so that a run is not resumed on other data
    step: Annotated[int, Field(ge=0)] = 0  # how many optimizer steps are done
    seconds: Annotated[float, Field(allow_inf_nan=False)] = 0.0  # the time they took
    scaler: dict[str, Any] | None = None  # the state of fp16's loss scaler
    # Its state after the first step, as JSON; "watch" in the checkpoints of earlier versions.
    spike_detector: dict[str, Any] | None = Field(
        default=None, validation_alias=AliasChoices("spike_detector", "watch")
    )
    # What the log is to say of the last step beside its evaluation, where the run was stopped before that was done.
    unlogged: dict[str, Any] | None = None


def _read_state(file: Path) -> RunState:
    try:
        return RunState(**read_json(file))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        value = "missing" if problem["type"] == "missing" else quoted(problem["input"])
        reason = f"{problem['loc'][0]} is {value}; {problem['msg']}"
    except (ValueError, TypeError) as error:  # not JSON, or not an object
        reason = str(error).rstrip(".")
    raise ValueError(f"{str(file)!r} is not the state of a run: {reason}.")


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
    """A model's parameters and buffers by name. Tied parameters appear under their first name alone."""
    reshard(model)
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def optimizer_tensors(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state by "parameter/key".

    Not `torch.distributed.checkpoint.state_dict`, which takes a step of its own where an optimizer has no state yet,
    as after skipped first steps; the resumed run would count one step more.
    """
    names = _parameter_names(model)
    return {
        f"{names[id(parameter)]}/{key}": tensor
        for optimizer in optimizers
        for parameter, entries in optimizer.state.items()
        for key, tensor in entries.items()
    }


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors in full size, on all processes together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def save_model(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Write configuration, weights and tokenizer as `from_pretrained` reads them. Called on every process.

    The model is without DDP's wrapper. Its weights become one safetensors file, written by the first process; those of
    a model that is sharded (FSDP2, tensor parallelism) a file for each process.
    """
    weights = weights_of(model)
    sharded = _has_dtensors(weights)

    def save() -> None:
        with without_progress_bars():
            if sharded:
                _save_configuration(folder, model)
            else:
                model.save_pretrained(folder, max_shard_size="1TB")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    on_first(save)
    if sharded:
        write_weights(folder, weights)


def save_training_state(
    folder: Path, state: RunState, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Write what a checkpoint holds beside the model: optimizers, random numbers, progress. Called on every process."""
    tensors, random = optimizer_tensors(model, optimizers), _random_states()
    if _has_dtensors(tensors):
        write_sharded(folder / _OPTIMIZER, tensors)
    else:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        on_first(lambda: save_file(contiguous, folder / f"{_OPTIMIZER}.safetensors"))
    on_first(lambda: save_file(random, folder / _RANDOM))
    on_first(lambda: (folder / _STATE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8"))


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> RunState:
    """Restore a model's weights, the optimizers and torch's random numbers in place, and return the run's progress.

    Called on every process, with the model without DDP's wrapper, sharded or not, whichever way it was when it was
    saved, and with optimizers made on its parameters, as the saved ones were. Where `state.json` is broken, or the
    weights are those of another model, ValueError is raised and nothing has been restored.
    """
    with propagate_errors():
        run_state = _read_state(checkpoint / _STATE)
        try:
            files = TensorFiles(checkpoint)
            optimizer_files = TensorFiles(checkpoint / _OPTIMIZER) if (checkpoint / _OPTIMIZER).is_dir() else files
            random = load_file(checkpoint / _RANDOM)
            weights = weights_of(model)
            _check_same_model(checkpoint, weights, files.shapes)
            # All optimizers are read before the weights change, so that what fails leaves the model as it was.
            states = [_read_optimizer(model, optimizer, optimizer_files) for optimizer in optimizers]
            files.read(weights)
        except SafetensorError as error:
            raise OSError(f"The checkpoint {str(checkpoint)!r} cannot be read: {error}.") from error
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        torch.set_rng_state(_random_state_of_rank(random, "cpu"))
        if torch.cuda.is_available() and "cuda/0" in random:
            torch.cuda.set_rng_state(_random_state_of_rank(random, "cuda"))
    return run_state


def _check_same_model(checkpoint: Path, weights: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    saved = {name: tuple(shape) for name, shape in shapes.items() if "/" not in name}  # the others are no weights
    for name in sorted(expected.keys() | saved.keys()):
        if expected.get(name) != saved.get(name):
            difference = f"has shape {saved.get(name)} in it and {expected.get(name)} here"
            if name not in expected or name not in saved:
                in_it, here = ("" if name in names else "not " for names in (saved, expected))
                difference = f"is {in_it}in it, and {here}here"
            raise ValueError(f"The checkpoint {str(checkpoint)!r} is not one of this model: {name} {difference}.")


def _read_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, files: "TensorFiles"
) -> dict[int, dict[str, Tensor]]:
    """The state of an optimizer by the number of its parameters, as its state dictionary has it."""
    names = _parameter_names(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {names[id(parameter)]: number for number, parameter in enumerate(parameters)}
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


def _parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters by their `id`."""
    reshard(model)
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _save_configuration(folder: Path, model: Any) -> None:
    """Write the files that `save_pretrained` writes, which would gather all weights on the first process."""
    config = copy.deepcopy(model.config)
    # FSDP2 puts a class of its own before the model's.
    config.architectures = [next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule)).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _random_states() -> dict[str, Tensor]:
    """The states of every process' generators, by "device/rank"."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"{device}/{number}": s for number, each in enumerate(gathered(states)) for device, s in each.items()}


def _random_state_of_rank(random: dict[str, Tensor], device: str) -> Tensor:
    """A process that the saved run did not have resumes with the first one's: a run seeds all alike."""
    return random.get(f"{device}/{rank()}", random[f"{device}/0"])


def _has_dtensors(tensors: dict[str, Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def write_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write each process' parts of tensors into a file of its own. Called on every process."""
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write sharded tensors in full size, in the files and with the index that `from_pretrained` reads.

    Called on every process. Each writes about the same number of bytes, and holds two copies of those and the one
    tensor that is being gathered.
    """
    parts = balanced_parts({name: bytes_of([tensor]) for name, tensor in tensors.items()}, min(count(), len(tensors)))
    files = {name: part + 1 for name, part in parts.items()}  # the writer counts from 1
    local = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if parts[name] == rank():
            local[name] = full.cpu()
    dcp.save(local, storage_writer=HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files))


class TensorFiles:
    """The tensors in the safetensors files of a folder: by name their full `shapes` and their `dtypes`."""

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        tensors: dict[str, Any] = self._metadata.state_dict_metadata
        self.shapes: dict[str, torch.Size] = {name: entry.size for name, entry in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in tensors.items()}

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, or this process' parts of them, in place. No process waits for another."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
