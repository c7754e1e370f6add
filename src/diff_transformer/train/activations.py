"""What autograd keeps of a forward pass until its backward has been through, in bytes: a formula for our modules.

The stream between the layers is float32, and so is what a norm keeps; `half` says that the matrix products run in
bfloat16 or float16 (autocast), which keeps a copy of what each of them reads. A test counts the tensors that autograd
saves, so that a module that keeps more than this does not go unnoticed.
"""

from diff_transformer.model import DiffTransformerConfig
from diff_transformer.model.loss import CORE_LOGITS, DEVICE_LOGITS
from diff_transformer.train.flops import head_dim, key_width, query_width

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
    readers = 2 + (4 if config.attention_type == "diff_v2" else 3)  # of norms: W_Q, W_K, W_V, (W_λ,) W_gate, W_up
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
    heads, width, keys = config.num_attention_heads, query_width(config), key_width(config)
    pairs = heads // 2 if config.attention_type == "diff" else heads  # heads, of two maps each in DIFF
    # The headwise norm where it is no part of a kernel, in float32.
    norm = 2 * width * FLOAT + pairs * FLOAT if config.has_headwise_norm else 0
    if config.attention_type == "softmax":
        # q, k, v, the output (which W_O reads), the rows' log-sums; where documents are put together, the output once
        # more; and where there is a norm, what it reads where that is not the output itself but a wider copy.
        twice = backend == "document" or (norm > 0 and size < FLOAT)
        return (2 * width + 2 * keys + (width if twice else 0)) * size + heads * FLOAT + norm
    # q, k, v; λ where it is one for each token.
    kept = (2 * pairs * head_dim(config) + 2 * keys) * size
    kept += pairs * FLOAT if config.attention_type == "diff_v2" else 0
    if backend == "triton":  # the output before the norm, that of the second map, log-sums; the norm is in the kernel
        kept += 2 * width * size + 2 * pairs * FLOAT
        # What W_O reads is a tensor of its own: after the norm, or after `ops.nonfinite` has added what hidden NaN ask.
        return kept + width * size + (pairs * FLOAT if config.has_headwise_norm else 0)
    if backend == "cpu":  # two statistics of each map's rows
        kept += 4 * pairs * FLOAT
    elif backend == "sdpa":
        # The maps' outputs; where values are wider than keys, in two parts each, and the second map's put together.
        parts = 2 if config.attention_type == "diff" else 1
        kept += (2 if parts == 1 else 3) * width * size + 2 * parts * pairs * FLOAT
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
