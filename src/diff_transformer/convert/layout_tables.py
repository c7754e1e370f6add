"""Lists the layouts of other projects: how each names and orders its parameters, its settings as ours and back.

docs/converting.md explains them, and how to add one.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, LlamaConfig, PreTrainedConfig

from diff_transformer.attention_types import ATTENTION_OPTIONS, ATTENTION_TYPES
from diff_transformer.convert.layout import (
    ATTENTION,
    KEY,
    OUTPUT,
    QUERY,
    VALUE,
    Layout,
    Row,
    deinterleave_channels,
    interleave_heads,
    repeat_heads,
)
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.nn import AnnealedLambda, annealed_lambda, fold_output
from diff_transformer.nn.layers import constant_lambda
from diff_transformer.utils.suggestions import quoted, some

Config = TypeVar("Config", bound=PreTrainedConfig)

# Settings that mean the same everywhere, and the heads, which only transformers' own layouts count as we do.
SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "initializer_range",
    "tie_word_embeddings",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")

# Options of attention that mean the same in a Llama and in our "softmax".
OPTIONS = ("attention_bias", "attention_dropout")
# A setting of a Llama or DiffLlama that can only be one way where it is not carried over, and why.
FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "its feed-forward network becomes SwiGLU"),
    "attention_bias": (False, "biases of this attention are not covered"),
    "mlp_bias": (False, "the feed-forward network here has no biases"),
    "attention_dropout": (0, "the dropout of this attention is not covered"),
    "quantization_config": (None, "only weights in floating point are converted"),
    "is_causal": (True, "only models that predict the next token are converted"),
}

# What a config.json in the authors' layout may hold: the arguments of their attention module, and Llama's names for
# the rest; `first_depth` is the `depth` that the first layer's module was made with.
AUTHORS_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_heads")
AUTHORS_OPTIONAL = ("num_kv_heads", "rope_theta", "model_type", "architectures", "torch_dtype", "transformers_version")
# The setting that one layout of theirs alone has, and ours for it.
FIRST_DEPTH, HEAD_DIM = ("first_depth", "lambda_init_offset"), ("head_dim", "head_dim")
SUBLN_EPS = 1e-5  # fixed in the module of the authors, and Motif's unless its config.json says otherwise

# What config.json of a Motif must hold, and settings that may have one value alone.
MOTIF_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
)
MOTIF_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("poly_norm", "other activations of a Motif are not covered"),
    "k_ratio": (1, "other numbers of keys to a noise head are not covered"),
    **dict.fromkeys(("use_bias", "attention_bias", "qkv_bias", "mlp_bias"), (False, "biases are not covered")),
    "use_sliding_window": (False, "the windows of a Motif are not covered"),
    "attention_dropout": (0, "the dropout of a Motif is not covered"),
    "partial_rotary_factor": (1, "all channels of a head are turned here"),
    "kv_lora_rank": (None, "the latent attention of Motif-3 is not covered"),
    "num_experts": (0, "the experts of Motif-3 are not covered"),
    "mhc_enabled": (False, "the residual streams of Motif-3 are not covered"),
    "quantization_config": (None, "only weights in floating point are converted"),
}
MOTIF_OFFSET = -1  # its λ_init counts layers from 0 and subtracts 1, as the schedule does that counts from 1


def read_config(raw: Mapping[str, Any], config_class: type[Config]) -> Config:
    """Return a config.json that transformers' `save_pretrained` wrote, ours included."""
    if raw.get("model_type") != config_class.model_type:
        raise ValueError(f"model_type must be {config_class.model_type!r}, got {quoted(raw.get('model_type'))}.")
    return config_class.from_dict(dict(raw))


def read_transformers(
    raw: Mapping[str, Any], config_class: type[PreTrainedConfig], attention_type: str, options: tuple[str, ...]
) -> DiffTransformerConfig:
    """Read settings of transformers' Llama or DiffLlama as ours, of an attention type that its weights can become.

    Both count heads as we do. DiffLlama counts layers from 0, we count from 1.
    """
    config = read_config(raw, config_class)
    for name, (value, reason) in FIXED.items():
        if name not in options and (setting := getattr(config, name, value)) not in (value, None):
            raise ValueError(f"{name} must be {value!r}, because {reason}; got {quoted(setting)}.")
    settings = {name: getattr(config, name) for name in (*SHARED, *HEADS, *options)}
    return DiffTransformerConfig(attention_type=attention_type, **settings)


