"""Describes each attention type once, so that no other file compares with a type's name, and λ_init of a layer.

Imports nothing heavy, so that reports and the command line can read it. CONTRIBUTING.md says how to add a type.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

# The style of tensor parallelism for parameters that all heads of a layer share; model/parallel_plan.py defines it.
SHARED_PARAMETERS = "diff_transformer_shared_parameters"
_PAPER = "[Differential Transformer](https://arxiv.org/abs/2410.05258)"
_NORM = ("norm_eps", "headwise_norm")
# Options of a layer's attention, by their names in a configuration → those of the module's arguments.
ATTENTION_OPTIONS = {
    "attention_bias": "bias",
    "qk_norm": "qk_norm",
    "qk_clip": "qk_clip",
    "output_gate": "output_gate",
    "exclusive_attention": "exclusive",
    "layers_without_rotary": "rotary",
    "attention_dropout": "dropout",
}
_OPTIONS = tuple(ATTENTION_OPTIONS.values())
# Sizes of latent attention, by DeepSeek's names in transformers.
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class ModelSizes(Protocol):
    """The settings of a configuration that a description reads."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None
    num_noise_heads: int | None
    token_lambda: bool
    dual_lambda: bool
    head_dim: int | None
    dex_heads: list | None
    output_gate: bool


@dataclass(frozen=True, kw_only=True)
class AttentionType:
    """The description of one attention type.

    Sizes are counted as in the Transformer that it is compared with: A query heads and K key/value heads of width d.

    Attributes:
        layer: its module, as "package:class"; imported when a model is built.
        settings: arguments of the module beside the sizes, by the names in
            :func:`diff_transformer.model.interface_attention.layer_settings`.
        differential: whether a head has two maps, of which the second is subtracted.
        pairs_heads: whether two heads of the Transformer make one head, with keys and values of width 2d in the cache.
        grouped: whether r signal heads share the second map, so that the A query heads are r·G of the first map and G,
            ``num_noise_heads``, of the second.
        latent: whether keys and values are made of a latent, which alone is cached, as one head of keys.
        even_heads: whether A and K must be even although heads are not paired.
        headwise_norm: whether heads are normalised before the output projection unless the configuration says so.
        lambda_per_token: whether λ is a projection W_λ of every token, one for each head; :meth:`has_token_lambda` also
            asks the configuration, if "token_lambda" is one of the settings.
        gates_per_head: rows of W_λ for each head: λ, or the weight of the first map and λ.
        corrects_heads: whether it starts as a trained Transformer, whose heads it corrects by W_D (DEX). No recipe
            trains such a model from the start.
        lambda_modules: modules of the layer whose parameters make λ.
        float32_parameters: last parts of the names of parameters that a checkpoint always loads in float32.
        parallel_styles: transformers' style of tensor parallelism for modules of the layer beside the projections.
        parallel_refusal: the way out, if tensor parallelism cannot spread it; None if it can.
        label: the name that reports print.
        colour: of its lines, on light and on dark pages; with a contrast of at least 3 to either.
        marker: matplotlib's, of its points.
        summary: the words of a model card after "A language model".
    """

    layer: str
    settings: tuple[str, ...]
    differential: bool = False
    pairs_heads: bool = False
    grouped: bool = False
    latent: bool = False
    even_heads: bool = False
    headwise_norm: bool = False
    lambda_per_token: bool = False
    gates_per_head: int = 1
    corrects_heads: bool = False
    lambda_modules: tuple[str, ...] = ()
    float32_parameters: frozenset[str] = frozenset()
    parallel_styles: Mapping[str, str] = field(default_factory=dict)
    parallel_refusal: str | None = None
    label: str
    colour: tuple[str, str]
    marker: str
    summary: str

    def layer_class(self) -> Any:
        """Return the module's class, a subclass of :class:`diff_transformer.nn.Attention`."""
        return resolve_name(self.layer)

    def noise_heads(self, config: ModelSizes) -> int | None:
        """Return G of a type with groups, which its configuration always has; None for any other."""
        return config.num_noise_heads if self.grouped else None

    def has_token_lambda(self, config: ModelSizes) -> bool:
        """Return whether the layers of a configuration have a W_λ, the type's own or chosen."""
        return self.lambda_per_token or ("token_lambda" in self.settings and config.token_lambda)

    def styles_of(self, config: ModelSizes) -> dict[str, str]:
        """Return the parallel styles of the modules that the layers of a configuration have."""
        absent = {"lambda_proj"} if not self.has_token_lambda(config) else {"lam"}
        return {module: style for module, style in self.parallel_styles.items() if module not in absent}

    def float32_of(self, config: ModelSizes) -> frozenset[str]:
        """Return the float32 parameters that the layers of a configuration have."""
        if self.has_token_lambda(config):
            return frozenset()
        return frozenset({"lam.a", "lam.b"}) if config.dual_lambda else self.float32_parameters

    def heads(self, config: ModelSizes) -> int:
        """Count the heads of a layer, each with its own output."""
        if (noise := self.noise_heads(config)) is not None:
            return config.num_attention_heads - noise
        return config.num_attention_heads // 2 if self.pairs_heads else config.num_attention_heads

    def key_heads(self, config: ModelSizes) -> int:
        """Count the heads of keys, and of values; all but those of a latent are cached."""
        heads = config.num_key_value_heads or config.num_attention_heads
        return heads // 2 if self.pairs_heads else heads

    def query_heads(self, config: ModelSizes) -> int:
        """Count the query heads of the layer's one call of grouped-query attention."""
        return config.num_attention_heads if self.grouped else self.heads(config) * (2 if self.differential else 1)

    def cached_width(self, config: Any) -> int:
        """Return the width of a head of keys in the cache."""
        return config.kv_lora_rank + config.qk_rope_head_dim if self.latent else self.value_width(config)

    def value_width(self, config: Any) -> int:
        """Return the width of a value of that call."""
        return config.v_head_dim if self.latent else head_dim(config) * (2 if self.pairs_heads else 1)

    def attention_products(self, config: ModelSizes) -> int:
        """Count the multiply-adds of a layer's attention for one query and one key that it sees, over all heads.

        A head has a score for each of its maps and one product with its values: the maps are subtracted before it.
        A map that heads share has one score.
        """
        return self.query_heads(config) * head_dim(config) + self.heads(config) * self.value_width(config)

    def attention_weights(self, config: Any) -> int:
        """Count the weights in all attention that every token is multiplied with: projections, W_λ, W_gate, W_D."""
        heads, width, value = config.num_attention_heads, head_dim(config), self.value_width(config)
        queries, keys, of_latents = self.query_heads(config) * width, self.key_heads(config), 0
        layer = self.heads(config) * value  # W_O
        if self.latent:  # W_qa and W_kva; W_qb, W_uk and W_uv
            layer += config.q_lora_rank + self.cached_width(config)
            of_latents = config.q_lora_rank * queries + config.kv_lora_rank * keys * (config.qk_nope_head_dim + value)
        else:
            layer += queries + 2 * keys * value  # W_Q, W_K and W_V
        if self.has_token_lambda(config):
            layer += self.heads(config) * self.gates_per_head
        if config.output_gate:
            layer += self.heads(config) * value
        weights = config.num_hidden_layers * (config.hidden_size * layer + of_latents)
        if self.corrects_heads:
            chosen = config.dex_heads or [range(heads)] * config.num_hidden_layers
            weights += sum(map(len, chosen)) * width**2
        return weights


