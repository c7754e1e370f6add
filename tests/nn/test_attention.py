"""DiffAttention, DiffAttentionV2 and SoftmaxAttention against the float64 oracle, and what they refuse."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_upper_left
from transformers import DynamicCache, LlamaConfig, StaticCache

from diff_transformer import DiffAttention, DiffAttentionV2, SoftmaxAttention
from diff_transformer.nn import Attention, RotaryEmbedding
from sharp_layers import build, by_oracle, check, inputs, tables
from tiny_model import KINDS

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"is_causal": True},
    "rotary": {"rotary": True},
    "causal, rotary": {"is_causal": True, "rotary": True},
    "causal, rotary, grouped by 2": {"is_causal": True, "rotary": True, "num_key_value_heads": 4},
    "causal, rotary, grouped by 4": {"is_causal": True, "rotary": True, "num_key_value_heads": 2},
    "grouped, not causal": {"num_key_value_heads": 2},
    "head_dim of its own": {"head_dim": 6, "is_causal": True, "rotary": True, "num_key_value_heads": 4},
    "head_dim from hidden_size": {"head_dim": None, "num_attention_heads": 6, "is_causal": True},
    "left padding": {"mask": "padding", "is_causal": True, "rotary": True},
    "left padding, grouped, not causal": {"mask": "padding", "num_key_value_heads": 2},
    "additive mask": {"mask": "additive"},
    "additive mask, causal": {"mask": "additive", "is_causal": True, "rotary": True},
    "mask for each head": {"mask": "heads", "is_causal": True},
    "one token": {"length": 1, "is_causal": True, "rotary": True},
    "first layer": {"layer": 1, "is_causal": True},
    "layer 20": {"layer": 20, "is_causal": True},
}


def a_mask(kind: str | None, batch: int, heads: int, length: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "padding":
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool)
        mask[0, ..., :3] = False
        return mask
    if kind == "heads":
        mask = torch.rand(batch, heads, length, length) < 0.6
        return mask | torch.eye(length, dtype=torch.bool)
    mask = 2 * torch.randn(batch, 1, length, length, dtype=torch.float64)
    return mask.masked_fill(torch.rand(mask.shape) < 0.3, float("-inf"))


@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(kind: str, case: str) -> None:
    arguments = dict(CASES[case])
    length, rotary, mask = arguments.pop("length", 7), arguments.pop("rotary", False), arguments.pop("mask", None)
    is_causal = arguments.pop("is_causal", False)
    module = build(kind, **arguments)
    heads = 1 if kind == "diff_v2" else module.o_proj.in_features // module.value_width
    x, attn_mask = inputs(length=length), a_mask(mask, 2, heads, length)
    answer = module(
        x, tables(range(length), module.rotary_width) if rotary else None, attn_mask=attn_mask, is_causal=is_causal
    )
    positions = range(length) if rotary else None
    expected = by_oracle(module, x, positions=positions, attn_mask=attn_mask, is_causal=is_causal)
    check(answer, expected)


LAYERS = LlamaConfig(num_hidden_layers=2)
CACHES: dict[str, Callable[[], DynamicCache | StaticCache]] = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(config=LAYERS, max_cache_len=10),
    "static, full": lambda: StaticCache(config=LAYERS, max_cache_len=7),
}


@pytest.mark.parametrize("kind_of_cache", CACHES)
@pytest.mark.parametrize(("chunks", "kv_heads"), [((1,) * 7, 8), ((4, 3), 8), ((2, 1, 3, 1), 4), ((6, 1), 4)], ids=str)
def test_through_a_cache(
    kind: str, kind_of_cache: str, chunks: tuple[int, ...], kv_heads: int
) -> None:  # fmt: skip
    """Queries at the end of longer keys (N < S), for two layers that share one cache of transformers'."""
    first, second = (build(kind, layer, num_key_value_heads=kv_heads) for layer in (1, 2))
    x, cache, start, parts = inputs(), CACHES[kind_of_cache](), 0, []
    for size in chunks:
        stop = start + size
        position = tables(range(start, stop))
        hidden = first(x[:, start:stop], position, is_causal=True, cache=cache)
        parts.append(second(hidden, position, is_causal=True, cache=cache))
        start = stop
    middle = torch.from_numpy(by_oracle(first, x, positions=range(7), is_causal=True))
    check(torch.cat(parts, 1), by_oracle(second, middle, positions=range(7), is_causal=True))
    width, heads = (8, kv_heads // 2) if first.pairs_kv_heads else (4, first.k_proj.out_features // 4)
    widths = {"key": width, "value": width}
    if kind == "gdla":  # c of 8 channels and k_pe of 4, for all heads
        widths, heads = {"key": 12, "value": 0}, 1
    for layer in cache.layers:
        assert layer.keys.shape == (2, heads, layer.keys.shape[2], widths["key"])
        assert layer.values.shape == (*layer.keys.shape[:3], widths["value"])


@pytest.mark.parametrize(("dtype", "qk_norm"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_one_token_is_projected_as_any_other(kind: str, dtype: torch.dtype, qk_norm: bool) -> None:
    """While decoding, queries and keys are turned at once: bit by bit as in training, in the same form."""
    module, batches = build(kind, dtype=dtype, num_key_value_heads=4, qk_norm=qk_norm).eval(), (0, 1, 3)
    position = [table.to(dtype) for table in tables(range(5, 6))]
    for x in (torch.randn(batch, 1, module.hidden_size, dtype=dtype) for batch in batches):
        expected = module.project(x, position)
        with torch.no_grad():
            answer = module.project(x, position)
        torch.testing.assert_close(answer, expected, rtol=0, atol=0)


def test_padding_mask_through_a_cache(kind: str) -> None:
    """A padding mask (B, 1, 1, S) and causality at N < S together."""
    module, x, cache = build(kind, layer=1), inputs(), DynamicCache()
    mask = a_mask("padding", 2, 1, 7)
    module(x[:, :5], is_causal=True, attn_mask=mask[..., :5], cache=cache)
    answer = module(x[:, 5:], is_causal=True, attn_mask=mask, cache=cache)
    check(answer, by_oracle(module, x, is_causal=True, attn_mask=mask)[:, 5:])
    additive = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    cache.crop(-2)
    check(module(x[:, 5:], is_causal=True, attn_mask=additive, cache=cache), answer)


@pytest.mark.parametrize("form", ["boolean", "additive"])
def test_a_query_that_sees_nothing(kind: str, form: str) -> None:
    """Left padding under causality hides everything from the padding: its output and gradient are 0, never NaN."""
    module, x = build(kind), inputs().requires_grad_()
    mask = a_mask("padding", 2, 1, 7)
    if form == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    out = module(x, is_causal=True, attn_mask=mask)
    assert torch.equal(out[0, :3], torch.zeros_like(out[0, :3]))
    out.sum().backward()
    for gradient in (x.grad, *(parameter.grad for parameter in module.parameters())):
        assert gradient.isfinite().all()
    assert torch.equal(x.grad[0, :3], torch.zeros_like(x.grad[0, :3]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, "padding", "additive"])
def test_other_dtypes(kind: str, dtype: torch.dtype, mask: str | None) -> None:
    """Weights and input have the dtype's values, so that only the computation differs from the oracle."""
    module, x = build(kind, dtype=dtype), inputs().to(dtype)
    attn_mask = a_mask(mask, 2, 4, 7)
    if mask == "additive":
        attn_mask = attn_mask.float()  # a mask stays in float32 when a model is cast
    answer = module(x, is_causal=True, attn_mask=attn_mask)
    assert answer.dtype == dtype
    check(answer, by_oracle(module, x, is_causal=True, attn_mask=attn_mask))


def test_autocast(kind: str) -> None:
    module, x = build(kind, dtype=torch.bfloat16).float(), inputs().bfloat16().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = module(x, RotaryEmbedding(4).positions(x), is_causal=True)
    assert answer.dtype == torch.bfloat16
    check(answer, by_oracle(module, x, positions=range(7), is_causal=True))
    answer.float().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


BAD: dict[str, tuple[type, dict[str, Any], str]] = {
    "odd heads": (DiffAttention, {"num_attention_heads": 3}, r"even .*, got 3 and 3\.$"),
    "odd key/value heads": (DiffAttention, {"num_key_value_heads": 1}, r"even .*, got 8 and 1\.$"),
    "heads not divisible": (
        SoftmaxAttention,
        {"num_key_value_heads": 3},
        r"multiple of num_key_value_heads, got 8 and 3",
    ),
    "more key/value heads": (DiffAttentionV2, {"num_key_value_heads": 16}, r"got 8 and 16\.$"),
    "no heads": (DiffAttention, {"num_attention_heads": 0}, r"num_attention_heads must be a positive .*got 0 and 0"),
    "no key/value heads": (DiffAttention, {"num_key_value_heads": 0}, r"num_key_value_heads.* got 8 and 0\.$"),
    "width not divisible": (DiffAttention, {"hidden_size": 28}, r"hidden_size must be a multiple .*, got 28 and 8\.$"),
    "no head_dim": (SoftmaxAttention, {"head_dim": 0}, r"head_dim must be 1 or more, got 0\.$"),
    "layer 0": (DiffAttention, {"layer": 0}, r"layer must be 1 or more .*counts layers from 1.*, got 0\.$"),
    "layer 0 of the Transformer": (SoftmaxAttention, {"layer": 0}, r"layer must be 1 or more .*, got 0\.$"),
    "λ_init unknown": (DiffAttention, {"lambda_init": "linear"}, r"lambda_init must be .*, got 'linear'\.$"),
    "λ_init infinite": (DiffAttention, {"lambda_init": float("inf")}, r"lambda_init must be .*, got inf\.$"),
    "λ_init boolean": (DiffAttention, {"lambda_init": True}, r"lambda_init must be .*, got True\.$"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sizes(case: str) -> None:
    module, arguments, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        module(**{"hidden_size": 24, "num_attention_heads": 8, "layer": 1, **arguments})


def test_odd_heads_are_fine_without_pairs() -> None:
    for module in (DiffAttentionV2, SoftmaxAttention):
        assert module(24, 3, 1, num_key_value_heads=1)(torch.randn(1, 2, 24)).shape == (1, 2, 24)


@pytest.mark.parametrize("shape", [(2, 5, 23), (5, 24), (1, 2, 5, 24)], ids=str)
def test_bad_input(kind: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"hidden_states must be \(B, N, 24\), got \(" + ", ".join(map(str, shape))):
        build(kind)(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(4, 7), (3, 1, 7, 7), (1, 1, 2, 1, 7, 7)], ids=str)
def test_a_mask_of_another_shape(kind: str, is_causal: bool, shape: tuple[int, ...]) -> None:
    message = r"attn_mask must broadcast to \(B, H, N, S\) = \(2, \d, 7, 7\), got \(" + ", ".join(map(str, shape))
    with pytest.raises(ValueError, match=message):
        build(kind)(inputs(), attn_mask=torch.ones(shape, dtype=torch.bool), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_mask_of_keys_alone(kind: str, is_causal: bool) -> None:
    module, x, seen = build(kind), inputs(), torch.arange(7) < 5
    full = seen.expand(2, 1, 7, 7)
    assert torch.equal(*(module(x, attn_mask=mask, is_causal=is_causal) for mask in (seen, full)))


@pytest.mark.parametrize("width", [3, 16])
def test_positions_of_another_width(kind: str, width: int) -> None:
    module, x = build(kind), inputs()
    tables = torch.ones(7, width), torch.ones(7, width)
    message = rf"^cos must broadcast to \(B, N, d\) = \(2, 7, {module.rotary_width}\), got \(7, {width}\)\.$"
    with pytest.raises(ValueError, match=message):
        module(x, tables)
    for other in (tables[0], tables[:1], (*tables, tables[0])):
        with pytest.raises(ValueError, match=r"^position_embeddings must be a pair, cos and sin, got "):
            module(x, other)


def test_help_has_every_argument() -> None:
    """The other layers' docstrings refer to it."""
    arguments = str(inspect.getdoc(DiffAttention)).partition("\nArgs:\n")[2].partition("\nRaises:\n")[0]
    *own, _ = inspect.signature(DiffAttention).parameters
    base = inspect.signature(Attention).parameters.values()
    options = [one.name for one in base if one.kind == inspect.Parameter.KEYWORD_ONLY]
    assert re.findall(r"^    (\w+):", arguments, re.MULTILINE) == own + options


def test_a_batch_of_nothing(kind: str) -> None:
    nothing = inputs()[:0]
    assert build(kind)(nothing, is_causal=True).shape == nothing.shape


@pytest.mark.all
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_every_length(kind: str) -> None:
    attention, x = build(kind).eval(), inputs()
    torch.compiler.reset()
    compiled = torch.compile(attention, backend="eager", fullgraph=True, dynamic=True)
    open_length = {"hidden_states": {1: torch.export.Dim.AUTO}, "is_causal": None}
    with torch.no_grad():
        exported = torch.export.export(attention, (x,), {"is_causal": True}, dynamic_shapes=open_length).module()
        for length in (x.shape[1], 5, 3):
            expected = attention(x[:, :length], is_causal=True)
            for program in (compiled, exported):
                torch.testing.assert_close(program(x[:, :length], is_causal=True), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_without_numbers_of_its_own_is_refused(kind: str, cached: bool) -> None:
    """Beside a cache, too, for whose tokens a part of it would be taken."""
    cache = DynamicCache() if cached else None
    with pytest.raises(TypeError, match=r"^attn_mask must be a dense tensor .* CausalBias"):
        build(kind)(inputs(), attn_mask=causal_upper_left(7, 7), cache=cache)
