"""What autograd keeps of a forward pass until its backward has been through, in bytes: a formula for our modules.

The stream between the layers is float32, and so is what a norm keeps; `half` says that the matrix products run in
bfloat16 or float16 (autocast), which keeps a copy of what each of them reads. A test counts the tensors that autograd
saves, so that a module that keeps more than this does not go unnoticed.
"""

from diff_transformer.model import DiffTransformerConfig
from diff_transformer.model.chunked_loss import CORE_LOGITS, DEVICE_LOGITS
from diff_transformer.variants import head_dim


def flops_per_token(config: DiffTransformerConfig, length: int) -> float:
    """Operations of a training step for each token of causal sequences of `length` tokens.

    A multiply-add is two operations. The backward pass takes twice the forward's matrix products, so

        6 · weights + 6 · Σ over layers of products · (visible pairs of the layer / length)

    `weights` are those that are multiplied: projections, feed-forward, DIFF V2's λ projection, DEX's corrections, and
    the output head, also where it is tied; looking an embedding up is free. `products` are the multiply-adds of
    attention for each visible (query, key) of all heads, with A heads of width d in the twin:

        softmax, dex   2·A·d   a score and a value for each head
        diff           2·A·d   two scores for each of A/2 heads, one product of A1 − λA2 with values of width 2d
        diff_v2        3·A·d   two scores for each of A heads, one product with values of width d

    The maps are subtracted before the product with V, as Equation 1 is written: a backend that multiplies V once for
    each map does more, as one does that computes the scores again in its backward, and is not credited for it. So the
    twins' operations are equal. Sharing key/value heads saves weights and no products; a sliding window leaves a query
    no more than `sliding_window` pairs. Norms, softmax, rotary embedding, activations and λ are not counted.

    Raises:
        ValueError: `length` is below 1.
    """
    if length < 1:
        raise ValueError(f"length must be 1 or more, got {length}.")
    products = config.described.attention_products(config)
    pairs = sum(visible_pairs(length, window_of(config, layer)) for layer in range(config.num_hidden_layers))
    return 6.0 * (multiplied_weights(config) + products * pairs / length)


def multiplied_weights(config: DiffTransformerConfig) -> int:
    """Weights that every token is multiplied with, the output head among them."""
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    ends = config.hidden_size * config.vocab_size
    return config.described.attention_weights(config) + config.num_hidden_layers * feed_forward + ends


def query_width(config: DiffTransformerConfig) -> int:
    """A·d: the twin's queries side by side."""
    return config.num_attention_heads * head_dim(config)


def key_width(config: DiffTransformerConfig) -> int:
    """The keys of all heads side by side; the values are as wide."""
    return (config.num_key_value_heads or config.num_attention_heads) * head_dim(config)


def visible_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees in a causal sequence: i + 1 keys for query i, at most `window`."""
    seen = length if window is None else min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def window_of(config: DiffTransformerConfig, layer: int) -> int | None:
    """How many keys a layer, counted from 0, looks back on; None for all."""
    return config.sliding_window if config.layer_type(layer) == "sliding_attention" else None


FLOAT = 4


def layer_bytes(config: DiffTransformerConfig, backend: str, half: bool, ranks: int = 1) -> float:
    """What a decoder layer keeps for each token.

    Args:
        config: the model's.
        backend: what computes attention: "triton", "cpu", "blockwise" or "sdpa", and of the twin "sdpa" or "document",
            which is that for one document after the other.
        half: whether the products run in half precision.
        ranks: among how many the heads and the feed-forward network are shared out (tensor parallelism).
    """
    width, size = config.hidden_size, 2 if half else FLOAT
    # A norm keeps what it reads, that divided by its size, and one over the size.
    norms = 2 * norm_bytes(width)
    readers = 5 + config.described.lambda_per_token  # of norms: W_Q, W_K, W_V, (W_λ,) W_gate, W_up
    read = readers * width * size if half else 2 * width * FLOAT  # in half precision each takes a copy of its own
    # What the gate's silu reads, what it gives, what W_up gives, and the product of both, which W_down reads.
    feed_forward = 4 * config.intermediate_size * size
    return norms + read + (attention_bytes(config, backend, size) + feed_forward) / ranks


def norm_bytes(width: int) -> int:
    """What an RMSNorm of the stream keeps for each token."""
    return (2 * width + 1) * FLOAT


def attention_bytes(config: DiffTransformerConfig, backend: str, size: int) -> float:
    """What attention keeps for each token, from the projections' outputs to what W_O reads, in dtypes of `size` bytes.

    W is the width of all heads together (A·d), K that of all keys.
    """
    described, width, keys = config.described, query_width(config), key_width(config)
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
    kept = (described.query_heads(config.num_attention_heads) * head_dim(config) + 2 * keys) * size
    kept += heads * FLOAT if described.lambda_per_token else 0
    if backend == "triton":  # the output before the norm, that of the second map, log-sums; the norm is in the kernel
        kept += 2 * width * size + 2 * heads * FLOAT
        # What W_O reads is a tensor of its own: after the norm, or after `ops.nonfinite` has added what hidden NaN ask.
        return kept + width * size + (heads * FLOAT if config.has_headwise_norm else 0)
    if backend == "cpu":  # two statistics of each map's rows
        kept += 4 * heads * FLOAT
    elif backend == "sdpa":
        # The maps' outputs; where values are wider than keys, in two parts each, and the second map's put together.
        parts = 2 if described.pairs_heads else 1
        kept += (2 if parts == 1 else 3) * width * size + 2 * parts * heads * FLOAT
    return kept + width * size + norm  # what W_O reads


def layer_backward_bytes(config: DiffTransformerConfig, half: bool, ranks: int = 1) -> float:
    """What the backward pass of a layer holds for each token beside what was kept, where it holds most.

    That is in the feed-forward network: the gradients of the product's two factors, when that of the product is no
    longer balanced by the product; and the stream's gradient, in half precision with a copy in that.
    """
    size, copy = (2, 2) if half else (FLOAT, 0)
    return 2 * config.intermediate_size * size / ranks + config.hidden_size * (FLOAT + copy)


def ends_bytes(config: DiffTransformerConfig) -> float:
    """What is kept outside the layers for each token: the last norm, token numbers, and the rotary tables."""
    return norm_bytes(config.hidden_size) + 8 + 2 * head_dim(config) * FLOAT


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
