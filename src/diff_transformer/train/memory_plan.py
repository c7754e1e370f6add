"""How much memory a training step takes on each device, moment by moment, and where it is most.

What autograd saves of a forward pass for the backward pass is a formula for our modules. The stream between the layers
is float32, and so is what a norm saves; `half` says that the matrix products run in bfloat16 or float16 (autocast),
which saves a copy of what each of them reads. A test counts the tensors that autograd saves, so that a module that
saves more than this does not go unnoticed.
"""

from dataclasses import astuple, dataclass

from diff_transformer.model import DiffTransformerConfig
from diff_transformer.model.chunked_loss import CORE_LOGITS, DEVICE_LOGITS
from diff_transformer.train.step_costs import FLOAT, ModelSizes, StepLayout
from diff_transformer.variants import head_dim


@dataclass(frozen=True)
class Memory:
    """What a device holds at one moment, in bytes."""

    weights: float  # in float32, and copies in half precision that stay from forward to backward
    gradients: float
    optimizer: float
    activations: float  # what autograd saves for the backward pass
    workspace: float  # what is there for a moment: the loss, a layer computed again, gathered weights

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(astuple(self)))


def peak_memory(config: DiffTransformerConfig, sizes: ModelSizes, layout: StepLayout) -> Memory:
    """The moment of a training step in which a device holds most."""
    tokens, ranks = layout.sequences * layout.length, layout.tensor_ranks
    weights, gathered = _weights(sizes, layout)
    layer_gradient, head_gradient, lasting_gradients = _gradients(sizes, layout)
    state = sizes.state * _share(sizes, layout)
    computed_layer = tokens * layer_bytes(config, layout.backend, layout.half, ranks)
    saved_layer = tokens * config.hidden_size * FLOAT if layout.checkpointing else computed_layer

    def moment(gradients: float, activations: float, workspace: float) -> Memory:
        return Memory(weights, lasting_gradients + gradients, state, activations, workspace)

    in_layer = tokens * layer_backward_bytes(config, layout.half, ranks) + sizes.largest_of_layer * FLOAT / ranks
    in_layer += gathered + computed_layer - saved_layer  # what checkpointing computes again
    forward = sizes.layers * saved_layer + tokens * ends_bytes(config)
    moments = [moment(0, forward, loss_bytes(config, tokens, layout.half, layout.on_cpu))]
    # The backward pass goes through the layers from the last to the first: gradients come, activations go.
    for done in range(sizes.layers):
        gradients = head_gradient + done * layer_gradient
        moments.append(moment(gradients, (sizes.layers - done) * saved_layer, in_layer))
    all_gradients = lasting_gradients + sizes.layers * layer_gradient + head_gradient
    if layout.kind == "fsdp":  # by then a device has nothing but its share
        weights = all_gradients = sizes.total * FLOAT * _share(sizes, layout)
    step = 2 * sizes.largest * FLOAT if layout.on_cpu else 0
    moments.append(Memory(weights, all_gradients, state, 0, step))
    return max(moments, key=lambda moment: moment.total)


def _share(sizes: ModelSizes, layout: StepLayout) -> float:
    """Which part of all parameters a device has."""
    if layout.kind == "fsdp":
        return 1 / layout.devices
    if layout.kind == "tensor":
        return (sizes.layers * sizes.layer / layout.devices + sizes.ends) / sizes.total
    return 1.0


def _weights(sizes: ModelSizes, layout: StepLayout) -> tuple[float, float]:
    """Bytes of weights that stay, and of weights that are gathered for a moment.

    With FSDP2 the ends stay gathered in float32 from forward to backward, and of the layers there are two (the next
    one is on its way) and the buffer they come in, in the products' dtype; the gradient of one, and its sum in float32
    on its way out. Otherwise autocast keeps a half-precision copy of every matrix in the layers.
    """
    weights = sizes.total * FLOAT * _share(sizes, layout)
    if layout.kind == "fsdp":
        return weights + sizes.ends * FLOAT, sizes.layer * (4 * layout.item_size + FLOAT)
    if layout.half:
        weights += 2 * sizes.layers * sizes.layer_linear / layout.tensor_ranks
    return weights, 0.0


def _gradients(sizes: ModelSizes, layout: StepLayout) -> tuple[float, float, float]:
    """Bytes of gradients: that a layer adds, that the ends add, and that are there from the parts before.

    DDP's gradients lie in the buckets that it sends, which are always there. With FSDP2 a device keeps its share, but
    of the output head all until the backward pass is through; the embedding's comes when the layers have gone.
    """
    share = _share(sizes, layout)
    if layout.kind == "fsdp":
        lasting = sizes.total * FLOAT * share if layout.parts > 1 else 0.0
        return 0.0 if lasting else sizes.layer * FLOAT * share, sizes.head * FLOAT, lasting
    if layout.parts > 1 or layout.kind == "ddp":
        return 0.0, 0.0, sizes.total * FLOAT * share
    return sizes.layer * FLOAT / layout.tensor_ranks, sizes.ends * FLOAT, 0.0


