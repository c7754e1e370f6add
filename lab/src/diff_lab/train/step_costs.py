"""Counts what a training step costs: operations, what GPUs send each other, and the most memory each holds."""

import math
from dataclasses import dataclass, field

import torch
from torch import nn

from diff_lab.train.distributed import Kind
from diff_lab.train.hardware import NODE
from diff_lab.train.recipe import TrainRecipe
from diff_lab.train.step import build_optimizers
from diff_transformer.attention_types import head_dim
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.model.chunked_loss import chunk_tokens

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
    backend: str  # what computes attention, see :func:`layer_bytes`
    on_cpu: bool  # where optimizers make tensors of their own; a GPU's run in one kernel

    @property
    def item_size(self) -> int:
        """Bytes of a number that a matrix product reads."""
        return 2 if self.half else FLOAT


def meta_model(config: DiffTransformerConfig) -> LanguageModel:
    """The model on the meta device, where nothing takes memory."""
    with torch.device("meta"):
        return language_model_class(config)(config)


class ModelSizes:
    """Parameters of a model, which may be on the meta device; tied ones count once. All layers are alike."""

    def __init__(self, model: LanguageModel, recipe: TrainRecipe) -> None:
        layer = model.model.layers[0]
        counts, layer_counts = ([each.numel() for each in module.parameters()] for module in (model, layer))
        self.layers = len(model.model.layers)
        self.layer = sum(layer_counts)  # of one decoder layer
        # Of them, those of matrix products.
        self.layer_linear = sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear))
        self.total = sum(counts)
        self.ends = self.total - self.layers * self.layer  # embedding, output head and last norm
        self.head = model.lm_head.weight.numel()  # the output head alone, also where it is the embedding
        self.largest, self.largest_of_layer = max(counts), max(layer_counts)  # of the largest tensor
        self.state = 0  # bytes of the state of the recipe's optimizers
        for optimizer in build_optimizers(model, recipe):
            each = MUON if isinstance(optimizer, torch.optim.Muon) else ADAMW
            self.state += each * sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def flops_per_token(config: DiffTransformerConfig, length: int) -> float:
    """Operations of a training step for each token of sequences of `length` tokens.

    A multiply-add is two operations. The backward pass takes twice the forward's matrix products, so

        6 · weights + 6 · Σ over layers of products · (visible pairs of the layer / length)

    `weights` are those that are multiplied: projections, feed-forward, DIFF V2's λ projection, DEX's corrections, and
    the output head, also where it is tied; looking an embedding up is free. `products` are the multiply-adds of
    attention for each visible (query, key) of all heads, with A heads of width d in the Transformer:

        softmax, dex   2·A·d   a score and a value for each head
        diff           2·A·d   two scores for each of A/2 heads, one product of A1 − λA2 with values of width 2d
        diff_grouped   A·d + 2·(A − G)·d   a score for each of A maps, and for each of A − G heads one product with
                               values of width 2d
        diff_v2        3·A·d   two scores for each of A heads, one product with values of width d

    The maps are subtracted before the product with V, as Equation 1 is written: a backend that multiplies V once for
    each map does more, as one does that computes the scores again in its backward, and is not credited for it. So DIFF
    takes as many operations as the Transformer. Sharing key/value heads saves weights and no products; a sliding window
    leaves a query no more than `sliding_window` pairs, and an encoder's query sees all keys. An encoder's output head
    is counted for every token, although its loss takes the hidden ones alone. Not counted: norms, softmax, rotary
    embedding, activations, λ.
    """
    windows = [
        config.sliding_window if config.layer_type(layer) == "sliding_attention" else None
        for layer in range(config.num_hidden_layers)
    ]
    pairs = sum(visible_pairs(length, window) if config.is_causal else length**2 for window in windows)
    return 6.0 * (multiplied_weights(config) + config.spec.attention_products(config) * pairs / length)


