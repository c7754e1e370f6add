"""Plans what a recipe would take (operations, memory, communication, days, disk) without data or weights."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from diff_lab.data import token_dtype
from diff_lab.train.data_kinds import TextData
from diff_lab.train.distributed import DistributedContext, Kind
from diff_lab.train.hardware import Gpu, gpu_named, peak_flops
from diff_lab.train.recipe import Recipe, build_config
from diff_lab.train.step_costs import (
    FLOAT,
    Communication,
    Memory,
    ModelSizes,
    StepLayout,
    communication,
    flops_per_token,
    meta_model,
    planned_memory,
)
from diff_transformer.attention_types import head_dim
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.ops.backends import explain
from diff_transformer.ops.cpu.cpu_backend import is_faster
from diff_transformer.ops.narrow_heads import are_narrow
from diff_transformer.ops.triton.triton_backend import WIDEST_KEY

GIB = 1 << 30
CPU = "cpu"
PARALLEL = ("ddp", "fsdp", "tensor")
# Of a GPU's memory: what the driver, the libraries and the processes' connections take, and the share of the rest
# that the allocator's gaps leave over.
CONTEXT, USABLE = 1.5 * GIB, 0.95


@dataclass(frozen=True)
class Way:
    """Training with or without gradient checkpointing."""

    checkpointing: bool
    memory: Memory  # a device's at the recipe's accumulation, in the moment when it holds most
    fits: bool | None  # whether the device has as much; None where its memory is not known
    accumulation: int | None  # the smallest one with which it fits, if any; the micro-batch is the largest then
    micro_batch: int | None  # sequences at a time with that one


class Plan:
    """What a recipe would take on one or more GPUs of :data:`diff_lab.train.hardware.GPUS`, or on this "cpu".

    Memory is that of training steps of layers that are not compiled (compiled ones keep less), by the formulas of
    :mod:`diff_lab.train.step_costs`. Validation is not in it, which keeps nothing for gradients and takes
    16,384 tokens of text or one sequence at a time, of a generated task a whole batch; nor is saving. A number that is
    not known is None.

    Args:
        gpu, gpus: the name, and how many.
        parallel: what they do together, "ddp", "fsdp" or "tensor"; the recipe's unless given, "ddp" where it has none.
        utilisation: which share of the peak the model's own operations reach where communication takes no time.
        network: bytes/s of the network between machines for each GPU; that of the vendor's own machine unless given.

    Raises:
        ValueError: an unknown GPU; numbers that make no sense; what training refuses: a batch that cannot be divided
            among them, or a precision in which they cannot train; or a vocabulary that only the data would tell.
    """

    def __init__(
        self,
        recipe: Recipe,
        gpu: str = CPU,
        gpus: int = 1,
        *,
        parallel: str | None = None,
        utilisation: float = 0.4,
        network: float | None = None,
    ) -> None:
        if gpus < 1:
            raise ValueError(f"the number of GPUs must be 1 or more, got {gpus}.")
        if not 0 < utilisation <= 1:
            raise ValueError(f"the utilisation must lie above 0 and not above 1, got {utilisation}.")
        if network is not None and not 0 < network < float("inf"):
            raise ValueError(f"the network's bandwidth must be above 0, got {network}.")
        if parallel is not None and parallel not in PARALLEL:
            raise ValueError(f"parallel must be one of {', '.join(map(repr, PARALLEL))}, got {parallel!r}.")
        device = None if gpu == CPU else gpu_named(gpu)
        if device is None and gpus > 1:
            raise ValueError(f"several processes are planned for GPUs, got {gpus} without the name of one.")
        settings, length = recipe.train, recipe.data.length
        config = build_config(recipe, vocabulary(recipe))
        several: Any = parallel or settings.parallel
        self.kind: Kind = "single" if gpus == 1 else "ddp" if several == "auto" else several  # what they do together
        planned_on = torch.device(CPU if device is None else "cuda")
        context = DistributedContext(self.kind, planned_on, 0, gpus, settings.precision)
        context.check(recipe)

        self.name, self.attention_type = recipe.name, recipe.model.attention_type
        self.data = recipe.data.describe()  # in a few words
        self.precision, self.accumulation = settings.precision, settings.accumulation
        self.checkpointing = settings.gradient_checkpointing
        self.steps, self.tokens_per_step = settings.steps, recipe.data.batch_size * length
        self.device, self.devices = CPU if device is None else device.name, gpus
        sizes = ModelSizes(meta_model(config), settings)
        self.parameters = sizes.total
        self.flops_per_token = flops_per_token(config, length)
        rows = recipe.data.batch_size // context.dp_size
        self.micro_batch = rows // settings.accumulation  # sequences that a device takes at a time
        half, text = settings.precision != "no", recipe.data if isinstance(recipe.data, TextData) else None
        packed = text is not None and text.isolate_documents  # all rows as one
        layout = StepLayout(
            kind=self.kind,
            devices=gpus,
            sequences=self.micro_batch,
            length=length,
            parts=settings.accumulation,
            half=half,
            checkpointing=settings.gradient_checkpointing,
            backend=backend(config, device, half, packed, self.micro_batch * length if packed else length),
            on_cpu=device is None,
        )

        self.assumed = utilisation  # the share of the peak that the model's own operations reach without communication
        # What they reach at best: less where communication takes longer than the computation that can run meanwhile.
        self.utilisation = utilisation
        self.communication: Communication | None = None  # what each GPU receives in a step; None for one alone
        # Bytes/s that a GPU would have to receive, and of them through its network card, for the communication to take
        # no time beside the computation; None where the next operation waits for it.
        self.needed: tuple[float, float] | None = None
        self.days: float | None = None  # the run's at `utilisation`; evaluation and saving come on top
        self.peak: float | None  # FLOP/s of a device
        if device is None:
            self.peak = peak_flops(torch.device("cpu"), settings.precision)
        else:
            self.peak = device.peak(settings.precision)
            self.communication = communication(config, sizes, layout, device.link, network or device.network)
        if self.peak is not None:
            computation = self.tokens_per_step * self.flops_per_token / (gpus * self.peak * utilisation)  # seconds
            if self.communication is not None:
                self.utilisation = self.communication.best(utilisation, computation)
                if window := self.communication.overlap * computation:
                    self.needed = (self.communication.received / window, self.communication.through_network / window)
            self.days = settings.steps * (computation * utilisation / self.utilisation) / 86400

        self.checkpoint_bytes = sizes.total * FLOAT + sizes.state  # of the weights and the optimizer state
        # Of those that stay and the one that is being written.
        self.checkpoints_bytes = self.checkpoint_bytes * (settings.keep_checkpoints + 1)
        # Of the tokens that the run reads. The cache holds all of the text: less than this where the text is read
        # several times, more where the run ends before its end. None for data that is made as it is read.
        self.token_cache_bytes: int | None = None
        if text is not None:
            tokens = settings.steps * self.tokens_per_step
            self.token_cache_bytes = tokens * token_dtype(config.vocab_size).itemsize
        self.device_memory = _available_memory(device)  # bytes that a device has for the plan

        def way(checkpointing: bool) -> Way:
            here = replace(layout, checkpointing=checkpointing)
            memory = planned_memory(config, sizes, here)
            if self.device_memory is None:
                return Way(checkpointing, memory, None, None, None)
            for parts in (parts for parts in range(1, rows + 1) if rows % parts == 0):
                smaller = planned_memory(config, sizes, replace(here, sequences=rows // parts, parts=parts))
                if smaller.total <= self.device_memory:
                    return Way(checkpointing, memory, memory.total <= self.device_memory, parts, rows // parts)
            return Way(checkpointing, memory, False, None, None)

        self.ways = (way(False), way(True))  # without and with gradient checkpointing


def vocabulary(recipe: Recipe) -> int:
    """Tokens of a recipe's vocabulary; "bpe" may find fewer. Raises ValueError where only the data would tell."""
    return recipe.model.vocab_size or recipe.data.vocabulary()


def backend(config: DiffTransformerConfig, gpu: Gpu | None, half: bool, packed: bool, queries: int) -> str:
    """What computes attention on a device: see :func:`diff_transformer.ops.backends.choose` and, for the Transformer,
    :mod:`diff_transformer.ops.narrow_heads` and, where its documents are packed,
    :func:`diff_transformer.model.masks.attend_by_document`.
    """
    is_cuda = gpu is not None and gpu.device_names.startswith("NVIDIA")  # not ROCm, which torch gives the same name
    has_kernel = explain("cpu")["cpu"] is None and is_faster()
    if not config.spec.differential:
        if gpu is None and has_kernel and not config.attention_dropout and are_narrow(head_dim(config), queries):
            return "cpu"
        return "document" if packed and not (half and is_cuda) else "sdpa"
    if gpu is None:
        return "cpu" if has_kernel else "blockwise"
    return "triton" if is_cuda and head_dim(config) <= WIDEST_KEY else "sdpa"


def _available_memory(gpu: Gpu | None) -> float | None:
    """Bytes that a plan may use of a device; None where that is not known."""
    if gpu is not None:
        return (gpu.memory_gib * GIB - CONTEXT) * USABLE
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not POSIX, or a system without these names
        return None