def layer_bytes(config: DiffTransformerConfig, backend: str, half: bool, ranks: int = 1) -> float:
    """What autograd saves of a decoder layer for each token.

    `backend` computes attention: "triton", "cpu", "blockwise" or "sdpa", and for the Transformer "sdpa" or "document",
    which is that for one document after the other. The heads and the feed-forward network are divided among `ranks`
    (tensor parallelism).
    """
    width, size = config.hidden_size, 2 if half else FLOAT
    # A norm saves what it reads, that divided by its size, and one over the size.
    norms = 2 * _norm_bytes(width)
    readers = 5 + config.described.lambda_per_token  # of norms: W_Q, W_K, W_V, (W_λ,) W_gate, W_up
    read = readers * width * size if half else 2 * width * FLOAT  # in half precision each takes a copy of its own
    # What the gate's silu reads, what it gives, what W_up gives, and the product of both, which W_down reads.
    feed_forward = 4 * config.intermediate_size * size
    return norms + read + (_attention_bytes(config, backend, size) + feed_forward) / ranks


def _norm_bytes(width: int) -> int:
    """What an RMSNorm of the stream saves for each token."""
    return (2 * width + 1) * FLOAT


def _attention_bytes(config: DiffTransformerConfig, backend: str, size: int) -> float:
    """What attention saves for each token, from the projections' outputs to what W_O reads, in numbers of `size` bytes.

    `width` is that of all heads of the Transformer together (A·d), `keys` that of all keys; the values are as wide.
    """
    described, head = config.described, head_dim(config)
    width = config.num_attention_heads * head
    keys = (config.num_key_value_heads or config.num_attention_heads) * head
    heads = described.heads(config.num_attention_heads)
    # The headwise norm where it is no part of a kernel, in float32.
    norm = 2 * width * FLOAT + heads * FLOAT if config.has_headwise_norm else 0
    if not described.differential:
        # q, k, v, the output (which W_O reads), the rows' log-sums; where documents are put together, the output once
        # more; where there is a norm, what it reads where that is not the output itself but a wider copy; and where
        # heads are corrected, the corrected ones.
        twice = backend == "document" or (norm > 0 and size < FLOAT) or described.corrects_heads
        return (2 * width + 2 * keys + (width if twice else 0)) * size + heads * FLOAT + norm
    # q, k, v; λ where it is one for each token.
    saved = (described.query_heads(config.num_attention_heads) * head + 2 * keys) * size
    saved += heads * FLOAT if described.lambda_per_token else 0
    if backend == "triton":  # the output before the norm, that of the second map, log-sums; the norm is in the kernel
        saved += 2 * width * size + 2 * heads * FLOAT
        # What W_O reads is a tensor of its own: after the norm, or after `ops.nonfinite` has added what hidden NaN ask.
        return saved + width * size + (heads * FLOAT if config.has_headwise_norm else 0)
    if backend == "cpu":  # two statistics of each map's rows
        saved += 4 * heads * FLOAT
    elif backend == "sdpa":
        # The maps' outputs; where values are wider than keys, in two parts each, and the second map's put together.
        parts = 2 if described.pairs_heads else 1
        saved += (2 if parts == 1 else 3) * width * size + 2 * parts * heads * FLOAT
    return saved + width * size + norm  # what W_O reads


def layer_backward_bytes(config: DiffTransformerConfig, half: bool, ranks: int = 1) -> float:
    """What the backward pass of a layer holds for each token beside what was saved, where it holds most.

    That is in the feed-forward network: the gradients of the product's two factors, when that of the product is no
    longer balanced by the product; and the stream's gradient, in half precision with a copy in that.
    """
    size, copy = (2, 2) if half else (FLOAT, 0)
    return 2 * config.intermediate_size * size / ranks + config.hidden_size * (FLOAT + copy)


def ends_bytes(config: DiffTransformerConfig) -> float:
    """What is saved outside the layers for each token: the last norm, token numbers, and the rotary tables."""
    return _norm_bytes(config.hidden_size) + 8 + 2 * head_dim(config) * FLOAT


def loss_bytes(config: DiffTransformerConfig, tokens: int, half: bool, on_cpu: bool) -> float:
    """The most that the chunked cross-entropy holds: gradients of its input and of the head, and a chunk of logits.

    In its backward both gradients are scaled, which makes copies of them.
    """
    gradients = (tokens + config.vocab_size) * config.hidden_size * FLOAT
    rows = min(tokens, max(1, (CORE_LOGITS if on_cpu else DEVICE_LOGITS) // config.vocab_size))
    chunk = rows * config.vocab_size * 2 * FLOAT  # the logits and their log-softmax
    if half:  # the chunk's logits or their gradient; the head's weight, and what a chunk adds to its gradient
        chunk += rows * config.vocab_size * 2 + 2 * config.vocab_size * config.hidden_size * 2
    return gradients + max(chunk, gradients)