def head_dim(config: ModelSizes) -> int:
    """Return d, which a configuration always knows once it is made."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


def latent_sizes(
    hidden_size: int, heads: int, head_dim: int | None, given: Mapping[str, int | None]
) -> tuple[dict[str, int], int | None]:
    """Return the sizes of latent attention by name, and d as far as they tell it: D / A unless they do.

    Of those that are not given half of d is for the rotary embedding, values have width d, latents 4d, those of queries
    12d and at most D. Raises ValueError for one below 1, an odd rotary part, and parts that are not d together.
    """
    nope, rope = given["qk_nope_head_dim"], given["qk_rope_head_dim"]
    if head_dim is None and nope is not None and rope is not None:
        head_dim = nope + rope
    d = head_dim or hidden_size // max(heads, 1)
    if rope is None:
        rope = max(2, d // 4 * 2) if nope is None else d - nope
    unless_given = dict(zip(LATENT_SIZES, (min(hidden_size, 12 * d), 4 * d, d - rope, rope, d), strict=True))
    sizes = unless_given | {name: size for name, size in given.items() if size is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}.")
    if rope % 2:
        raise ValueError(f"qk_rope_head_dim must be even for the rotary embedding, got {rope}.")
    if (nope := sizes["qk_nope_head_dim"]) + rope != d:
        raise ValueError(f"head_dim must be qk_nope_head_dim + qk_rope_head_dim, got {d}, {nope} and {rope}.")
    return sizes, head_dim


def lambda_init_schedule(layer: int, offset: int = 0) -> float:
    """Return λ_init of a layer, 0.8 − 0.6·exp(−0.3·(l − 1 + offset)), the paper's default with an offset of 0.

    Args:
        layer: the layer's number l, counted from 1 as in the paper.
        offset: number added to l, for checkpoints that count layers from another origin.

    Raises:
        ValueError: if ``layer`` is smaller than 1.

    Examples:
        >>> [round(lambda_init_schedule(layer), 3) for layer in (1, 2, 12)]
        [0.2, 0.356, 0.778]
    """
    if layer < 1:
        raise ValueError(f"layer must be 1 or more (the paper counts layers from 1), got {layer}.")
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1 + offset))


# By the name that a configuration has as `attention_type`, in the order in which reports show them.
ATTENTION_TYPES: dict[str, AttentionType] = {
    "diff": AttentionType(
        layer="diff_transformer.nn:DiffAttention",
        settings=("lambda_init", "dual_lambda", *_NORM, *_OPTIONS),
        differential=True,
        pairs_heads=True,
        headwise_norm=True,
        lambda_modules=("lam",),
        float32_parameters=frozenset({"lam.q1", "lam.k1", "lam.q2", "lam.k2"}),
        parallel_styles={"lam": SHARED_PARAMETERS},
        label="DIFF",
        colour=("#0072b2", "#4aa8e0"),
        marker="o",
        summary=f"with differential attention ({_PAPER}, Equations 1 to 3).",
    ),
    "diff_grouped": AttentionType(
        layer="diff_transformer.nn:GroupedDiffAttention",
        settings=("num_noise_heads", "token_lambda", "lambda_init", "dual_lambda", *_NORM, *_OPTIONS),
        differential=True,
        pairs_heads=True,
        grouped=True,
        headwise_norm=True,
        lambda_modules=("lam", "lambda_proj"),
        float32_parameters=frozenset({"lam.q1", "lam.k1", "lam.q2", "lam.k2"}),
        parallel_styles={"lam": SHARED_PARAMETERS, "lambda_proj": "colwise"},
        label="grouped DIFF",
        colour=("#8a6d00", "#d1ab1f"),
        marker="P",
        summary=f"with grouped differential attention, after {_PAPER} and "
        "[Grouped Differential Attention](https://arxiv.org/abs/2510.06949).",
    ),
    "diff_v2": AttentionType(
        layer="diff_transformer.nn:DiffAttentionV2",
        settings=(*_NORM, *_OPTIONS),
        differential=True,
        lambda_per_token=True,
        lambda_modules=("lambda_proj",),
        parallel_styles={"lambda_proj": "colwise"},
        label="DIFF V2",
        colour=("#00795c", "#2fbf95"),
        marker="^",
        summary=f"with differential attention in its second version, after {_PAPER}.",
    ),
    "diff_v3": AttentionType(
        layer="diff_transformer.nn:DiffAttentionV3",
        settings=(*_NORM, *_OPTIONS),
        differential=True,
        lambda_per_token=True,
        gates_per_head=2,
        lambda_modules=("lambda_proj",),
        parallel_styles={"lambda_proj": "colwise"},
        label="DIFF V3",
        colour=("#3f6fd8", "#8aaef5"),
        marker="v",
        summary=f"with differential attention of two gates in the place of λ, after {_PAPER}.",
    ),
    "diff_v2_grouped": AttentionType(
        layer="diff_transformer.nn:GroupedDiffAttentionV2",
        settings=("num_noise_heads", *_NORM, *_OPTIONS),
        differential=True,
        grouped=True,
        lambda_per_token=True,
        lambda_modules=("lambda_proj",),
        parallel_styles={"lambda_proj": "colwise"},
        label="grouped DIFF V2",
        colour=("#5c7f1d", "#9ecb4a"),
        marker="X",
        summary=f"with differential attention in groups that share keys and values, after {_PAPER} and "
        "[Grouped Differential Attention](https://arxiv.org/abs/2510.06949).",
    ),
    "gdla": AttentionType(
        layer="diff_transformer.nn:LatentDiffAttention",
        settings=("num_noise_heads", *LATENT_SIZES, "norm_eps", "bias", "output_gate", "rotary", "dropout"),
        differential=True,
        grouped=True,
        latent=True,
        lambda_per_token=True,
        lambda_modules=("lambda_proj",),
        parallel_refusal="its one head of latents belongs to all heads: spread the batch, or the weights by FSDP2",
        label="latent DIFF",
        colour=("#9b5a2e", "#d69a6c"),
        marker="p",
        summary=f"with grouped differential attention over a latent cache, after {_PAPER} and "
        "[Motif-3](https://arxiv.org/abs/2608.09119).",
    ),
    "softmax": AttentionType(
        layer="diff_transformer.nn:SoftmaxAttention",
        settings=(*_NORM, *_OPTIONS),
        even_heads=True,  # so that a configuration stays valid when only its attention type becomes "diff"
        label="Transformer",
        colour=("#d55e00", "#ff8b3d"),
        marker="s",
        summary=f"with ordinary attention: the Transformer that a {_PAPER} is compared with.",
    ),
    "dex": AttentionType(
        layer="diff_transformer.nn:DexAttention",
        settings=("lambda_init", "heads", "lambda_start"),
        corrects_heads=True,
        lambda_modules=("lam",),
        float32_parameters=frozenset({"dex.lam.learned", "dex.lam.progress"}),
        parallel_refusal="fold a trained model into a Llama (diff-transformer convert --to llama), which it spreads",
        label="DEX",
        colour=("#a8508c", "#d88abf"),
        marker="D",
        summary=f"with ordinary attention and a trainable correction of its heads, after {_PAPER} and "
        "[DEX](https://arxiv.org/abs/2505.16333).",
    ),
}
