"""Plans the cost of a recipe (operations, memory, time, disk) by formulas, without data or weights."""

import os
import re
from dataclasses import dataclass, field

import torch

from diff_lab.train.distributed import DistributedContext, Kind
from diff_lab.train.recipe import Recipe, build_config
from diff_lab.train.step import build_optimizers
from diff_transformer.attention_types import head_dim
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.model.chunked_loss import chunk_tokens

GIB = 1 << 30
CPU = "cpu"
# Of a GPU's memory: what the driver, the libraries and the processes' connections take, and the share of the rest
# that the allocator's gaps leave over.
CONTEXT, USABLE = 1.5 * GIB, 0.95
FLOAT = 4  # bytes
ADAMW, MUON = 8, 4  # bytes of an optimizer's state for each parameter: two moments, or one


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str  # what a user calls it
    # A regular expression for all of torch's name. A part of a GPU (MIG) has a longer one, and so have weaker relatives
    # ("… Laptop GPU").
    device_names: str
    memory_gib: float  # as torch sees it; the driver keeps some of what is built in
    half: float  # FLOP/s of dense bf16 matrix products that add up in float32
    float32: float  # and of float32 ones, off the tensor cores

    def peak(self, precision: str) -> float:
        """Return the FLOP/s in a precision of a recipe; "no" is float32."""
        return self.float32 if precision == "no" else self.half


# FLOP/s from the vendors' datasheets; where they print the number for sparse matrices, half of it.
_DATASHEETS = (
    Gpu("b200", r"NVIDIA B200", 178, 2250e12, 75e12),
    Gpu("h200", r"NVIDIA H200", 139.8, 989.5e12, 67e12),
    Gpu("h100", r"NVIDIA H100 80GB HBM3", 79.1, 989.5e12, 67e12),
    Gpu("h100-pcie", r"NVIDIA H100 PCIe", 79.1, 756e12, 51e12),
    Gpu("a100-80", r"NVIDIA A100(-SXM4-80GB|-PCIE-80GB| 80GB PCIe)", 79.1, 312e12, 19.5e12),
    Gpu("a100-40", r"NVIDIA A100-(SXM4|PCIE)-40GB", 39.4, 312e12, 19.5e12),
    Gpu("mi300x", r"AMD Instinct MI300X( OAM)?", 191.5, 1307.4e12, 163.4e12),
    Gpu("l40s", r"NVIDIA L40S", 44.4, 362e12, 91.6e12),
    Gpu("l4", r"NVIDIA L4", 22, 121e12, 30.3e12),
    Gpu("a10g", r"NVIDIA A10G", 22, 70e12, 35e12),
    Gpu("rtx-5090", r"NVIDIA GeForce RTX 5090", 31.4, 209.5e12, 104.8e12),
    Gpu("rtx-4090", r"NVIDIA GeForce RTX 4090", 23.5, 165.2e12, 82.6e12),
    Gpu("rtx-3090", r"NVIDIA GeForce RTX 3090", 23.6, 71e12, 35.6e12),
)
GPUS = {gpu.name: gpu for gpu in _DATASHEETS}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the peak FLOP/s of a GPU in a precision of a recipe, of which utilisation is a share.

    It is the datasheet's number. None for a GPU that is not in the table, for a part of one, and for other devices.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((gpu.peak(precision) for gpu in _DATASHEETS if re.fullmatch(gpu.device_names, name)), None)


@dataclass
class Memory:
    """A device's memory in a step, in bytes."""

    weights: float  # in float32, and copies in half precision that stay from forward to backward
    gradients: float
    optimizer: float
    activations: float  # what autograd saves for the backward pass, and a layer and the loss while they are computed
    total: float = field(init=False)

    def __post_init__(self) -> None:
        self.total = float(sum(vars(self).values()))


@dataclass(frozen=True)
class Way:
    """Training with or without gradient checkpointing."""

    checkpointing: bool
    memory: Memory  # a device's at the recipe's accumulation
    fits: bool | None = None  # whether the device has as much; None where its memory is not known
    accumulation: int | None = None  # the smallest one with which it fits, if any; the micro-batch is the largest then
    micro_batch: int | None = None  # sequences at a time with that one


