"""The layouts of other projects: how each names and orders its parameters, and its settings as ours and back.

docs/converting.md explains them, and how to add one.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import DiffLlamaConfig, LlamaConfig, PreTrainedConfig

from diff_transformer.convert.layout import (
    ATTENTION,
    Layout,
    Row,
    deinterleave_channels,
    interleave_heads,
    repeat_heads,
)
from diff_transformer.model import DiffTransformerConfig

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

# A setting of a Llama that ours can only have one way, and why.
FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the feed-forward network here is SwiGLU"),
    "attention_bias": (False, "the projections here have no biases"),
    "mlp_bias": (False, "the feed-forward network here has no biases"),
    "attention_dropout": (0, "attention here has no dropout"),
    "quantization_config": (None, "only weights in floating point are converted"),
}

# What a config.json in the authors' layout may hold: the arguments of their attention module, and Llama's names for
# the rest; `first_depth` is the `depth` that the first layer's module was made with.
AUTHORS_REQUIRED = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_heads")
AUTHORS_OPTIONAL = (
    "num_kv_heads",
    "rope_theta",
    "model_type",
    "architectures",
    "torch_dtype",
    "transformers_version",
)
SUBLN_EPS = 1e-5  # fixed in the module of the authors


def read_transformers(
    raw: Mapping[str, Any], config_class: type[PreTrainedConfig], attention_type: str
) -> DiffTransformerConfig:
    """Settings of transformers' Llama or DiffLlama as ours, of an attention type that its weights can become.

    Both count heads as we do. DiffLlama counts layers from 0 where we count from 1.
    """
    _check_model_type(config_class, raw)
    config = _valid(lambda: config_class.from_dict(dict(raw)))
    for name, (value, reason) in FIXED.items():
        if (got := getattr(config, name, value)) not in (value, None):
            raise ValueError(f"{name} must be {value!r}, because {reason}; got {got!r}.")
    settings = {name: getattr(config, name) for name in (*SHARED, *HEADS)}
    return _valid(lambda: DiffTransformerConfig(attention_type=attention_type, **settings))


def write_transformers(config: DiffTransformerConfig, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Our settings as those of transformers' Llama or DiffLlama."""
    settings = {name: getattr(config, name) for name in (*SHARED, *HEADS)}
    model = config_class.__name__.replace("Config", "ForCausalLM")
    return _json(_valid(lambda: config_class(architectures=[model], **settings)))


def read_microsoft(raw: Mapping[str, Any]) -> DiffTransformerConfig:
    """Settings in the authors' layout: `num_heads` and `num_kv_heads` are half of what ours are."""
    _check_keys(raw, (*AUTHORS_OPTIONAL, "first_depth"))
    heads, width = raw["num_heads"], raw["hidden_size"]
    kv_heads = raw.get("num_kv_heads") or heads
    if width % (2 * heads):
        raise ValueError(f"hidden_size must be a multiple of 2·num_heads, got {width} and {heads}.")
    if raw.get("rms_norm_eps", SUBLN_EPS) != SUBLN_EPS:
        raise ValueError(
            f"rms_norm_eps must be {SUBLN_EPS}: the authors' headwise norm has that eps, and ours has the eps of all "
            f"norms; got {raw['rms_norm_eps']}."
        )
    return _from_authors(
        raw,
        attention_type="diff",
        num_attention_heads=2 * heads,
        num_key_value_heads=2 * kv_heads,
        head_dim=width // (2 * heads),
        lambda_init_offset=raw.get("first_depth", 0),
    )


def write_microsoft(config: DiffTransformerConfig) -> dict[str, Any]:
    """Settings in the authors' layout."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert kv_heads is not None  # never None once it is constructed
    fields = {"num_heads": heads // 2, "num_kv_heads": kv_heads // 2, "first_depth": config.lambda_init_offset}
    return {"model_type": "microsoft_diff", **fields, **_shared_json(config)}


def read_microsoft_v2(raw: Mapping[str, Any]) -> DiffTransformerConfig:
    """Settings in the authors' second layout: `num_heads` counts output heads, as ours does."""
    _check_keys(raw, (*AUTHORS_OPTIONAL, "head_dim"))
    heads = raw["num_heads"]
    return _from_authors(
        raw,
        attention_type="diff_v2",
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_kv_heads") or heads,
        head_dim=raw.get("head_dim"),
    )


def write_microsoft_v2(config: DiffTransformerConfig) -> dict[str, Any]:
    """Settings in the authors' second layout."""
    fields = {"num_heads": config.num_attention_heads, "num_kv_heads": config.num_key_value_heads}
    return {"model_type": "microsoft_diff_v2", **fields, "head_dim": config.head_dim, **_shared_json(config)}


def write_settings(layout: Layout, config: DiffTransformerConfig) -> dict[str, Any]:
    """The config.json of another layout, which read again gives the same model.

    Raises:
        ValueError: it does not, as the layout has no setting for something that the model has, or a fixed one.
    """
    assert layout.write is not None
    settings = layout.write(config)
    read_again = layout.read(settings)
    names = [*SHARED, *HEADS, "sliding_window", "has_headwise_norm"]
    if config.described.differential and "lambda_init" in config.described.settings:
        names += ["lambda_init", "lambda_init_offset"]
    changed = [
        f"{name.removeprefix('has_')} {getattr(config, name)!r} (it would become {getattr(read_again, name)!r})"
        for name in names
        if getattr(config, name) != getattr(read_again, name)
    ]
    if changed:
        raise ValueError(f"the layout {layout.name!r} cannot hold {', '.join(changed)}.")
    return settings