def multiplied_weights(config: DiffTransformerConfig) -> int:
    """Weights that every token is multiplied with, the output head among them."""
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    ends = config.hidden_size * config.vocab_size
    return config.spec.attention_weights(config) + config.num_hidden_layers * feed_forward + ends


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
        through_link = self.received - self.through_network
        if (through_link and self.link is None) or (self.through_network and self.network is None):
            return None
        return max(through_link / (self.link or math.inf), self.through_network / (self.network or math.inf))

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
    of the batch, what :func:`diff_lab.train.distributed.shard` sets up: a layer's weights are gathered for the
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
            styles = list(config.base_model_tp_plan.values())
            outputs, inputs = styles.count("rowwise"), styles.count("colwise")
            outputs += (outputs - 1) * layout.checkpointing  # computed again, but for the last, which no gradient needs
            added_up = config.num_hidden_layers * (outputs * layout.item_size + inputs * FLOAT)
            added_up += 2 * FLOAT  # the embedding, and the gradient of the head's input
            of_token = 2 * config.hidden_size * added_up + 2 * config.vocab_size * layout.item_size
            gathered = float(layout.parts * layout.sequences * layout.length * of_token)
            overlap = 0.0
    nodes = -(-layout.devices // NODE)
    received = gathered * (layout.devices - 1) / layout.devices
    through_network = gathered * (nodes - 1) / nodes / (layout.devices / nodes)
    return Communication(received, through_network, overlap, link, network)


@dataclass
class Memory:
    """What a device holds at one moment of a step, in bytes.

    What autograd saves of a forward pass for the backward pass is a formula for our modules. The stream between the
    layers is float32, and so is what a norm saves; `half` says that the matrix products run in bfloat16 or float16
    (autocast), which saves a copy of what each of them reads. A test counts the tensors that autograd saves.
    """

    weights: float  # in float32, and copies in half precision that stay from forward to backward
    gradients: float
    optimizer: float
    activations: float  # what autograd saves for the backward pass
    workspace: float  # what is there for a moment: the loss, a layer computed again, gathered weights
    total: float = field(init=False)

    def __post_init__(self) -> None:
        self.total = float(sum(vars(self).values()))


def planned_memory(config: DiffTransformerConfig, sizes: ModelSizes, layout: StepLayout) -> Memory:
    """The moment of a training step in which a device holds most."""
    tokens, is_fsdp = layout.sequences * layout.length, layout.kind == "fsdp"
    share = 1 / layout.devices if is_fsdp else 1.0  # of all parameters
    ranks = 1  # among which the heads and the feed-forward network of a layer are divided
    if layout.kind == "tensor":
        ranks = layout.devices
        share = (sizes.layers * sizes.layer / ranks + sizes.ends) / sizes.total
    share_bytes, state = sizes.total * FLOAT * share, sizes.state * share
    weights, gathered = share_bytes, 0.0
    # Gradients that a layer adds, that the ends add, and that are there from the parts before.
    layer_gradient, end_gradient, lasting_gradients = sizes.layer * FLOAT / ranks, sizes.ends * FLOAT, 0.0
    if is_fsdp:
        # The ends stay gathered in float32 from forward to backward, and of the layers there are two (the next one is
        # on its way) and the buffer they come in, in the products' dtype; the gradient of one, and its sum in float32
        # on its way out. A device keeps its share of the gradients, but of the output head all until the backward pass
        # is through; the embedding's comes when the layers have gone.
        weights += sizes.ends * FLOAT
        gathered = sizes.layer * (4 * layout.item_size + FLOAT)
        layer_gradient, end_gradient = sizes.layer * FLOAT * share, sizes.head * FLOAT
    elif layout.half:  # autocast keeps a copy of every matrix in the layers
        weights += 2 * sizes.layers * sizes.layer_linear / ranks
    if layout.parts > 1 or layout.kind == "ddp":  # the buckets that DDP sends are always there
        layer_gradient, lasting_gradients = 0.0, share_bytes
        end_gradient = end_gradient if is_fsdp else 0
    computed_layer = tokens * layer_bytes(config, layout.backend, layout.half, ranks)
    saved_layer = tokens * config.hidden_size * FLOAT if layout.checkpointing else computed_layer

    def moment(gradients: float, activations: float, workspace: float) -> Memory:
        return Memory(weights, lasting_gradients + gradients, state, activations, workspace)

    # A layer's backward pass holds most in the feed-forward network: the gradients of the product's two factors, when
    # that of the product is no longer balanced by the product; and the stream's gradient, with autocast a copy of it.
    stream = config.hidden_size * (FLOAT + (layout.item_size if layout.half else 0))
    in_layer = tokens * (2 * config.intermediate_size * layout.item_size / ranks + stream)
    in_layer += sizes.largest_of_layer * FLOAT / ranks
    in_layer += gathered + computed_layer - saved_layer  # what checkpointing computes again
    forward = sizes.layers * saved_layer + tokens * ends_bytes(config)
    moments = [moment(0, forward, loss_bytes(config, tokens, layout.half, layout.on_cpu))]
    # The backward pass goes through the layers from the last to the first: gradients come, activations go.
    for done in range(sizes.layers):
        gradients = end_gradient + done * layer_gradient
        moments.append(moment(gradients, (sizes.layers - done) * saved_layer, in_layer))
    all_gradients = lasting_gradients + sizes.layers * layer_gradient + end_gradient
    if is_fsdp:  # by then a device has nothing but its share
        weights = all_gradients = share_bytes
    step = 2 * sizes.largest * FLOAT if layout.on_cpu else 0
    moments.append(Memory(weights, all_gradients, state, 0, step))
    return max(moments, key=lambda moment: moment.total)


def layer_bytes(config: DiffTransformerConfig, backend: str, half: bool, ranks: int = 1) -> float:
    """What autograd saves of a decoder layer for each token.

    `backend` computes attention: "triton", "cpu", "blockwise" or "sdpa", and for the Transformer "cpu", "sdpa" or
    "document", which is "sdpa" for one document after the other. The heads and the feed-forward network are divided
    among `ranks` (tensor parallelism).
    """
    width, size = config.hidden_size, 2 if half else FLOAT
    # A norm saves what it reads, that divided by its size, and one over the size.
    norms = 2 * _norm_bytes(width)
    readers = 5 + config.has_token_lambda  # of norms: W_Q, W_K, W_V, (W_λ,) W_gate, W_up
    read = readers * width * size if half else 2 * width * FLOAT  # in half precision each takes a copy of its own
    # What the gate's silu reads, what it gives, what W_up gives, and the product of both, which W_down reads.
    feed_forward = 4 * config.intermediate_size * size
    return norms + read + (_attention_bytes(config, backend, size) + feed_forward) / ranks


def _norm_bytes(width: int) -> int:
    """What an RMSNorm of the stream saves for each token."""
    return (2 * width + 1) * FLOAT


def _attention_bytes(config: DiffTransformerConfig, backend: str, size: int) -> float:
    """What attention saves for each token, from the projections' outputs to what W_O reads, in numbers of `size` bytes.

    `width` is that of all heads' outputs together (A·d but with groups), `keys` that of all keys; the values are as
    wide.
    """
    described, head = config.spec, head_dim(config)
    heads = described.heads(config)
    width, keys = (count * described.cached_width(head) for count in (heads, described.key_heads(config)))
    # The headwise norm where it is no part of a kernel, in float32.
    norm = 2 * width * FLOAT + heads * FLOAT if config.has_headwise_norm else 0
    if not described.differential:
        # q, k, v, the output (which W_O reads), the rows' log-sums, or the kernel's two statistics of the map that it
        # computes twice. The output once more where documents are put together; where there is a norm, which reads a
        # wider copy of what torch's attention keeps and the kernel does not; and where heads are corrected.
        is_copied = norm > 0 and size < FLOAT and backend != "cpu"
        twice = backend == "document" or is_copied or described.corrects_heads
        statistics = (4 if backend == "cpu" else 1) * heads * FLOAT
        return (2 * width + 2 * keys + (width if twice else 0)) * size + statistics + norm
    # q, k, v; λ where it is one for each token.
    queries = described.query_heads(config)
    saved = (queries * head + 2 * keys) * size
    saved += heads * FLOAT if config.has_token_lambda else 0
    if backend == "triton":  # the output before the norm, that of the second map, log-sums; the norm is in the kernel
        second = FLOAT if described.grouped else size  # signal heads read it before it is rounded
        noise_heads = queries - heads
        saved += width * size + noise_heads * described.cached_width(head) * second + queries * FLOAT
        # What W_O reads is a tensor of its own: after the norm, or after `ops.nonfinite` has added what hidden NaN ask.
        return saved + width * size + (heads * FLOAT if config.has_headwise_norm else 0)
    if backend == "cpu":  # two statistics of each map's rows
        saved += 2 * described.query_heads(config) * FLOAT
    elif backend == "sdpa":
        # The maps' outputs; where values are wider than keys, in two parts each, and the second map's put together.
        parts = 2 if described.pairs_heads else 1
        saved += (2 if parts == 1 else 3) * width * size + 2 * parts * heads * FLOAT
    return saved + width * size + norm  # what W_O reads


def ends_bytes(config: DiffTransformerConfig) -> float:
    """What is saved outside the layers for each token: the last norm, token numbers, and the rotary tables."""
    return _norm_bytes(config.hidden_size) + 8 + 2 * head_dim(config) * FLOAT


def loss_bytes(config: DiffTransformerConfig, tokens: int, half: bool, on_cpu: bool) -> float:
    """The most that the chunked cross-entropy holds: gradients of its input and of the head, and a chunk of logits.

    In its backward both gradients are scaled, which makes copies of them.
    """
    gradients = (tokens + config.vocab_size) * config.hidden_size * FLOAT
    rows = min(tokens, chunk_tokens(config.vocab_size, on_cpu))
    chunk = rows * config.vocab_size * 2 * FLOAT  # the logits and their log-softmax
    if half:  # the chunk's logits or their gradient; the head's weight, and what a chunk adds to its gradient
        chunk += rows * config.vocab_size * 2 + 2 * config.vocab_size * config.hidden_size * 2
    return gradients + max(chunk, gradients)