class Plan:
    """The cost of a recipe on one or more GPUs of `GPUS`, or on this "cpu".

    Memory is that of training steps of layers that are not compiled (compiled ones keep less), to about a quarter.
    Validation and saving are not in it. A number that is not known is None, as is the time on the CPU.

    Args:
        gpu, gpus: the name, and how many.
        utilisation: which share of the peak the model's own operations reach.

    Raises:
        ValueError: an unknown GPU; a batch that cannot be divided among them, or a precision in which they cannot
            train; or a vocabulary that only the data would tell.
    """

    def __init__(self, recipe: Recipe, gpu: str = CPU, gpus: int = 1, *, utilisation: float = 0.4) -> None:
        device = GPUS.get(re.sub(r"[\s_-]+", "-", gpu.strip().lower()))  # "RTX 4090" is "rtx-4090"
        if device is None and gpu != CPU:
            raise ValueError(f"GPU {gpu!r} is not known; known ones are {', '.join(GPUS)}.")
        if device is None and gpus > 1:
            raise ValueError(f"several processes are planned for GPUs, got {gpus} without the name of one.")
        settings, length = recipe.train, recipe.data.length
        config = build_config(recipe, recipe.model.vocab_size or recipe.data.vocabulary())
        self.kind: Kind = "single"  # what the GPUs do together
        if gpus > 1:
            self.kind = "fsdp" if settings.parallel == "fsdp" else "ddp"
        context = DistributedContext(self.kind, torch.device("meta"), 0, gpus, settings.precision)
        context.check(recipe.data.batch_size, settings.accumulation)

        self.name, self.attention_type = recipe.name, recipe.model.attention_type
        self.data = recipe.data.describe()  # in a few words
        self.precision, self.accumulation = settings.precision, settings.accumulation
        self.checkpointing = settings.gradient_checkpointing
        self.steps, self.tokens_per_step = settings.steps, recipe.data.batch_size * length
        self.device, self.devices = CPU if device is None else device.name, gpus
        model = meta_model(config)
        self.parameters = model.num_parameters()
        state = 0  # bytes of the optimizers' state
        for optimizer in build_optimizers(model, settings):
            each = MUON if isinstance(optimizer, torch.optim.Muon) else ADAMW
            state += each * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        self.checkpoint_bytes = self.parameters * FLOAT + state
        self.flops_per_token = flops_per_token(config, length)
        rows = recipe.data.batch_size // gpus
        self.micro_batch = rows // settings.accumulation  # sequences that a device takes at a time
        self.utilisation = utilisation
        self.peak = None if device is None else device.peak(settings.precision)  # FLOP/s of a device
        self.tokens_per_second: float | None = None  # of all devices; evaluation and saving come on top
        self.days: float | None = None
        if self.peak is not None:
            self.tokens_per_second = gpus * self.peak * utilisation / self.flops_per_token
            self.days = self.steps * self.tokens_per_step / self.tokens_per_second / 86400
        self.device_memory: float | None = None  # bytes that a device has for the plan
        if device is not None:
            self.device_memory = (device.memory_gib * GIB - CONTEXT) * USABLE
        elif hasattr(os, "sysconf"):  # POSIX
            self.device_memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))

        share = 1 / gpus if self.kind == "fsdp" else 1.0  # of all parameters
        ends = 2 * config.vocab_size * config.hidden_size if self.kind == "fsdp" else 0  # stay gathered, unlike layers
        half = settings.precision != "no"
        weights = FLOAT * (share * self.parameters + ends)
        if half and self.kind != "fsdp":  # autocast keeps copies
            weights += 2 * multiplied_weights(config)

        def way(checkpointing: bool) -> Way:
            def memory(parts: int) -> Memory:
                activations = activation_bytes(config, rows // parts * length, half, device is None, checkpointing)
                return Memory(weights, share * self.parameters * FLOAT, share * state, activations)

            planned, available = memory(settings.accumulation), self.device_memory
            if available is None:
                return Way(checkpointing, planned)
            for parts in (parts for parts in range(1, rows + 1) if rows % parts == 0):
                if memory(parts).total <= available:
                    return Way(checkpointing, planned, planned.total <= available, parts, rows // parts)
            return Way(checkpointing, planned, False)

        self.ways = (way(False), way(True))  # without and with gradient checkpointing


def meta_model(config: DiffTransformerConfig) -> LanguageModel:
    """Build the model on the meta device, which takes no memory."""
    with torch.device("meta"):
        return language_model_class(config)(config)


def flops_per_token(config: DiffTransformerConfig, length: int) -> float:
    """Count the operations of a training step for each token of sequences of `length` tokens.

    A multiply-add is two operations. The backward pass takes twice the forward's matrix products, so

        6 · weights + 6 · Σ over layers of products · (visible pairs of the layer / length)

    `weights` are those that every token is multiplied with; looking an embedding up is free. `products` are the
    multiply-adds of attention for each visible (query, key) of all heads, with A heads of width d in the Transformer:

        softmax, dex   2·A·d   a score and a value for each head
        diff           2·A·d   two scores for each of A/2 heads, one product of A1 − λA2 with values of width 2d
        diff_grouped   A·d + 2·(A − G)·d   a score for each of A maps, and for each of A − G heads one product
        diff_v2        3·A·d   two scores for each of A heads, one product with values of width d

    The maps are subtracted before the product with V, as Equation 1 is written: a backend that multiplies V once for
    each map does more and is not credited for it, so DIFF takes as many operations as the Transformer. A sliding window
    leaves a query no more than `sliding_window` pairs, and an encoder's query sees all keys; its output head is counted
    for every token. Not counted: norms, softmax, rotary embedding, activations, λ.
    """
    windows = [
        config.sliding_window if layer_type == "sliding_attention" else None for layer_type in config.types_of_layers()
    ]
    pairs = sum(visible_pairs(length, window) if config.is_causal else length**2 for window in windows)
    return 6.0 * (multiplied_weights(config) + config.spec.attention_products(config) * pairs / length)


def multiplied_weights(config: DiffTransformerConfig) -> int:
    """Count the weights that every token is multiplied with, the output head among them."""
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    ends = config.hidden_size * config.vocab_size
    return config.spec.attention_weights(config) + config.num_hidden_layers * feed_forward + ends


def visible_pairs(length: int, window: int | None) -> int:
    """Count the visible pairs of a causal sequence: query i sees i + 1 keys, at most `window`."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def activation_bytes(
    config: DiffTransformerConfig, tokens: int, half: bool, on_cpu: bool, checkpointing: bool
) -> float:
    """Estimate the bytes that a device holds of so many tokens, from forward to backward and at its peak.

    Of a layer autograd saves the tensors of two norms and the stream between the layers in float32, and in the
    precision of matrix products q, k, v, the output of each map, and four rows of the feed-forward network.
    """
    described, hidden = config.spec, config.hidden_size
    size = 2 if half else FLOAT  # of a number that a matrix product reads
    cached = described.cached_width(head_dim(config))
    outputs = (1 + described.differential + config.has_headwise_norm) * described.heads(config)
    attention = described.query_heads(config) * head_dim(config) + (2 * described.key_heads(config) + outputs) * cached
    layer = 4 * hidden * FLOAT + (3 * hidden + attention + 4 * config.intermediate_size) * size
    saved = config.num_hidden_layers * (hidden * FLOAT if checkpointing else layer)
    # The chunked cross-entropy holds the gradients of its input and of the head, and the logits of a chunk.
    rows = min(tokens, chunk_tokens(config.vocab_size, on_cpu))
    loss = (tokens + config.vocab_size) * hidden * FLOAT + rows * config.vocab_size * 2 * FLOAT
    return tokens * saved + max(tokens * layer, loss)