def read_diff_transformer(raw: Mapping[str, Any]) -> DiffTransformerConfig:
    """Our own config.json."""
    _check_model_type(DiffTransformerConfig, raw)
    return _valid(lambda: DiffTransformerConfig.from_dict(dict(raw)))


def write_diff_transformer(config: DiffTransformerConfig) -> dict[str, Any]:
    """Our own config.json."""
    config.architectures = ["DiffTransformerForCausalLM"]
    return _json(config)


def with_dex(
    config: DiffTransformerConfig, heads: Sequence[Sequence[int]] | None, lambda_start: float | None
) -> DiffTransformerConfig:
    """A "dex" configuration with its heads chosen.

    Raises:
        ValueError: heads that it has not, or another attention type.
    """
    if not config.described.corrects_heads:
        raise ValueError(
            f"dex_heads and dex_lambda_start belong to the attention type 'dex', not to {config.attention_type!r}."
        )
    chosen = {"dex_heads": None if heads is None else [list(layer) for layer in heads]}
    settings = {**config.to_dict(), **chosen, "dex_lambda_start": lambda_start}
    return _valid(lambda: DiffTransformerConfig.from_dict(settings))


def _from_authors(raw: Mapping[str, Any], **fields: Any) -> DiffTransformerConfig:
    settings = {name: raw[name] for name in (*SHARED, "rope_theta") if name in raw}
    settings.setdefault("dtype", raw.get("torch_dtype"))
    return _valid(lambda: DiffTransformerConfig(**settings, **fields))


def _shared_json(config: DiffTransformerConfig) -> dict[str, Any]:
    everything = json.loads(config.to_json_string(use_diff=False))
    return {name: everything[name] for name in SHARED if name in everything}


def _json(config: PreTrainedConfig) -> dict[str, Any]:
    return json.loads(config.to_json_string())


def _check_model_type(config_class: type[PreTrainedConfig], raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") != config_class.model_type:
        raise ValueError(f"model_type must be {config_class.model_type!r}, got {raw.get('model_type')!r}.")


def _check_keys(raw: Mapping[str, Any], optional: tuple[str, ...]) -> None:
    missing = [name for name in AUTHORS_REQUIRED if name not in raw]
    unknown = sorted(raw.keys() - {*AUTHORS_REQUIRED, *SHARED, *optional})
    if missing or unknown:
        kinds = {"missing": missing, "unknown": unknown}
        raise ValueError("; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names) + ".")
    if raw.get("rope_theta") is not None and raw.get("rope_parameters") is not None:
        raise ValueError("rope_theta and rope_parameters are both given, and only one can hold.")
    for name in (*AUTHORS_REQUIRED, "num_kv_heads", "head_dim"):
        value = raw.get(name)
        if (value is not None or name in AUTHORS_REQUIRED) and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}.")


def _valid(build: Callable[[], Config]) -> Config:
    """What a configuration class made of settings, or a ValueError in one line."""
    try:
        return build()
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except ZeroDivisionError:  # how transformers takes a model of no heads
        raise ValueError("a size that others are divided by, such as num_attention_heads, is 0.") from None


def transformers_layout(
    config_class: type[PreTrainedConfig], attention_type: str, *rows: Row, writable: bool = True
) -> Layout:
    """The layout of a model of transformers' own as one of our attention types."""
    return Layout(
        name=config_class.model_type,
        attention_type=attention_type,
        rows=rows,
        read=partial(read_transformers, config_class=config_class, attention_type=attention_type),
        write=partial(write_transformers, config_class=config_class) if writable else None,
        # A buffer that old versions of transformers saved; it follows from the settings.
        ignored=("rotary_emb.inv_freq",),
    )


# λ's vectors: DiffLlama took the authors' names.
LAMBDAS = tuple(
    Row(target=f"{ATTENTION}lam.{name}", source=f"{ATTENTION}lambda_{name}") for name in ("q1", "k1", "q2", "k2")
)
QUERY, KEY, VALUE, OUTPUT = (f"{ATTENTION}{letter}_proj.weight" for letter in "qkvo")
NORM = f"{ATTENTION}head_norm.weight"

MICROSOFT_V2 = Layout(
    name="microsoft-v2",
    attention_type="diff_v2",
    rows=tuple(Row(target=key, source=key, source_rows=deinterleave_channels) for key in (QUERY, KEY)),
    read=read_microsoft_v2,
    write=write_microsoft_v2,
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
    read=read_microsoft,
    write=write_microsoft,
)

DIFFLLAMA = transformers_layout(
    DiffLlamaConfig,
    "diff",
    *(Row(target=key, source=key, source_rows=interleave_heads) for key in (QUERY, KEY, VALUE)),
    *LAMBDAS,
    # DiffLlama's norm has no weight: norm(x)·w·W_O takes it into W_O.
    Row(target=NORM, source=None, constant=1.0, folded_into=OUTPUT),
)

LLAMA = transformers_layout(LlamaConfig, "softmax")

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
LLAMA_AS_DEX = transformers_layout(LlamaConfig, "dex")

# Name → layouts, by the attention type that each becomes here. The first is the default.
LAYOUTS: dict[str, dict[str, Layout]] = {}
for _layout in (MICROSOFT, MICROSOFT_V2, DIFFLLAMA, LLAMA, LLAMA_AS_DIFF_V2, LLAMA_AS_DEX):
    LAYOUTS.setdefault(_layout.name, {})[_layout.attention_type] = _layout