def write_transformers(
    config: DiffTransformerConfig, config_class: type[PreTrainedConfig], options: tuple[str, ...]
) -> dict[str, Any]:
    """Write our settings as those of transformers' Llama or DiffLlama."""
    settings = {name: getattr(config, name) for name in (*SHARED, *HEADS, *options)}
    model = config_class.__name__.replace("Config", "ForCausalLM")
    return json.loads(config_class(architectures=[model], **settings).to_json_string())


def read_authors(raw: Mapping[str, Any], attention_type: str, extra: tuple[str, str]) -> DiffTransformerConfig:
    """Read settings of the authors' layouts as ours. The first counts pairs of heads; the second, output heads."""
    spec = ATTENTION_TYPES[attention_type]
    their_name, our_name = extra
    missing = [name for name in AUTHORS_REQUIRED if name not in raw]
    unknown = sorted(raw.keys() - {*AUTHORS_REQUIRED, *SHARED, *AUTHORS_OPTIONAL, their_name})
    if missing or unknown:
        kinds = {"missing": missing, "unknown": unknown}
        raise ValueError("; ".join(f"{kind}: {some(names)}" for kind, names in kinds.items() if names) + ".")
    if raw.get("rope_theta") is not None and raw.get("rope_parameters") is not None:
        raise ValueError("rope_theta and rope_parameters are both given, and only one can hold.")
    for name in (*AUTHORS_REQUIRED, "num_kv_heads", "head_dim"):
        value = raw.get(name)
        if (value is not None or name in AUTHORS_REQUIRED) and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number, 1 or more, got {quoted(value)}.")
    heads, width = raw["num_heads"], raw["hidden_size"]
    if spec.pairs_heads and width % (2 * heads):
        raise ValueError(f"hidden_size must be a multiple of 2·num_heads, got {width} and {heads}.")
    settings = {name: raw[name] for name in (*SHARED, "rope_theta") if name in raw}
    if spec.headwise_norm and raw.get("rms_norm_eps", SUBLN_EPS) != SUBLN_EPS:
        settings["attention_norm_eps"] = SUBLN_EPS
    settings.setdefault("dtype", raw.get("torch_dtype"))
    if their_name in raw:
        settings[our_name] = raw[their_name]
    per_head = 2 if spec.pairs_heads else 1
    settings["num_attention_heads"] = per_head * heads
    settings["num_key_value_heads"] = per_head * (raw.get("num_kv_heads") or heads)
    return DiffTransformerConfig(attention_type=attention_type, **settings)


def write_authors(config: DiffTransformerConfig, extra: tuple[str, str]) -> dict[str, Any]:
    """Write our settings in the authors' layout of an attention type."""
    their_name, our_name = extra
    everything = json.loads(config.to_json_string(use_diff=False))
    return {
        "model_type": f"microsoft_{config.attention_type}",
        "num_heads": config.spec.heads(config),
        "num_kv_heads": config.spec.key_heads(config),
        their_name: getattr(config, our_name),
        **{name: everything[name] for name in SHARED if name in everything},
    }


def read_motif(raw: Mapping[str, Any], attention_type: str) -> DiffTransformerConfig:
    """Read settings of a Motif as ours, plain ("diff") or grouped. It counts heads as we do.

    Settings that are not named here are not read: those that are known change nothing in a forward pass.
    """
    grouped = ATTENTION_TYPES[attention_type].grouped
    if str(raw.get("model_type")).lower() != "motif":
        raise ValueError(f"model_type must be 'Motif', got {quoted(raw.get('model_type'))}.")
    if not grouped and raw.get("num_noise_heads") is not None:
        raise ValueError(f"num_noise_heads {raw['num_noise_heads']} is for the layout 'motif-2', which has groups.")
    required = (*MOTIF_REQUIRED, *(("num_noise_heads", "head_dim") if grouped else ()))
    if missing := [name for name in required if raw.get(name) is None]:
        raise ValueError(f"missing: {', '.join(missing)}.")
    for name, (value, reason) in MOTIF_FIXED.items():
        if raw.get(name) not in (value, None):
            raise ValueError(f"{name} must be {value!r}, because {reason}; got {quoted(raw[name])}.")
    heads, width, head_dim = raw["num_attention_heads"], raw["hidden_size"], raw.get("head_dim")
    if not grouped and head_dim is not None and head_dim * heads != width:
        raise ValueError(
            f"head_dim must be hidden_size / num_attention_heads without groups, got {head_dim}, {width} and {heads}."
        )
    rotary = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if rotary and rotary | {"rope_theta": None} != {"rope_type": "default", "rope_theta": None}:
        raise ValueError(f"rope_scaling must be null, because that of a Motif is not covered; got {quoted(rotary)}.")
    if (theta := rotary.get("rope_theta", raw.get("rope_theta"))) is None:
        raise ValueError("missing: rope_theta.")
    eps = raw.get("attn_rms_norm_eps", SUBLN_EPS)
    settings = {name: raw[name] for name in (*SHARED, *HEADS) if name in raw}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    settings.setdefault("dtype", raw.get("torch_dtype"))
    if grouped:
        settings["num_noise_heads"] = raw["num_noise_heads"]
    return DiffTransformerConfig(
        attention_type=attention_type,
        hidden_act="poly_norm",
        lambda_init_offset=MOTIF_OFFSET,
        attention_norm_eps=None if eps == raw["rms_norm_eps"] else eps,
        **settings,
    )


