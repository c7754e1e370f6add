"""The tables of all layouts. docs/converting.md explains them, and how to add one."""

from functools import partial
from typing import Any

from diff_transformer.convert.dex_weights import DexParameters
from diff_transformer.convert.layout import (
    ATTENTION,
    LAYER,
    Layout,
    Row,
    deinterleave_channels,
    interleave_heads,
    repeat_heads,
)
from diff_transformer.convert.layout_settings import (
    read_diffllama,
    read_llama,
    read_microsoft,
    read_microsoft_v2,
    write_diffllama,
    write_llama,
    write_microsoft,
    write_microsoft_v2,
)

# A buffer that old versions of transformers saved; it follows from the settings.
ROTARY_BUFFER = "rotary_emb.inv_freq"


def same(key: str, *shape: str, **more: Any) -> Row:
    """A parameter that has the same key on both sides, and unless told ``more`` the same rows."""
    return Row(target=key, source=key, shape=shape, **more)


def decoder(*attention: Row) -> tuple[Row, ...]:
    """Llama's decoder, whose names are ours, around the rows of an attention layer."""
    return (
        same("model.embed_tokens.weight", "V", "D"),
        *attention,
        same(LAYER + "mlp.gate_proj.weight", "F", "D"),
        same(LAYER + "mlp.up_proj.weight", "F", "D"),
        same(LAYER + "mlp.down_proj.weight", "D", "F"),
        same(LAYER + "input_layernorm.weight", "D"),
        same(LAYER + "post_attention_layernorm.weight", "D"),
        same("model.norm.weight", "D"),
        same("lm_head.weight", "V", "D", absent_if_tied=True),
    )


# λ's vectors: DiffLlama took the authors' names.
LAMBDAS = tuple(
    Row(target=f"{ATTENTION}lam.{name}", source=f"{ATTENTION}lambda_{name}", shape=("d",))
    for name in ("q1", "k1", "q2", "k2")
)
QUERY, KEY, VALUE, OUTPUT = (f"{ATTENTION}{letter}_proj.weight" for letter in "qkvo")

MICROSOFT = Layout(
    name="microsoft",
    attention_type="diff",
    rows=decoder(
        same(QUERY, "A*d", "D", source_rows=deinterleave_channels),
        same(KEY, "K*d", "D", source_rows=deinterleave_channels),
        same(VALUE, "K*d", "D"),
        Row(target=OUTPUT, source=f"{ATTENTION}out_proj.weight", shape=("D", "A*d")),
        *LAMBDAS,
        # Before October 2024 the authors' norm had no weight.
        Row(target=f"{ATTENTION}head_norm.weight", source=f"{ATTENTION}subln.weight", shape=("2*d",), constant=1.0),
    ),
    read=read_microsoft,
    write=write_microsoft,
)

MICROSOFT_V2 = Layout(
    name="microsoft-v2",
    attention_type="diff_v2",
    rows=decoder(
        same(QUERY, "2*A*d", "D", source_rows=deinterleave_channels),
        same(KEY, "K*d", "D", source_rows=deinterleave_channels),
        same(VALUE, "K*d", "D"),
        same(OUTPUT, "D", "A*d"),
        same(f"{ATTENTION}lambda_proj.weight", "A", "D"),
    ),
    read=read_microsoft_v2,
    write=write_microsoft_v2,
)

DIFFLLAMA = Layout(
    name="diffllama",
    attention_type="diff",
    rows=decoder(
        same(QUERY, "A*d", "D", source_rows=interleave_heads),
        same(KEY, "K*d", "D", source_rows=interleave_heads),
        same(VALUE, "K*d", "D", source_rows=interleave_heads),
        same(OUTPUT, "D", "A*d"),
        *LAMBDAS,
        # DiffLlama's norm has no weight: norm(x)·w·W_O takes it into W_O.
        Row(target=f"{ATTENTION}head_norm.weight", source=None, shape=("2*d",), constant=1.0, folded_into=OUTPUT),
    ),
    read=read_diffllama,
    write=write_diffllama,
    ignored=(ROTARY_BUFFER,),
)

LLAMA = Layout(
    name="llama",
    attention_type="softmax",
    rows=decoder(same(QUERY, "A*d", "D"), same(KEY, "K*d", "D"), same(VALUE, "K*d", "D"), same(OUTPUT, "D", "A*d")),
    read=partial(read_llama, attention_type="softmax"),
    write=write_llama,
    ignored=(ROTARY_BUFFER,),
)

# DIFF V2 that computes what the Llama did: with both maps equal and λ = sigmoid(0) = ½, half of the attention's output
# is left, and 2·W_O makes it whole again. Doubling is exact. The gradients of the two queries are 1 : −½, and that of
# W_λ is not 0, so the first step of training parts the maps.
LLAMA_AS_DIFF_V2 = Layout(
    name="llama",
    attention_type="diff_v2",
    rows=decoder(
        same(QUERY, "2*A*d", "D", source_shape=("A*d", "D"), source_rows=repeat_heads),
        same(KEY, "K*d", "D"),
        same(VALUE, "K*d", "D"),
        same(OUTPUT, "D", "A*d", scale=2.0),
        Row(target=f"{ATTENTION}lambda_proj.weight", source=None, shape=("A", "D"), constant=0.0),
    ),
    read=partial(read_llama, attention_type="diff_v2"),
    ignored=(ROTARY_BUFFER,),
)

# The Llama and W_D = 0 (arXiv 2505.16333). The way back takes (I − λ W_D) into W_O.
LLAMA_AS_DEX = Layout(
    name="llama",
    attention_type="dex",
    rows=LLAMA.rows,
    read=partial(read_llama, attention_type="dex"),
    write=write_llama,
    ignored=(ROTARY_BUFFER,),
    extra=DexParameters,
)

# Name → layouts, by the attention type that each becomes here. The first is the default.
LAYOUTS: dict[str, dict[str, Layout]] = {
    name: {layout.attention_type: layout for layout in layouts}
    for name, layouts in {
        "microsoft": (MICROSOFT,),
        "microsoft-v2": (MICROSOFT_V2,),
        "diffllama": (DIFFLLAMA,),
        "llama": (LLAMA, LLAMA_AS_DIFF_V2, LLAMA_AS_DEX),
    }.items()
}
