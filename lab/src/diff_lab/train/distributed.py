"""Divides a run among several ranks: the model (DDP, FSDP2), the rows of a batch, and the sum of their gradients."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from diff_lab.data.batches import flattened
from diff_lab.train.collectives import plain_connection_errors
from diff_lab.train.recipe import Precision, Recipe, TrainRecipe
from diff_transformer.parallel import shard


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


Kind = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True)
class DistributedContext:
    """A rank's view of the ranks that train a model together, and the operations between them.

    It is rank `rank` of `count`, on `device`. `kind` says how the work is divided: "single" for one process.
    """

    kind: Kind
    device: torch.device
    rank: int
    count: int
    precision: Precision

    @classmethod
    def from_env(cls, settings: TrainRecipe) -> "DistributedContext":
        """Join the processes that a launcher started; without one the process trains alone.

        Raises ValueError if the launcher and the recipe do not go together, and ConnectionError if the others do not
        join within the recipe's `timeout_minutes`. :meth:`check` looks at the rest of the recipe.
        """
        for name in ("DeepSpeed", "Megatron-LM"):
            if parse_flag_from_env(f"ACCELERATE_USE_{name.upper().replace('-', '_')}"):
                raise ValueError(
                    f"The launcher is configured for {name}, which training does not use: train.parallel is "
                    "'ddp' or 'fsdp'."
                )
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in ("no", settings.precision):
            raise ValueError(
                f"The launcher asks for mixed precision {precision!r} and the recipe for train.precision "
                f"{settings.precision!r}: make them equal, or leave the launcher's out."
            )
        if parse_flag_from_env("ACCELERATE_USE_FSDP") and settings.parallel not in ("auto", "fsdp"):
            raise ValueError(
                f"The launcher asks for FSDP and the recipe for train.parallel {settings.parallel!r}: make "
                "them equal, or leave the launcher's out."
            )
        names = ("RANK", "WORLD_SIZE", "PMI_SIZE", "MASTER_ADDR", "MASTER_PORT")
        found = ", ".join(f"{name}={value}" for name, value in os.environ.items() if name.endswith(names))
        # Without a GPU, accelerate connects processes only where the CPU is asked for; else each would train alone.
        cpu = settings.device == "cpu" or not torch.accelerator.is_available()
        try:
            launched = int(os.environ.get("WORLD_SIZE", "1"))
            with plain_connection_errors(settings.timeout_minutes):
                state = PartialState(cpu=cpu, timeout=timedelta(minutes=settings.timeout_minutes))
        except ValueError as error:
            problem = f"The environment has {found or 'no RANK'}, which starts no run ({' '.join(str(error).split())})"
            raise ValueError(f"{problem}: start with torchrun, or unset them to train in one process.") from error
        count = state.num_processes
        if launched > count:
            raise ValueError(
                f"{launched} processes were launched, but accelerate connects this one with {count - 1} others: "
                "start them with torchrun, or check the launcher's configuration."
            )
        kind = settings.parallel
        if kind == "auto":
            kind = "fsdp" if parse_flag_from_env("ACCELERATE_USE_FSDP") else "ddp"
        return cls("single" if count == 1 else kind, state.device, state.process_index, count, settings.precision)

    def check(self, recipe: Recipe) -> None:
        """Raise ValueError if the processes cannot train in this precision, or cannot share a recipe's batch."""
        if self.precision == "fp16" and self.device.type == "cpu":
            raise ValueError("train.precision 'fp16' needs a GPU; on a CPU it is 'no' or 'bf16'.")
        if self.precision == "fp16" and self.kind == "fsdp":
            raise ValueError(
                "train.precision 'fp16' runs in one process or with train.parallel 'ddp', not with 'fsdp': take 'bf16'."
            )
        batch_size, accumulation = recipe.data.batch_size, recipe.train.accumulation
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

    def local_batch(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's rows of a batch."""
        return {name: tensor.chunk(self.count)[self.rank] for name, tensor in batch.items()}

    def model_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor | int]:
        """Put rows of a batch on this rank's device as the model takes them: packed documents in one row."""
        return {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in flattened(batch).items()
        }

    def no_gradient_exchange(self, call: nn.Module) -> AbstractContextManager[None]:
        """Keep DDP from exchanging gradients in a block: a later part of the same batch exchanges their sum.

        FSDP2 could do so as well, but would keep the gradients of all parameters on every process meanwhile.
        """
        return call.no_sync() if isinstance(call, DistributedDataParallel) else nullcontext()

    def autocast(self) -> torch.autocast:
        """Return the recipe's precision for the operations that allow it."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "no")

    def sum(self, numbers: Tensor) -> Tensor:
        """Add up numbers, in place, over the ranks."""
        if self.count > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self.count > 1:
            dist.barrier()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
        """Scale the gradients down to a total norm of `max_norm` if it is larger; return the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def describe(self, model: Any, call: nn.Module) -> str:
        """Describe the layout that the model really uses: "2 processes (gloo, cpu): FSDP2, 3 units, 51 % on each"."""
        precision = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast"}[self.precision]
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        if self.count == 1:
            return f"1 process ({device}), {precision}"
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        share = sum(part.numel() for part in parts) / sum(p.numel() for p in model.parameters())
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        how = "DDP" if isinstance(call, DistributedDataParallel) else f"FSDP2, {units} units"
        processes = f"{self.count} processes ({dist.get_backend()}, {device})"
        return f"{processes}: {how}, {math.ceil(100 * share)} % of the parameters on each, {precision}"