def write_motif(config: DiffTransformerConfig) -> dict[str, Any]:
    """Write our settings as those of a Motif, plain or grouped."""
    everything = json.loads(config.to_json_string(use_diff=False))
    rotary = everything.pop("rope_parameters")
    is_default = rotary["rope_type"] == "default"
    return {
        "architectures": ["MotifForCausalLM"],
        "model_type": "Motif",
        **{name: everything[name] for name in (*SHARED, *HEADS, "hidden_act") if name in everything},
        "rope_theta": rotary["rope_theta"],
        "rope_scaling": None if is_default else rotary,
        "attn_rms_norm_eps": config.norm_eps_in_attention,
        "use_bias": False,
        **({"num_noise_heads": config.num_noise_heads, "k_ratio": 1} if config.spec.grouped else {}),
    }


def write_settings(layout: Layout, config: DiffTransformerConfig) -> dict[str, Any]:
    """Return the config.json of another layout, which read again gives the same model.

    Raises:
        ValueError: it does not, as the layout has no setting for something that the model has, or a fixed one.
    """
    assert layout.write is not None
    settings = layout.write(config)
    read_again = layout.read(settings)
    names = [*SHARED, *HEADS, "sliding_window", "has_headwise_norm"]
    names += [*ATTENTION_OPTIONS, "is_causal", "hidden_act", "has_token_lambda", "dual_lambda"]
    if config.has_headwise_norm:
        names.append("norm_eps_in_attention")
    if config.spec.differential and "lambda_init" in config.spec.settings:
        names += ["lambda_init", "lambda_init_offset"]
    changed = [
        f"{name.removeprefix('has_')} {getattr(config, name)!r} (it would become {getattr(read_again, name)!r})"
        for name in names
        if getattr(config, name) != getattr(read_again, name)
    ]
    if changed:
        raise ValueError(f"the layout {layout.name!r} cannot hold {', '.join(changed)}.")
    return settings


def initial_dex_lambda(config: DiffTransformerConfig, layer: int) -> float:
    """Return λ_learn of a model that is not trained."""
    return AnnealedLambda(layer + 1, config.lambda_init_of(layer + 1), config.dex_lambda_start).start


def fold_dex(
    config: DiffTransformerConfig, layer: int, output_weight: Tensor, weight: Tensor, learned: Tensor, progress: Tensor
) -> Tensor:
    """Fold the layer's correction into W_O, with λ as training left it."""
    lambda_init = constant_lambda(layer + 1, config.lambda_init_of(layer + 1))
    lam = annealed_lambda(lambda_init, learned.double().squeeze(0), progress.double())
    return fold_output(output_weight, weight, lam, config.dex_heads and config.dex_heads[layer])


def fold_norm(config: DiffTransformerConfig, layer: int, output_weight: Tensor, norm_weight: Tensor) -> Tensor:
    """Fold the weight of the headwise norm, which the heads share, into the columns of W_O, head by head."""
    if bool((norm_weight == 1).all()):
        return output_weight
    wide = torch.promote_types(torch.promote_types(output_weight.dtype, norm_weight.dtype), torch.float32)
    heads = output_weight.to(wide).unflatten(1, (-1, norm_weight.numel()))
    return (heads * norm_weight.to(wide)).flatten(1).to(output_weight.dtype)


