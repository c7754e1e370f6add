"""Plans what a recipe would take (operations, memory, communication, days, disk) without data or weights.

Memory is that of a step of training with fake tensors, which have shapes and no numbers, as torch's own tracker counts
it: one rank of N does what it would do among the others, which do not exist.
"""

import functools
import json
import os
from bisect import bisect_left
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diff_lab.data import token_dtype
from diff_lab.train.data_kinds import TextData
from diff_lab.train.distributed import DistributedContext, Kind, local, shard
from diff_lab.train.flops import NODE, Gpu, flops_per_token, gpu_named, peak_flops
from diff_lab.train.recipe import Precision, Recipe, TrainRecipe, build_config
from diff_lab.train.step import build_optimizers
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.model.chunked_loss import chunk_tokens
from diff_transformer.ops.triton.triton_backend import WIDEST_KEY
from diff_transformer.variants import head_dim

GIB = 1 << 30
CPU = "cpu"
PARALLEL = ("ddp", "fsdp", "tensor")
FLOAT = 4  # bytes
# Of a GPU's memory: what the driver, the libraries and the processes' connections take, and the share of the rest
# that the allocator's gaps leave over.
CONTEXT, USABLE = 1.5 * GIB, 0.95


@dataclass(frozen=True)
class Layout:
    """Where and how a step of training runs."""

    kind: Kind  # what several devices do together, or "single"
    devices: int
    sequences: int  # that go through the model at a time on one device
    length: int  # of each
    keeps_gradients: bool  # whether all gradients are there from the beginning: of parts before, or DDP's buckets
    precision: Precision
    checkpointing: bool  # whether a layer is computed again in the backward pass
    optimizer: str
    attention: str  # transformers' name of the implementation
    on_cpu: bool  # where optimizers make tensors of their own; a GPU's run in one kernel


