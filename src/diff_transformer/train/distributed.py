"""What several processes do with one run: who they are, what each has of the model, and what they add up.

Data parallelism (DDP, FSDP2) gives each process its rows of a batch; tensor parallelism gives all of them the whole
batch and each some of the heads. Whatever is used is read off the model afterwards (:meth:`Processes.describe`).
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import distributed as transformers_distributed

from diff_transformer.model.parallel import check_ranks
from diff_transformer.train.recipe import Recipe, build_config
from diff_transformer.train.run_folder import START
from diff_transformer.train.schema import TrainRecipe
from diff_transformer.train.sharding import is_split, local, shard
from diff_transformer.train.standstill import plain_connection_errors

Kind = Literal["single", "ddp", "fsdp", "tensor"]

# What a launcher's configuration may ask for and this loop does not do.
_FOREIGN = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them.

    Attributes:
        kind: what they do together; "single" where there is one.
        device: this process' device.
        rank, count: which process this is, of how many.
        precision: the recipe's.
    """

    kind: Kind
    device: torch.device
    rank: int
    count: int
    precision: Literal["no", "bf16", "fp16"]

    @classmethod
    def of(cls, settings: TrainRecipe) -> "Processes":
        """Join the processes that a launcher started, or be alone.

        Raises:
            ValueError: the launcher asks for what the recipe does not, or the device cannot do what it asks for.
            ConnectionError: the others do not come within the recipe's `timeout_minutes`.
        """
        _check_launcher(settings)
        launched = int(os.environ.get("WORLD_SIZE", "1"))
        # Without a GPU, accelerate connects processes only where the CPU is asked for; else each would train alone.
        cpu = settings.device == "cpu" or not torch.accelerator.is_available()
        with plain_connection_errors(settings.timeout_minutes):
            state = PartialState(cpu=cpu, timeout=timedelta(minutes=settings.timeout_minutes))
        count = state.num_processes
        if launched > count:
            raise ValueError(
                f"{launched} processes were launched, but accelerate connects this one with {count - 1} others: "
                "start them with torchrun, or check the launcher's configuration."
            )
        kind = _kind(settings) if count > 1 else "single"
        if settings.precision == "fp16" and state.device.type == "cpu":
            raise ValueError("train.precision 'fp16' needs a GPU; on a CPU it is 'no' or 'bf16'.")
        if settings.precision == "fp16" and kind in ("fsdp", "tensor"):
            raise ValueError(
                f"train.precision 'fp16' runs in one process or with train.parallel 'ddp', not with {kind!r}: "
                "take 'bf16'."
            )
        return cls(kind, state.device, state.process_index, count, settings.precision)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def shares(self) -> int:
        """Into how many parts a batch is divided among the processes."""
        return self.count if self.kind in ("ddp", "fsdp") else 1

    def check(self, recipe: Recipe) -> None:
        """Raises ValueError where a recipe's model or batch cannot be divided among the processes."""
        batch_size, accumulation = recipe.data.batch_size, recipe.train.accumulation
        if self.kind == "tensor":
            check_ranks(self.count, build_config(recipe, vocab_size=1))
            if "tp_size" not in getattr(transformers_distributed.DistributedConfig, "__dataclass_fields__", {}):
                raise ValueError("train.parallel 'tensor' needs a later release of transformers: pip install -U it.")
        if batch_size % (self.shares * accumulation):
            raise ValueError(
                f"data.batch_size={batch_size} cannot be divided among {self.shares} processes and "
                f"train.accumulation={accumulation}: it must be a multiple of {self.shares * accumulation}."
            )

    def spread(self, model: Any, folder: Path, draw: Callable[[Any], None]) -> tuple[Any, nn.Module]:
        """Give this process its part of a model in float32 that is the same on every process.

        Args:
            model: on the CPU; for "fsdp" it may be on the meta device.
            folder: the run's; what tensor parallelism passes through a file is for a moment there.
            draw: gives a model its first weights; called for one that was on the meta device and has room for its
                parts now.

        Returns:
            The model, and the module to call in training: the same, but for DDP's wrapper.
        """
        if self.kind == "tensor":
            model = self._load_split(model, folder)
        elif self.kind == "fsdp":
            on_meta = any(parameter.is_meta for parameter in model.parameters())
            shard(model, self.device.type, self.count, self.precision)
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

    def _load_split(self, model: Any, folder: Path) -> Any:
        """transformers spreads a model by its plan while it loads one, so there has to be one to load."""
        start = folder / START
        if self.is_first:
            shutil.rmtree(start, ignore_errors=True)
            model.save_pretrained(start)
        self.wait()
        plan: Any = transformers_distributed.DistributedConfig(tp_size=self.count)
        split = type(model).from_pretrained(start, dtype=torch.float32, distributed_config=plan)
        self.wait()
        if self.is_first:
            shutil.rmtree(start)
        return split.train()

    def rows(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This process' rows of a batch."""
        if self.shares == 1:
            return batch
        return {name: tensor.chunk(self.shares)[self.rank] for name, tensor in batch.items()}

    @contextmanager
    def no_gradient_exchange(self, call: nn.Module, wanted: bool) -> Iterator[None]:
        """While `wanted`, DDP's gradients stay where they are: a later part of the same batch exchanges the sum.

        FSDP2 could do so as well, and would keep the gradients of the whole model on every process meanwhile.
        """
        with call.no_sync() if isinstance(call, DistributedDataParallel) and wanted else nullcontext():
            yield

    def autocast(self) -> torch.autocast:
        """The recipe's precision for the operations that allow it."""
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype=dtype, enabled=self.precision != "no")

    def sum(self, numbers: Tensor) -> Tensor:
        """Numbers that each process has its share of, added up over the processes. Theirs are the same."""
        if self.shares > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        if self.count == 1:
            return flag
        flags = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            dist.barrier()

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
        """Scale the gradients down to `max_norm` if they are longer all together; returns how long they were.

        A gradient that is split counts with its parts on all processes, one that is not with its value on any.
        """
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])  # what all have, what each has a piece of
        for parameter in parameters:
            if parameter.grad is not None:
                parts[is_split(parameter.grad)].append(local(parameter.grad))
        whole, split = (torch.nn.utils.get_total_norm(tensors).to(self.device).square() for tensors in parts)
        if parts[1]:
            dist.all_reduce(split)
        norm = (whole + split).sqrt()
        if max_norm is not None:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for tensor in parts[0] + parts[1]:
                tensor.mul_(scale)
        return float(norm)

    def describe(self, model: Any, call: nn.Module) -> str:
        """What is really used, read off the model: "2 processes (gloo, cpu): FSDP2, 3 units, 51 % on each"."""
        precision = {"no": "float32", "bf16": "bfloat16 autocast", "fp16": "float16 autocast"}[self.precision]
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        if self.count == 1:
            return f"1 process ({device}), {precision}"
        share = sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        if isinstance(call, DistributedDataParallel):
            how = "DDP"
        elif units:
            how = f"FSDP2, {units} units"
        else:
            how = "tensor parallelism"
        where = f"{self.count} processes ({dist.get_backend()}, {device})"
        return f"{where}: {how}, {math.ceil(100 * share)} % of the parameters on each, {precision}"


def is_first_process() -> bool:
    """Whether this process is the one that speaks for all: of those that a launcher started, the one of rank 0."""
    return os.environ.get("RANK", "0") == "0"


def _check_launcher(settings: TrainRecipe) -> None:
    """Raises ValueError where the launcher's configuration and the recipe do not go together."""
    for variable, name in _FOREIGN.items():
        if os.environ.get(variable, "false").lower() in ("true", "1"):
            raise ValueError(
                f"The launcher is configured for {name}, which training does not use: train.parallel is "
                "'ddp', 'fsdp' or 'tensor'."
            )
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", settings.precision):
        raise ValueError(
            f"The launcher asks for mixed precision {precision!r} and the recipe for train.precision "
            f"{settings.precision!r}: make them equal, or leave the launcher's out."
        )
    if _launcher_shards() and settings.parallel not in ("auto", "fsdp"):
        raise ValueError(f"The launcher asks for FSDP and the recipe for train.parallel {settings.parallel!r}.")


def _launcher_shards() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")


def _kind(settings: TrainRecipe) -> Kind:
    if settings.parallel != "auto":
        return settings.parallel
    return "fsdp" if _launcher_shards() else "ddp"