def transformers_layout(
    config_class: type[PreTrainedConfig],
    attention_type: str,
    *rows: Row,
    fold: Callable[..., Tensor] | None = None,
    writable: bool = True,
    options: tuple[str, ...] = (),
) -> Layout:
    """Return the layout of a model of transformers' own as one of our attention types; ``options`` are carried over."""
    return Layout(
        name=config_class.model_type,
        attention_type=attention_type,
        rows=rows,
        read=partial(read_transformers, config_class=config_class, attention_type=attention_type, options=options),
        write=partial(write_transformers, config_class=config_class, options=options) if writable else None,
        fold=fold,
        # A buffer that old versions of transformers saved; it follows from the settings.
        ignored=("rotary_emb.inv_freq",),
    )


# λ's vectors: DiffLlama took the authors' names.
LAMBDAS = tuple(
    Row(target=f"{ATTENTION}lam.{name}", source=f"{ATTENTION}lambda_{name}") for name in ("q1", "k1", "q2", "k2")
)
NORM = f"{ATTENTION}head_norm.weight"

MICROSOFT_V2 = Layout(
    name="microsoft-v2",
    attention_type="diff_v2",
    rows=tuple(Row(target=key, source=key, source_rows=deinterleave_channels) for key in (QUERY, KEY)),
    read=partial(read_authors, attention_type="diff_v2", extra=HEAD_DIM),
    write=partial(write_authors, extra=HEAD_DIM),
)

MICROSOFT = Layout(
    name="microsoft",
    attention_type="diff",
    rows=(
        *MICROSOFT_V2.rows,
        Row(target=OUTPUT, source=f"{ATTENTION}out_proj.weight"),
        *LAMBDAS,
        # Before October 2024 the authors' norm had no weight.
        Row(target=NORM, source=f"{ATTENTION}subln.weight", constant=1.0),
    ),
    read=partial(read_authors, attention_type="diff", extra=FIRST_DEPTH),
    write=partial(write_authors, extra=FIRST_DEPTH),
)

DIFFLLAMA = transformers_layout(
    DiffLlamaConfig,
    "diff",
    *(Row(target=key, source=key, source_rows=interleave_heads) for key in (QUERY, KEY, VALUE)),
    *LAMBDAS,
    # DiffLlama's norm has no weight: norm(x)·w·W_O takes it into W_O.
    Row(target=NORM, source=None, constant=1.0),
    fold=fold_norm,
)

# Motif's attention has its heads where ours are, the noise head behind its signal heads; two names differ.
MOTIF, MOTIF_2 = (
    Layout(
        name=name,
        attention_type=attention_type,
        rows=(*LAMBDAS, Row(target=NORM, source=f"{ATTENTION}subln.weight")),
        read=partial(read_motif, attention_type=attention_type),
        write=write_motif,
        ignored=("rotary_emb.inv_freq",),
    )
    for name, attention_type in (("motif", "diff"), ("motif-2", "diff_grouped"))
)

LLAMA = transformers_layout(LlamaConfig, "softmax", options=OPTIONS)

# DIFF V2 that computes what the Llama did: with both maps equal and λ = sigmoid(0) = ½, half of the attention's output
# is left, and 2·W_O restores it. Doubling is exact. The gradients of the two queries are 1 : −½, and that of W_λ is
# not 0, so the first step of training parts the maps.
LLAMA_AS_DIFF_V2 = transformers_layout(
    LlamaConfig,
    "diff_v2",
    Row(target=QUERY, source=QUERY, source_rows=repeat_heads),
    Row(target=OUTPUT, source=OUTPUT, scale=2.0),
    Row(target=f"{ATTENTION}lambda_proj.weight", source=None, constant=0.0),
    writable=False,
)

# The Llama and W_D = 0 (arXiv 2505.16333). The way back takes (I − λ W_D) into W_O.
LLAMA_AS_DEX = transformers_layout(
    LlamaConfig,
    "dex",
    Row(target=f"{ATTENTION}dex.weight", source=None, constant=0.0),
    Row(target=f"{ATTENTION}dex.lam.learned", source=None, constant=initial_dex_lambda),
    Row(target=f"{ATTENTION}dex.lam.progress", source=None, constant=1.0),
    fold=fold_dex,
)

# Name → layouts, by the attention type that each becomes here. The first is the default.
LAYOUTS: dict[str, dict[str, Layout]] = {}
for _layout in (MICROSOFT, MICROSOFT_V2, DIFFLLAMA, LLAMA, LLAMA_AS_DIFF_V2, LLAMA_AS_DEX, MOTIF, MOTIF_2):
    LAYOUTS.setdefault(_layout.name, {})[_layout.attention_type] = _layout