@dataclass(frozen=True)
class Memory:
    """What a device holds at one moment of a step, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # what autograd saves for the backward pass, and autocast's copies of weights
    workspace: float  # what is there for a moment: the loss, a layer's backward pass, weights on their way

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Way:
    """Training with or without gradient checkpointing."""

    checkpointing: bool
    memory: Memory  # a device's at the recipe's accumulation, in the moment when it holds most
    fits: bool | None  # whether the device has as much; None where its memory is not known
    accumulation: int | None  # the smallest one with which it fits, if any; the micro-batch is the largest then
    micro_batch: int | None  # sequences at a time with that one


@dataclass(frozen=True)
class Communication:
    """What each GPU receives in a step, and the least time that it takes with both routes in use at once."""

    received: float  # bytes
    through_network: float  # of them, the bytes that come through its network card
    seconds: float | None  # None where the bandwidth is not known
    overlap: float  # the share of the step's computation that can run meanwhile


class Plan:
    """What a recipe would take on one or more GPUs of :data:`diff_lab.train.flops.GPUS`, or on this "cpu".

    Validation is not in it, which keeps nothing for gradients, nor is saving. A number that is not known is None.

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
        self._gpu = device = None if gpu == CPU else gpu_named(gpu)
        if device is None and gpus > 1:
            raise ValueError(f"several processes are planned for GPUs, got {gpus} without the name of one.")
        settings, length = recipe.train, recipe.data.length
        self._recipe, self._config = recipe, build_config(recipe, vocabulary(recipe))
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
        model = meta_model(self._config)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.flops_per_token = flops_per_token(self._config, length)
        self._rows = recipe.data.batch_size // context.dp_size  # sequences of a device in a step
        self.micro_batch = self._rows // settings.accumulation  # and at a time

        self.assumed = self.utilisation = utilisation  # without communication; with it, at best
        self.communication: Communication | None = None  # None for a device alone
        self.days: float | None = None  # the run's at `utilisation`; evaluation and saving come on top
        # FLOP/s of a device.
        self.peak = peak_flops(planned_on, settings.precision) if device is None else device.peak(settings.precision)
        if device is not None and gpus > 1:
            self.communication = self._communication(model, device.link, network or device.network)
        if self.peak is not None:
            seconds = computation = self.tokens_per_step * self.flops_per_token / (gpus * self.peak * utilisation)
            if self.communication is not None and self.communication.seconds is not None:
                seconds += max(0.0, self.communication.seconds - self.communication.overlap * computation)
            self.utilisation = utilisation * computation / seconds
            self.days = settings.steps * seconds / 86400

        # Of the weights, and of the optimizers' state: AdamW has two numbers for each parameter, Muon one.
        self.checkpoint_bytes = FLOAT * self.parameters
        for optimizer in build_optimizers(model, settings):
            numbers = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
            self.checkpoint_bytes += FLOAT * numbers * (1 if isinstance(optimizer, torch.optim.Muon) else 2)
        # Of those that stay and the one that is being written.
        self.checkpoints_bytes = self.checkpoint_bytes * (settings.keep_checkpoints + 1)
        # Of the tokens that the run reads. The cache holds all of the text: less than this where the text is read
        # several times, more where the run ends before its end. None for data that is made as it is read.
        self.token_cache_bytes: int | None = None
        if isinstance(recipe.data, TextData):
            self.token_cache_bytes = self.steps * self.tokens_per_step * token_dtype(self._config.vocab_size).itemsize
        self.device_memory = _available_memory(device)  # bytes that a device has for the plan

    def memory(self, checkpointing: bool, accumulation: int | None = None) -> Memory:
        """What a device holds when it holds most; with the recipe's accumulation unless given."""
        parts, gpu, config = accumulation or self.accumulation, self._gpu, self._config
        attention = "diff_attention" if gpu is None else "sdpa"
        if gpu is not None and config.described.differential:
            has_kernel = gpu.device_names.startswith("NVIDIA") and head_dim(config) <= WIDEST_KEY
            attention = "diff_attention_triton" if has_kernel else "diff_attention_sdpa"
        layout = Layout(
            kind=self.kind,
            devices=self.devices,
            sequences=self._rows // parts,
            length=self._recipe.data.length,
            keeps_gradients=parts > 1 or self.kind == "ddp",
            precision=self.precision,
            checkpointing=checkpointing,
            optimizer=self._recipe.train.optimizer,
            attention=attention,
            on_cpu=gpu is None,
        )
        return planned_memory(config.to_json_string(use_diff=False), layout)

    def fits(self, checkpointing: bool, accumulation: int | None = None) -> bool | None:
        """Whether a device has as much memory; None where that is not known."""
        if self.device_memory is None:
            return None
        return self.memory(checkpointing, accumulation).total <= self.device_memory

    def way(self, checkpointing: bool) -> Way:
        """The memory with or without checkpointing, and the smallest accumulation with which it fits."""
        memory, fits = self.memory(checkpointing), self.fits(checkpointing)
        if fits is None:
            return Way(checkpointing, memory, None, None, None)
        choices = [parts for parts in range(1, self._rows + 1) if self._rows % parts == 0]
        found = bisect_left(choices, True, key=lambda parts: bool(self.fits(checkpointing, parts)))
        if found == len(choices):
            return Way(checkpointing, memory, fits, None, None)
        return Way(checkpointing, memory, fits, choices[found], self._rows // choices[found])

    def to_json(self) -> str:
        """All of it, with the memory both without and with checkpointing."""
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        ways = [asdict(way) for way in (self.way(False), self.way(True))]
        for way in ways:
            way["memory"]["total"] = sum(way["memory"].values())
        return json.dumps({**public, "ways": ways}, default=vars, indent=1)

    def _communication(self, model: LanguageModel, link: float | None, network: float | None) -> Communication:
        """By formula, with the fastest route that there is; single numbers, as the loss, are left out.

        DDP adds up the float32 gradients once a step, while the last part's backward pass runs. FSDP2 gathers a
        layer's weights for the forward and again for the backward pass of each part, those of the ends once, and
        scatters float32 gradients, while a layer computes. Tensor parallelism adds up the layers' outputs and the
        gradients of their inputs, and gathers the logits twice; the next product waits for each.

        A group of G GPUs in M nodes receives a gathered tensor of S bytes as S·(G − 1)/G on each GPU. Into a node the
        other nodes' part, S·(M − 1)/M, comes once, divided among the network cards of its GPUs. An all-reduce is a
        scatter and a gather.
        """
        config, parts, overlap = self._config, self.accumulation, 1.0
        size = FLOAT if self.precision == "no" else 2
        if self.kind == "ddp":
            gathered = 2.0 * FLOAT * self.parameters
            # Of the computation; with checkpointing the backward pass repeats the forward pass.
            overlap = (3 / 4 if self.checkpointing else 2 / 3) / parts
        elif self.kind == "fsdp":
            of_layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
            gathered = parts * (of_layers * (2 * size + FLOAT) + (self.parameters - of_layers) * 2.0 * FLOAT)
        else:
            styles = list(config.base_model_tp_plan.values())
            outputs, inputs = styles.count("rowwise"), styles.count("colwise")
            outputs += (outputs - 1) * self.checkpointing  # computed again, but for the last, which no gradient needs
            added_up = config.num_hidden_layers * (outputs * size + inputs * FLOAT)
            added_up += 2 * FLOAT  # the embedding, and the gradient of the head's input
            of_token = 2.0 * config.hidden_size * added_up + 2 * config.vocab_size * size
            gathered, overlap = self.tokens_per_step * of_token, 0.0
        nodes = -(-self.devices // NODE)
        received = gathered * (self.devices - 1) / self.devices
        through_network = gathered * (nodes - 1) / nodes / (self.devices / nodes)
        routes = [(received - through_network, link), (through_network, network)]
        times = [None if bandwidth is None else part / bandwidth for part, bandwidth in routes if part]
        seconds = None if None in times else max(time for time in times if time is not None)
        return Communication(received, through_network, seconds, overlap)


def vocabulary(recipe: Recipe) -> int:
    """Tokens of a recipe's vocabulary; "bpe" may find fewer. Raises ValueError where only the data would tell."""
    return recipe.model.vocab_size or recipe.data.vocabulary()


def meta_model(config: DiffTransformerConfig) -> LanguageModel:
    """The model on the meta device, where nothing takes memory."""
    with torch.device("meta"):
        return language_model_class(config)(config)


@functools.cache
def planned_memory(config_json: str, layout: Layout) -> Memory:
    """What a device holds of a training step in the moment when it holds most. Layers are not compiled.

    All layers are alike, so that models of few layers are traced, and each of the others adds as much: to what is held
    when the loss is computed, and to the most that is held until the backward pass, and the optimizer, are through.
    """
    settings = json.loads(config_json)
    if layout.kind == "tensor":  # a rank has its share of the heads and of the feed-forward network
        settings["head_dim"] = head_dim(DiffTransformerConfig(**settings))
        for name in ("num_attention_heads", "num_key_value_heads", "num_noise_heads", "intermediate_size"):
            settings[name] = settings[name] and settings[name] // layout.devices
    fewest = 3 if layout.kind == "fsdp" else 1  # the weights of the next two layers are on their way while one computes
    few, more = (
        _traced(DiffTransformerConfig(**{**settings, "num_hidden_layers": layers}), layout)
        for layers in (fewest, fewest + 1)
    )
    further = settings["num_hidden_layers"] - fewest
    moments = (
        Memory(**{part: old + further * (new - old) for part, old, new in zip(a, a.values(), b.values(), strict=True)})
        for a, b in zip(few, more, strict=True)
    )
    return max(moments, key=lambda moment: moment.total)


def _traced(config: DiffTransformerConfig, layout: Layout) -> list[dict[str, float]]:
    """What is held when the loss is computed; the most until the end of the backward pass; and of the optimizer's step.

    The chunked loss is a formula, as the size of its chunks depends on the device: gradients of its input and of the
    head, a chunk of logits and their log-softmax, and in half precision copies of the head and what a chunk adds to its
    gradient. Both gradients are scaled in its backward pass, which makes copies of them.
    """
    # None of these is needed for anything else, and they take long to import.
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config._attn_implementation = layout.attention
    half, tokens = layout.precision != "no", layout.sequences * layout.length
    gradients = (tokens + config.vocab_size) * config.hidden_size * FLOAT
    rows = min(tokens, chunk_tokens(config.vocab_size, layout.on_cpu))
    chunk = rows * config.vocab_size * 2 * FLOAT
    if half:
        chunk += rows * config.vocab_size * 2 + 2 * config.vocab_size * config.hidden_size * 2
    model: Any = meta_model(config).train()
    recipe = TrainRecipe.model_validate({"steps": 1, "learning_rate": 1e-3, "optimizer": layout.optimizer})
    with ExitStack() as undo:
        if layout.kind == "fsdp":
            # One rank, whose messages go nowhere.
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.devices)
            undo.callback(dist.destroy_process_group)
            shard(model, CPU, layout.devices, layout.precision)
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model.to_empty(device=CPU)
        model.tie_weights()
        if layout.checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        optimizers = build_optimizers(model, recipe)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:  # whose state is there in every step but the first
            optimizer.step()
            optimizer.zero_grad(set_to_none=not layout.keeps_gradients)
        input_ids = torch.zeros(layout.sequences, layout.length, dtype=torch.long)
        tracker = FSDPMemTracker(model, None) if layout.kind == "fsdp" else MemTracker()
        tracker.track_external(model, input_ids)
        with tracker:
            with torch.autocast(CPU, torch.bfloat16, enabled=half):
                logits: Tensor = model(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
            forward = _parts(tracker, "current")
            forward["workspace"] += gradients + max(chunk, gradients)
            logits.sum().backward()
            moments = [forward, _parts(tracker, "peak")]
            if layout.on_cpu:
                for optimizer in optimizers:
                    optimizer.step()
                moments.append(_parts(tracker, "peak"))
        states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
        state = sum(local(each).nbytes for each in states if isinstance(each, Tensor))
    return [moment | {"optimizer": float(state)} for moment in moments]


def _parts(tracker: Any, moment: str) -> dict[str, float]:
    """A tracker's numbers by the names of :class:`Memory`."""
    names = {"Param": "weights", "Buffer": "weights", "Grad": "gradients", "Opt": "optimizer", "Act": "activations"}
    parts = dict.fromkeys(Memory.__dataclass_fields__, 0.0)
    for kind, size in tracker.get_tracker_snapshot(moment)[torch.device(CPU)].items():
        if kind != "Total":
            label = str(getattr(kind, "value", kind))
            parts[next((part for name, part in names.items() if name in label), "workspace")] += size
    return parts


def _available_memory(gpu: Gpu | None) -> float | None:
    """Bytes that a plan may use of a device; None where that is not known."""
    if gpu is not None:
        return (gpu.memory_gib * GIB - CONTEXT) * USABLE
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not POSIX, or a system without these names
        return None
