"""Divides a run among several ranks (the model, the rows of a batch) and exchanges values and errors between them."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from diff_lab.data.batches import flattened
from diff_transformer.parallel import shard

T = TypeVar("T")
Kind = Literal["single", "ddp", "fsdp"]


def rank() -> int:
    """Return the number of this process among those of the run; 0 if there is one."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_rank0() -> bool:
    """Return whether this process is the one that writes, moves and deletes files for all."""
    return rank() == 0


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value; each is pickled on its way. Called on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank0(compute: Callable[[], T]) -> T:
    """Compute a value on rank 0 and return it, or raise its error, on every rank. Called on every rank."""
    with propagate_errors():
        value: Any = compute() if is_rank0() else None
    return all_gather_object(value)[0]


@contextmanager
def propagate_errors() -> Iterator[None]:
    """Raise an exception of one rank on every rank, so that none waits for ever. Called on every rank.

    At the end of the block the ranks wait for each other. Inside, none may wait for another: one that failed would
    leave it waiting. The rank that failed raises its own error; the others a ValueError, or an OSError for any other
    error, whose message names that rank's process.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    kind = ValueError if isinstance(error, ValueError) else OSError
    errors = all_gather_object(None if error is None else (kind, str(error) or type(error).__name__))
    if error is not None:
        raise error
    for process, remote in enumerate(errors):
        if remote is not None:
            remote_kind, message = remote
            raise remote_kind(f"Process {process}: {message}")


@contextmanager
def plain_connection_errors(minutes: float) -> Iterator[None]:
    """Raise ConnectionError with one sentence in place of an error of torch's communication.

    `minutes` is how long a process waits for the others.
    """
    try:
        yield
    except RuntimeError as error:
        # Gloo has no class of its own for its errors; they begin with the place in its source.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise ConnectionError(
            "The other ranks of the run cannot be reached: one of them has ended, or has given no answer for "
            f"train.timeout_minutes={minutes:g}. Its own messages say why; the same command with --resume auto resumes "
            "from the newest checkpoint."
        ) from error


@contextmanager
def materialized(module: nn.Module) -> Iterator[None]:
    """Give a module its own sharded parameters in full size, uninitialised on the CPU, for the block to fill.

    Afterwards each shard holds this rank's part of its parameter's numbers.
    """
    shards: dict[str, Any] = {name: part for name, part in module._parameters.items() if isinstance(part, DTensor)}
    full = {name: nn.Parameter(torch.empty(part.shape, dtype=part.dtype)) for name, part in shards.items()}
    module._parameters.update(full)
    yield
    for name, part in shards.items():
        replicated = [Replicate()] * part.device_mesh.ndim
        drawn = DTensor.from_local(full[name].detach().to(part.device), part.device_mesh, replicated, run_check=False)
        part.to_local().detach().copy_(drawn.redistribute(placements=part.placements).to_local())
    module._parameters.update(shards)


def reshard(model: nn.Module) -> None:
    """Put the sharded parameters of an FSDP2 model back in place after a forward pass that no backward pass follows.

    FSDP2 keeps the outermost unit's weights unsharded until then, and they are not the parameters of any optimizer.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True)
class DistributedContext:
    """A rank's view of the ranks that train a model together, and the operations between them.

    It is rank `rank` of `count`, on `device`. `kind` says how the work is divided: "single" for one process.
    `precision` is the recipe's.
    """

    kind: Kind
    device: torch.device
    rank: int
    count: int
    precision: str

    @classmethod
    def from_env(cls, parallel: str, precision: str, device: str, timeout_minutes: float) -> "DistributedContext":
        """Join the processes that torchrun, or a launcher with its variables, started; without one train alone.

        Raises ValueError if variables are missing or the launcher is configured for an engine of its own, and
        ConnectionError if the others do not join within `timeout_minutes`. :meth:`check` looks at the recipe.
        """
        for name in ("DEEPSPEED", "MEGATRON_LM", "FSDP"):
            if os.environ.get(f"ACCELERATE_USE_{name}", "false") != "false":
                raise ValueError(
                    f"The launcher is configured for {name}: take that out of its configuration, and say "
                    "train.parallel=ddp or train.parallel=fsdp."
                )
        if (mixed := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", precision):
            raise ValueError(
                f"The launcher is configured for mixed precision {mixed!r}, and train.precision is {precision!r}: take "
                "that out of its configuration, and say train.precision=bf16."
            )
        accelerator = None if device == "cpu" else torch.accelerator.current_accelerator(check_available=True)
        place = torch.device("cpu")
        if accelerator is not None:
            place = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
            torch.accelerator.set_device_index(place)
        if os.environ.get("WORLD_SIZE", "1") != "1" and not dist.is_initialized():
            backend = dist.get_default_backend_for_device(place)
            with plain_connection_errors(timeout_minutes):
                dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
        if not dist.is_initialized():
            return cls("single", place, 0, 1, precision)
        kind: Kind = "fsdp" if parallel == "fsdp" else "ddp"
        return cls(kind, place, dist.get_rank(), dist.get_world_size(), precision)

    def check(self, batch_size: int, accumulation: int) -> None:
        """Raise ValueError if the processes cannot train in this precision, or cannot share a recipe's batch."""
        if self.precision == "fp16":
            raise ValueError("train.precision 'fp16' trains nothing any more: it is 'bf16', or 'no' for float32.")
        if batch_size % (self.count * accumulation):
            raise ValueError(
                f"data.batch_size={batch_size} cannot be divided among {self.count} processes and "
                f"train.accumulation={accumulation}: it must be a multiple of {self.count * accumulation}."
            )

    def parallelize(self, model: Any, draw: Callable[[Any], None]) -> tuple[Any, nn.Module]:
        """Give this rank its part of a float32 model that is the same on every rank, on the CPU.

        For "fsdp" it may be on the meta device: `draw` then gives it its first weights, once its shards exist. Returns
        the model, and the module to call in training: the same, but for DDP's wrapper.
        """
        if self.kind == "fsdp":
            on_meta = any(parameter.is_meta for parameter in model.parameters())
            # Autocast chooses the precision of each operation, as in one process; layers' weights travel in bfloat16.
            dtype = torch.bfloat16 if self.precision == "bf16" else None
            mesh = init_device_mesh(self.device.type, (self.count,))
            shard(model, model.model.layers, mesh, param_dtype=dtype)
            if on_meta:
                model.to_empty(device=self.device)
                model.tie_weights()
                draw(model)
        else:
            model.to(self.device)
        if self.kind != "ddp":
            return model, model
        devices = None if self.device.type == "cpu" else [self.device]
        return model, DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def rows(self, batch_size: int) -> slice:
        """Return this rank's rows of a batch, which the ranks can share evenly."""
        own = batch_size // self.count
        return slice(self.rank * own, (self.rank + 1) * own)

    def model_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor | int]:
        """Put rows of a batch on this rank's device as the model takes them: packed documents in one row."""
        return {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in flattened(batch).items()
        }

    def autocast(self) -> torch.autocast:
        """Return the recipe's precision for the operations that allow it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up numbers, in place, over the ranks."""
        if self.count > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def describe(self) -> str:
        """Describe the layout: "2 processes (gloo, cpu): FSDP, float32"."""
        precision = "bfloat16 autocast" if self.precision == "bf16" else "float32"
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        if self.count == 1:
            return f"1 process ({device}), {precision}"
        return f"{self.count} processes ({dist.get_backend()}, {device}): {self.kind.upper()}, {precision}"
