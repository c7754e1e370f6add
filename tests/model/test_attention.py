"""The one call of each layer through transformers' attention interface, and what each implementation runs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diff_transformer.nn import differential
from diff_transformer.ops import diff_attention
from tiny_model import PAIRED, needs_vectors

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# What each implementation has to have run in float64, for each layer: of DIFF and DIFF V2, and of the Transformer.
RUNS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "eager": ({"eager": 1}, {"eager": 1}),
    "sdpa": ({"torch": 1}, {"torch": 1}),
    "diff_attention": ({"blockwise": 1}, {"torch": 1}),
    "diff_attention_reference": ({"reference": 1}, {"torch": 1}),
    "diff_attention_blockwise": ({"blockwise": 1}, {"torch": 1}),
    "diff_attention_sdpa": ({"sdpa": 1}, {"torch": 1}),
}
# transformers' eager attention takes the softmax in float32, even of float64.
COMPUTES_IN = {"eager": torch.float32}


def expect_runs(ran: Counter[str], implementation: str, kind: str) -> None:
    expected = {name: 2 * count for name, count in RUNS[implementation][kind == "softmax"].items()}
    if "sdpa" in expected:  # two calls of torch's attention a layer at least; more where values are cut into pieces
        assert ran.pop("torch") >= 4
    assert ran == expected
    ran.clear()


def some_padding(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return mask


@pytest.mark.all
@needs_vectors
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, while it compiles
def test_flex_attention_as_our_backend(make: Any, tokens: Any, ran: Counter[str], check: Any) -> None:
    """With padding, whose mask is a tensor, and without, where causality is a block mask."""
    inputs = tokens()
    for mask in (None, some_padding(inputs)):
        logits = {}
        for name in ("reference", "flex"):
            model = make("diff", torch.float32, attn_implementation=f"diff_attention_{name}").eval()
            with torch.no_grad():
                logits[name] = model(inputs, attention_mask=mask, use_cache=False).logits
            assert ran == {name: 2}
            ran.clear()
        seen = torch.ones_like(inputs, dtype=torch.bool) if mask is None else mask.bool()
        check(logits["flex"][seen], logits["reference"][seen])


def test_switching_a_live_model(kind: str, make: Any, tokens: Any, ran: Counter[str], check: Any) -> None:
    model, inputs = make(kind), tokens()
    assert model.config._attn_implementation == "diff_attention"  # by default
    with torch.no_grad():
        first = model(inputs).logits
        expect_runs(ran, "diff_attention", kind)
        ran.clear()
        for implementation in (*RUNS, "diff_attention"):
            model.set_attn_implementation(implementation)
            check(model(inputs).logits, first, dtype=COMPUTES_IN.get(implementation))
            expect_runs(ran, implementation, kind)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """The calls of an attention function registered under a name of its own, "spy"."""
    seen: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append({"module": module, "query": query, "key": key, "value": value, "kwargs": kwargs})
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    yield seen
    del AttentionInterface._global_mapping["spy"]
    del AttentionMaskInterface._global_mapping["spy"]


# Heads and width of the one call's queries, heads and width of its keys and values: A = 8, 4 key/value heads, d = 4.
CALL = {"diff": (8, 8, 2, 8), "diff_grouped": (8, 8, 2, 8), "diff_v2": (16, 4, 4, 4), "softmax": (8, 4, 4, 4)}


def test_one_call_for_each_layer(kind: str, make: Any, tokens: Any, calls: list[dict[str, Any]], check: Any) -> None:
    """What Llama's layer would ask for: any kernel, cache or server that answers that call runs ours."""
    model, inputs = make(kind), tokens()
    expected = model(inputs).logits
    model.set_attn_implementation("spy")
    check(model(inputs).logits, expected)
    assert [call["module"].layer_idx for call in calls] == [0, 1]
    query_heads, query_width, kv_heads, kv_width = CALL[kind]
    for call in calls:
        assert call["query"].shape == (2, query_heads, 9, query_width)
        assert call["key"].shape == call["value"].shape == (2, kv_heads, 9, kv_width)
        assert call["kwargs"]["scaling"] == 4**-0.5
        assert call["kwargs"]["dropout"] == 0.0
        assert call["module"].is_causal is True
        assert call["module"].num_key_value_groups == query_heads // kv_heads
        assert "lam" not in call["kwargs"]
        if kind in PAIRED:
            noise = torch.arange(8) % (call["module"].ratio + 1) == call["module"].ratio
            assert not call["query"][:, ~noise, :, 4:].any()
            assert not call["query"][:, noise, :, :4].any()
            assert call["query"][:, ~noise, :, :4].all()
            assert call["query"][:, noise, :, 4:].all()


def test_our_own_operator_gets_views_of_what_the_projection_made(
    make: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No zeros, no copies: queries and keys in the memory of the rotated ones, the values in their projection's."""
    seen: list[tuple[Tensor, ...]] = []
    projected: dict[str, Tensor] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **kwargs: Any) -> Tensor:
        seen.append((q, k, v))
        return diff_attention(q, k, v, lam, **kwargs)

    model = make("diff")
    attention = model.model.layers[0].self_attn
    project = attention.project

    def keep(*args: Any) -> tuple[Tensor, ...]:
        projected["q"], projected["k"], projected["v"] = project(*args)
        return projected["q"], projected["k"], projected["v"]

    monkeypatch.setattr(attention, "project", keep)
    monkeypatch.setattr(differential, "diff_attention", spy)
    model(tokens(), use_cache=False)
    q, k, v = seen[0]
    assert (q.shape, k.shape, v.shape) == ((2, 4, 2, 9, 4), (2, 2, 2, 9, 4), (2, 2, 9, 8))
    for name, view in zip("qkv", (q, k, v), strict=True):
        assert view.untyped_storage().data_ptr() == projected[name].untyped_storage().data_ptr(), name
        assert view.numel() == projected[name].numel(), name
