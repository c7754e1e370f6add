"""Plans the cost of a recipe (operations, memory, messages, time, disk) without data, weights or GPUs.

Memory and messages are counted: one rank runs a step with fake tensors.
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import astuple, dataclass, field
from typing import Any
from unittest.mock import patch
from weakref import finalize

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from diff_lab.train.distributed import DistributedContext
from diff_lab.train.recipe import Recipe, build_config
from diff_lab.train.step import build_optimizers, enable_checkpointing
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.model.chunked_loss import chunk_tokens
from diff_transformer.parallel import Context, Messages, context_parallel, one_rank_of, shard, tensor_parallel

GIB = 1 << 30
CPU = "cpu"
# Of a GPU's memory: what the driver, the libraries and the processes' connections take, and the share of the rest
# that the allocator's gaps leave over.
CONTEXT, USABLE = 1.5 * GIB, 0.95
MACHINE = 8  # GPUs
_RESIZE = torch.UntypedStorage.resize_
_PROPAGATE = ShardingPropagator._propagate_tensor_meta_non_cached


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


@dataclass(frozen=True)
class Layout:
    """How many ranks hold the same weights, share the weights, share a sequence, and share each layer."""

    replicas: int = 1
    shards: int = 1
    context: int = 1
    tensor: int = 1

    def __str__(self) -> str:
        named = zip(("replicas", "shards", "CP", "TP"), astuple(self), strict=True)
        return " × ".join(f"{ranks} {name}" for name, ranks in named if ranks > 1) or "whole"


@dataclass(frozen=True)
class Counted:
    """A rank's memory in bytes when most is held, and its messages in a pass forward and backward."""

    layout: Layout
    micro_batch: int  # sequences at a time, of the ranks that share them
    checkpointing: bool
    weights: int  # in float32
    gradients: int
    optimizer: int
    activations: int = 0  # all else, copies of weights in half precision and gathered ones among it
    messages: dict[str, tuple[int, int]] = field(default_factory=dict)  # number, and bytes in full size, by kind

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


