"""What a training step costs: the operations of a model, and what the GPUs of a run send each other."""

from dataclasses import dataclass

import torch
from torch import nn

from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.parallel_plan import tensor_parallel_plan
from diff_transformer.train.distributed import Kind
from diff_transformer.train.hardware import NODE
from diff_transformer.train.recipe import TrainRecipe
from diff_transformer.train.step import build_optimizers

FLOAT = 4  # bytes
ADAMW, MUON = 8, 4  # bytes of an optimizer's state for each parameter: two moments, or one


@dataclass(frozen=True)
class StepLayout:
    """Where and how a step runs."""

    kind: Kind  # what several devices do together, or "single"
    devices: int
    sequences: int  # that go through the model at a time on one device
    length: int  # of each
    parts: int  # how many such parts make a step (accumulation)
    half: bool  # whether autocast computes in half precision
    checkpointing: bool  # whether a layer is computed again in the backward pass
    backend: str  # what computes attention, see `diff_transformer.train.memory_plan.layer_bytes`
    on_cpu: bool  # where optimizers make tensors of their own; a GPU's run in one kernel

    @property
    def item_size(self) -> int:
        """Bytes of a number that a matrix product reads."""
        return 2 if self.half else FLOAT

    @property
    def tensor_ranks(self) -> int:
        """Among how many devices the heads and the feed-forward network of a layer are divided."""
        return self.devices if self.kind == "tensor" else 1


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model."""

    layer: int  # of one decoder layer
    layer_linear: int  # of them, those of matrix products
    ends: int  # embedding, output head and last norm
    head: int  # the output head alone, also where it is the embedding
    largest: int  # of the largest tensor
    largest_of_layer: int
    layers: int
    state: int  # bytes of the optimizer's state

    @property
    def total(self) -> int:
        """All parameters; tied ones count once."""
        return self.layers * self.layer + self.ends


def meta_model(config: DiffTransformerConfig) -> DiffTransformerForCausalLM:
    """The model on the meta device, where nothing takes memory."""
    with torch.device("meta"):
        return DiffTransformerForCausalLM(config)


def sizes_of(model: DiffTransformerForCausalLM, recipe: TrainRecipe) -> ModelSizes:
    """The sizes of a model, which may be on the meta device, and of the optimizers of a recipe for it."""
    counts, layer = [parameter.numel() for parameter in model.parameters()], model.model.layers[0]
    layer_counts = [parameter.numel() for parameter in layer.parameters()]
    state = 0
    for optimizer in build_optimizers(model, recipe):
        each = MUON if isinstance(optimizer, torch.optim.Muon) else ADAMW
        state += each * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return ModelSizes(
        layer=sum(layer_counts),
        layer_linear=sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear)),
        ends=sum(counts) - len(model.model.layers) * sum(layer_counts),
        head=model.lm_head.weight.numel(),
        largest=max(counts),
        largest_of_layer=max(layer_counts),
        layers=len(model.model.layers),
        state=state,
    )


def flops_per_token(config: DiffTransformerConfig, length: int) -> float:
    """Operations of a training step for each token of causal sequences of `length` tokens.

    A multiply-add is two operations. The backward pass takes twice the forward's matrix products, so

        6 · weights + 6 · Σ over layers of products · (visible pairs of the layer / length)

    `weights` are those that are multiplied: projections, feed-forward, DIFF V2's λ projection, DEX's corrections, and
    the output head, also where it is tied; looking an embedding up is free. `products` are the multiply-adds of
    attention for each visible (query, key) of all heads, with A heads of width d in the Transformer:

        softmax, dex   2·A·d   a score and a value for each head
        diff           2·A·d   two scores for each of A/2 heads, one product of A1 − λA2 with values of width 2d
        diff_v2        3·A·d   two scores for each of A heads, one product with values of width d

    The maps are subtracted before the product with V, as Equation 1 is written: a backend that multiplies V once for
    each map does more, as one does that computes the scores again in its backward, and is not credited for it. So DIFF
    takes as many operations as the Transformer. Sharing key/value heads saves weights and no products; a sliding window
    leaves a query no more than `sliding_window` pairs. Not counted: norms, softmax, rotary embedding, activations, λ.
    """
    if length < 1:
        raise ValueError(f"length must be 1 or more, got {length}.")
    windows = [
        config.sliding_window if config.layer_type(layer) == "sliding_attention" else None
        for layer in range(config.num_hidden_layers)
    ]
    pairs = sum(visible_pairs(length, window) for window in windows)
    return 6.0 * (multiplied_weights(config) + config.described.attention_products(config) * pairs / length)


def multiplied_weights(config: DiffTransformerConfig) -> int:
    """Weights that every token is multiplied with, the output head among them."""
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    ends = config.hidden_size * config.vocab_size
    return config.described.attention_weights(config) + config.num_hidden_layers * feed_forward + ends


def visible_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees in a causal sequence: i + 1 keys for query i, at most `window`."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


@dataclass(frozen=True)
class Communication:
    """What a GPU receives in a step, by the fastest route that there is.

    A group of G GPUs in M nodes receives a gathered tensor of S bytes as S·(G − 1)/G on each GPU. Into a node the
    other nodes' part, S·(M − 1)/M, comes once, divided among the network cards of its GPUs, and is passed on inside
    the node; NCCL's rings and trees, which leave a node through every card, come close to that. A reduce-scatter is
    the reverse, and an all-reduce is both; switches that add up on the way can save half of the latter.

    """

    received: float  # bytes that a GPU receives
    through_network: float  # of them, the bytes that come through its network card
    overlap: float  # the share of the step's computation that can run meanwhile; 0 where the next operation waits
    link: float | None  # bytes/s that a GPU can receive from others of its node, if known
    network: float | None  # bytes/s of a GPU's network card, if known

    @property
    def seconds(self) -> float | None:
        """The least time it takes, both ways in use at once; None where the bandwidth is not known."""
        times = []
        for size, bandwidth in (
            (self.received - self.through_network, self.link),
            (self.through_network, self.network),
        ):
            if size and bandwidth is None:
                return None
            times.append(size / bandwidth if bandwidth else 0.0)
        return max(times)

    def best(self, utilisation: float, computation: float) -> float:
        """The share of the peak that a step reaches at best, where its `computation` (seconds) alone reaches
        `utilisation`; that share where the bandwidth is not known.
        """
        if self.seconds is None:
            return utilisation
        return utilisation * computation / (computation + max(0.0, self.seconds - self.overlap * computation))


def communication(
    config: DiffTransformerConfig, sizes: ModelSizes, layout: StepLayout, link: float | None, network: float | None
) -> Communication | None:
    """What each GPU receives in a step; None for a GPU alone. Single numbers, as the loss, are left out.

    DDP adds up the float32 gradients once a step, while the last part's backward pass runs. FSDP2 does, for each part
    of the batch, what :func:`diff_transformer.train.distributed.shard` sets up: a layer's weights are gathered for the
    forward and again for the backward pass, those of the ends once, and float32 gradients are scattered; the next layer
    is on its way while one computes. Tensor parallelism adds up the layers' outputs and the gradients of their inputs,
    and gathers the logits, which the loss computes again in its backward pass; the next product waits for each.
    """
    overlap = 1.0
    match layout.kind:  # bytes of the tensors that are gathered or scattered once
        case "single":
            return None
        case "ddp":
            gathered = 2.0 * FLOAT * sizes.total
            # Of the computation; with checkpointing the backward pass repeats the forward pass.
            overlap = (3 / 4 if layout.checkpointing else 2 / 3) / layout.parts
        case "fsdp":
            of_layers = sizes.layers * sizes.layer * (2 * layout.item_size + FLOAT)
            gathered = float(layout.parts * (of_layers + sizes.ends * 2 * FLOAT))
        case "tensor":
            gathered = layout.parts * layout.sequences * layout.length * _tensor_parallel_bytes(config, layout)
            overlap = 0.0
    nodes = -(-layout.devices // NODE)
    received = gathered * (layout.devices - 1) / layout.devices
    through_network = gathered * (nodes - 1) / nodes / (layout.devices / nodes)
    return Communication(received, through_network, overlap, link, network)


def _tensor_parallel_bytes(config: DiffTransformerConfig, layout: StepLayout) -> float:
    """Bytes for each token that tensor parallelism gathers or scatters."""
    styles = list(tensor_parallel_plan(config.attention_type, config.has_headwise_norm).values())
    outputs, inputs = styles.count("rowwise"), styles.count("colwise")
    outputs += (outputs - 1) * layout.checkpointing  # computed again, but for the last, which no gradient needs
    reduced = config.num_hidden_layers * (outputs * layout.item_size + inputs * FLOAT)
    reduced += 2 * FLOAT  # the embedding, and the gradient of the head's input
    return 2 * config.hidden_size * reduced + 2 * config.vocab_size * layout.item_size
