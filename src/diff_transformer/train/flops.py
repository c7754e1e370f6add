"""How many floating-point operations training takes: the model's own, whatever a kernel computes beside them."""

from diff_transformer.model import DiffTransformerConfig


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
    products = attention_products(config)
    pairs = sum(visible_pairs(length, window_of(config, layer)) for layer in range(config.num_hidden_layers))
    return 6.0 * (multiplied_weights(config) + products * pairs / length)


def multiplied_weights(config: DiffTransformerConfig) -> int:
    """Weights that every token is multiplied with, the output head among them."""
    hidden, width, keys = config.hidden_size, query_width(config), key_width(config)
    layer = hidden * (2 * width + 2 * keys) + 3 * hidden * config.intermediate_size
    if config.attention_type == "diff_v2":  # twice the queries, and λ
        layer += hidden * (width + config.num_attention_heads)
    weights = config.num_hidden_layers * layer + hidden * config.vocab_size
    if config.attention_type == "dex":
        chosen = config.dex_heads or [range(config.num_attention_heads)] * config.num_hidden_layers
        weights += sum(len(heads) for heads in chosen) * head_dim(config) ** 2
    return weights


def attention_products(config: DiffTransformerConfig) -> int:
    """Multiply-adds of a layer's attention for one query and one key that it sees, over all heads."""
    return (3 if config.attention_type == "diff_v2" else 2) * query_width(config)


def head_dim(config: DiffTransformerConfig) -> int:
    """d, which a configuration always knows once it is made."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


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