class Memory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in its block while they live: `now`, and at the `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes again with the rank's own tensors
        result = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if id(storage) not in self._sizes:
                finalize(storage, self._set, id(storage), None)
                self._set(id(storage), storage.nbytes())
        return result

    def resize(self, storage: torch.UntypedStorage, size: int) -> Any:
        """Resize a storage, as FSDP2 does to free and to gather weights, which torch dispatches to nobody."""
        if id(storage) in self._sizes:
            self._set(id(storage), size)
        return _RESIZE(storage, size)

    def _set(self, key: int, size: int | None) -> None:
        self.now += (size or 0) - self._sizes.pop(key, 0)
        self.peak = max(self.peak, self.now)
        if size is not None:
            self._sizes[key] = size


def _propagate(*given: Any) -> Any:
    with _disable_current_modes():  # an operator's shapes, at its first call, of whole tensors without memory
        return _PROPAGATE(*given)


def count(
    recipe: Recipe,
    config: DiffTransformerConfig,
    layout: Layout,
    micro_batch: int,
    checkpointing: bool,
    limit: float | None = None,
) -> Counted:
    """Count a step of one rank: the last pass of its accumulation, and the optimizers' step.

    Layers are not compiled, and attention is the processor's; a GPU's keeps one more output of each layer.

    Args:
        micro_batch: sequences at a time, of the ranks that share them.
        limit: a device's bytes: weights, gradients and optimizers' state that are more are counted alone.

    Raises:
        ValueError: the model or the length cannot be divided so.
    """
    replicas, shards, context, tensor = astuple(layout)
    half, length = recipe.train.precision == "bf16", recipe.data.length
    # No masks, which transformers cannot see to be needless: fake positions have no values.
    more: dict[str, Any] = {"attention_mask": dict.fromkeys(config.types_of_layers())}
    messages, memory = Messages(), Memory()
    with ExitStack() as stack:
        stack.enter_context(one_rank_of(replicas * shards * context * tensor))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # a view, which nothing changes in place
        sizes = (replicas, shards * context, tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "own", "tensor"))
        model: Any = meta_model(config).train()
        head, layers = model.lm_head, model.model.layers
        if context > 1:
            context_parallel(layers)
            names = ("replicas", "shards", "context", "tensor")
            more["context"] = Context(init_device_mesh("cpu", astuple(layout), mesh_dim_names=names)["context"], length)
        if tensor > 1:
            ends = {"embedding": model.model.embed_tokens, "norm": model.model.norm, "head": head}
            tensor_parallel(layers, mesh["tensor"], **ends, sequence_parallel=True, gather_logits=False)
        if checkpointing:
            enable_checkpointing(model)
        if shards * context > 1:
            over = mesh["replicas", "own"] if replicas > 1 else mesh["own"]
            shard(model, layers, over, param_dtype=torch.bfloat16 if half else None)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(torch.UntypedStorage, "resize_", lambda *given: memory.resize(*given)))
        stack.enter_context(patch.object(ShardingPropagator, _PROPAGATE.__name__, _propagate))
        stack.enter_context(memory)
        model.to_empty(device="cpu")
        model.tie_weights()
        weights, optimizers, parameters = memory.now, build_optimizers(model, recipe.train), list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        gradients = memory.now - weights
        for optimizer in optimizers:
            optimizer.step()
        own = (weights, gradients, memory.now - weights - gradients)
        if limit is not None and sum(own) > limit:
            return Counted(layout, micro_batch, checkpointing, *own)
        if replicas * shards * micro_batch == recipe.data.batch_size:  # the first pass of a step finds no gradients
            model.zero_grad()
        tokens = torch.zeros(micro_batch, length // context, dtype=torch.long)
        positions = torch.arange(length // context).expand_as(tokens)
        stack.enter_context(messages)
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=half))
        stack.enter_context(loss_parallel() if tensor > 1 else nullcontext())
        model.lm_head = torch.nn.Identity()  # it is applied to some tokens at a time
        hidden = model(tokens, position_ids=positions, use_cache=False, **more).logits
        top = hidden.detach().requires_grad_()
        rows = chunk_tokens(config.vocab_size, on_cpu=False)
        for part, labels in zip(top.flatten(0, 1).split(rows), tokens.flatten().split(rows), strict=True):
            F.cross_entropy(head(part).float(), labels).backward()
        hidden.backward(top.grad)
        if replicas > 1 and shards * context == 1:  # as DDP
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
    sent = {f"{key[0]} of {key[1]}": (number, messages.bytes[key]) for key, number in messages.count.items()}
    return Counted(layout, micro_batch, checkpointing, *own, memory.peak - sum(own), sent)


def layouts(gpus: int, recipe: Recipe) -> Iterator[Layout]:
    """Yield the layouts of a recipe's batch on so many GPUs, those with fewer messages between machines first."""
    for parts in (1, 2, 4, 8):
        data = gpus // parts
        if gpus % parts or recipe.data.batch_size % data:
            continue
        for context, tensor in dict.fromkeys([(1, parts), (parts, 1), (max(1, parts // 2), min(parts, 2))]):
            is_ddp = parts == 1 and gpus <= MACHINE and recipe.train.parallel != "fsdp"
            for shards in dict.fromkeys([1, min(data, MACHINE // parts), data]):
                if data % shards == 0 and (is_ddp or shards * context > 1 or data == 1):
                    yield Layout(data // shards, shards, context, tensor)


class Plan:
    """The cost of a recipe on one or more GPUs of `GPUS`, or on this "cpu".

    The first layout that fits is `chosen`, None without one; `counted` are all that were tried. Validation and saving
    are not in it, nor what a GPU's libraries allocate. A number that is not known is None, as is the time on the CPU.

    Args:
        gpu, gpus: the name, and how many.
        utilisation: which share of the peak the model's own operations reach.

    Raises:
        ValueError: an unknown GPU; a batch or a model that cannot be divided among them, or a precision in which they
            cannot train; or a vocabulary that only the data would tell.
    """

    def __init__(self, recipe: Recipe, gpu: str = CPU, gpus: int = 1, *, utilisation: float = 0.4) -> None:
        device = GPUS.get(re.sub(r"[\s_-]+", "-", gpu.strip().lower()))  # "RTX 4090" is "rtx-4090"
        if device is None and gpu != CPU:
            raise ValueError(f"GPU {gpu!r} is not known; known ones are {', '.join(GPUS)}.")
        if device is None and gpus > 1:
            raise ValueError(f"several processes are planned for GPUs, got {gpus} without the name of one.")
        settings, length = recipe.train, recipe.data.length
        context = DistributedContext("single", torch.device("meta"), 0, 1, settings.precision)
        context.check(recipe.data.batch_size, settings.accumulation)
        config = build_config(recipe, recipe.model.vocab_size or recipe.data.vocabulary())
        self.name, self.attention_type = recipe.name, recipe.model.attention_type
        self.data = recipe.data.describe()  # in a few words
        self.precision, self.checkpointing = settings.precision, settings.gradient_checkpointing
        self.batch_size, self.steps = recipe.data.batch_size, settings.steps
        self.tokens_per_step = self.batch_size * length
        self.device, self.devices = CPU if device is None else device.name, gpus
        self.parameters = meta_model(config).num_parameters()
        self.flops_per_token = flops_per_token(config, length)
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
        self.counted: list[Counted] = []
        self.chosen = next((each for each in self._tried(recipe, config, gpus) if self.fits(each)), None)
        if not self.counted:
            raise ValueError(
                f"data.batch_size={recipe.data.batch_size} and the model cannot be divided among {gpus} GPUs, of which "
                "1, 2, 4 or 8 may share a sequence or a layer."
            )
        first = self.counted[0]
        parts = first.layout.shards * first.layout.context * first.layout.tensor
        self.checkpoint_bytes = (first.weights + first.optimizer) * parts

    def fits(self, counted: Counted) -> bool:
        """Return whether a device has as much memory, as far as it is known."""
        return self.device_memory is None or counted.total <= self.device_memory

    def _tried(self, recipe: Recipe, config: DiffTransformerConfig, gpus: int) -> Iterator[Counted]:
        """Yield what is counted: each layout as the recipe says, with checkpointing, and a sequence at a time."""
        for layout in layouts(gpus, recipe):
            rows = recipe.data.batch_size // (layout.replicas * layout.shards)
            planned = max(1, rows // recipe.train.accumulation)
            for ways in dict.fromkeys([(planned, self.checkpointing), (planned, True), (1, True)]):
                with suppress(ValueError):  # a model that is not divided so
                    self.counted.append(count(recipe, config, layout, *ways, self.device_memory))
                    yield self.counted[-1]


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
    windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.types_of_layers()]
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
