"""Every cache of transformers against no cache: sliding windows, offloaded and quantised caches, one compiled step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diff_transformer import DiffTransformerConfig, diff_attention
from diff_transformer.nn import differential
from tiny_model import PAIRED

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WINDOW = 4
# transformers' eager attention takes the softmax in float32, even of float64.
COMPUTES_IN = {"eager": torch.float32}
CACHES: dict[str, Callable[..., Cache]] = {
    "dynamic": DynamicCache,
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
}


def windowed(length: int) -> tuple[Tensor, Tensor]:
    """Which key each query sees, (1, 1, N, N): all before it, and the last four."""
    i = torch.arange(length)
    causal = i[None, :] <= i[:, None]
    return causal[None, None], (causal & (i[None, :] > i[:, None] - WINDOW))[None, None]


@pytest.mark.parametrize("types", [None, ("full_attention", "sliding_attention")], ids=["every layer", "one layer"])
@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_reference", "sdpa", "eager"])
def test_sliding_window(kind: str, implementation: str, types: Any, make: Any, tokens: Any, check: Any) -> None:
    """What a mask of the window gives, without a cache, and in chunks through caches that forget."""
    options = {"attn_implementation": implementation} | ({} if types is None else {"layer_types": list(types)})
    model, inputs = make(kind, sliding_window=WINDOW, **options), tokens(length=13)
    full, window = windowed(13)
    masks = {"full_attention": full, "sliding_attention": window}
    precision = COMPUTES_IN.get(implementation)
    with torch.no_grad():
        expected = model(inputs, use_cache=False).logits
        check(expected, model(inputs, attention_mask=masks, use_cache=False).logits, dtype=precision)
        blind = make(kind, **options | {"layer_types": ["full_attention"] * 2})(inputs).logits
        assert (expected - blind).abs().max() > 0.1
        for name in ("dynamic", "static"):
            for chunks in ((1,) * 13, (9, 1, 1, 2), (2, 5, 6)):
                cache = CACHES[name](config=model.config)
                assert cache.is_sliding == ([True, True] if types is None else [False, True])
                parts = [model(part, past_key_values=cache).logits for part in inputs.split(chunks, dim=1)]
                check(torch.cat(parts, 1), expected, dtype=precision)
        assert cache.layers[1].keys.shape[2] == WINDOW


@pytest.mark.parametrize("cache_name", ["dynamic", "static"])
def test_sliding_window_of_a_padded_batch(kind: str, cache_name: str, make: Any, tokens: Any, check: Any) -> None:
    """Rows padded on the left, decoded token by token past the window, equal the rows alone."""
    model, rows = make(kind, sliding_window=WINDOW), [tokens(1, n) for n in (11, 7)]
    batch = torch.cat([torch.nn.functional.pad(row, (11 - row.shape[1], 0)) for row in rows])
    mask, start, parts = (batch != 0).long(), 0, []
    with torch.no_grad():
        cache = CACHES[cache_name](config=model.config)
        for size in (6, 1, 3, 1):
            stop = start + size
            part = model(batch[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            parts.append(part.logits)
            start = stop
        for logits, row in zip(torch.cat(parts, 1), rows, strict=True):
            # Positions are counted over the padding as well: only distances matter, up to the tables' float32.
            check(logits[-row.shape[1] :], model(row, use_cache=False).logits[0], dtype=torch.float32)


def test_sliding_window_generates(kind: str, make: Any, tokens: Any, tmp_path: Path) -> None:
    model, inputs = make(kind, sliding_window=WINDOW), tokens()
    expected = inputs
    with torch.no_grad():
        for _ in range(6):
            last = model(expected, use_cache=False).logits[:, -1]
            expected = torch.cat((expected, last.argmax(-1, keepdim=True)), 1)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(inputs)}
    for cache in ("dynamic", "static"):
        text = model.generate(inputs, **settings, cache_implementation=cache, disable_compile=True)
        assert torch.equal(text, expected), cache
    model.config.save_pretrained(tmp_path)
    assert DiffTransformerConfig.from_pretrained(tmp_path).sliding_window == WINDOW


def test_the_window_reaches_kernels_that_take_no_mask(kind: str, make: Any, tokens: Any) -> None:
    model = make(kind, sliding_window=WINDOW, layer_types=["full_attention", "sliding_attention"])
    windows: list[int | None] = []

    def spy(*args: Any, sliding_window: int | None, **kwargs: Any) -> Any:
        windows.append(sliding_window)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    model.set_attn_implementation("spy")
    model(tokens())
    del AttentionInterface._global_mapping["spy"], AttentionMaskInterface._global_mapping["spy"]
    assert windows == [None, WINDOW]
    assert [layer.self_attn.sliding_window for layer in make(kind).model.layers] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_from_a_gpu(kind: str, cache: str, make: Any, tokens: Any) -> None:
    model, inputs = make(kind, torch.float32).cuda(), tokens().cuda()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(inputs)}
    settings["disable_compile"] = True
    expected = model.generate(inputs, **settings)
    assert torch.equal(model.generate(inputs, **settings, cache_implementation=cache), expected)


@pytest.mark.parametrize("cache_name", ["dynamic", "static"])
def test_operations_on_a_cache(kind: str, cache_name: str, make: Any, tokens: Any, check: Any) -> None:
    """Reordered as beams are, and filled anew; a dynamic one is also cut back, repeated and chosen from."""
    model, inputs = make(kind), tokens()
    order = torch.tensor([1, 0])
    with torch.no_grad():
        expected = model(inputs, use_cache=False).logits
        cache = CACHES[cache_name](config=model.config)
        model(inputs[:, :7], past_key_values=cache)
        cache.reorder_cache(order)
        check(model(inputs[order, 7:], past_key_values=cache).logits, expected[order, 7:])
        if cache_name == "static":
            cache.reset()
            check(model(inputs, past_key_values=cache).logits, expected)
            return
        cache.crop(-2)
        check(model(inputs[order, 7:], past_key_values=cache).logits, expected[order, 7:])
        cache.crop(-2)
        cache.batch_select_indices(torch.tensor([0]))
        cache.batch_repeat_interleave(3)
        check(model(inputs[[1, 1, 1], 7:], past_key_values=cache).logits, expected[[1, 1, 1], 7:])


def test_static_cache_takes_its_shape_early(kind: str, make: Any) -> None:
    """transformers makes one before any key is seen, from the heads that the configuration shows to caches."""
    model = make(kind)
    text = model.config.get_text_config()
    cache = StaticCache(config=model.config, max_cache_len=9)
    cache.early_initialization(2, text.num_key_value_heads, text.head_dim, torch.float64, torch.device("cpu"))
    heads, width = (2, 8) if kind in PAIRED else (4, 4)
    assert cache.layers[0].keys.shape == (2, heads, 9, width)
    model(torch.ones(2, 3, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 3


def test_a_window_is_no_mask_where_a_sequence_begins(
    kind: str, make: Any, tokens: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator hides what the window leaves behind; torch's attention, which cannot, gets a mask of N × N."""
    calls: list[tuple[Any, Any, bool]] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((kwargs["attn_mask"], kwargs["window"], kwargs["is_causal"]))
        return diff_attention(*args, **kwargs)

    monkeypatch.setattr(differential, "diff_attention", spy)
    model, inputs = make(kind, sliding_window=WINDOW), tokens(length=13)
    with torch.no_grad():
        filled = model(inputs, use_cache=True)
        beginning, calls[:] = list(calls), []
        continued = model(inputs[:, :2], past_key_values=filled.past_key_values)
        expected = make(kind, sliding_window=WINDOW, attn_implementation="sdpa")(torch.cat((inputs, inputs[:, :2]), 1))
    check(torch.cat((filled.logits, continued.logits), 1), expected.logits)
    if kind == "softmax":
        assert calls == beginning == []
        return
    assert beginning == [(None, WINDOW, True)] * 2
    assert [(mask.shape[-2:], window) for mask, window, _ in calls] == [((2, WINDOW + 1), None)] * 2


def test_a_window_in_both_directions(kind: str, make: Any, tokens: Any, check: Any) -> None:
    """With ``is_causal=False`` a token sees those up to a window away, before and after it, as transformers has it."""
    inputs, i = tokens(length=13), torch.arange(13)
    near = ((i[None, :] - i[:, None]).abs() <= WINDOW)[None, None]
    for implementation in ("diff_attention", "sdpa"):
        model = make(kind, sliding_window=WINDOW, attn_implementation=implementation)
        with torch.no_grad():
            logits = model(inputs, is_causal=False, use_cache=False).logits
            check(logits, model(inputs, attention_mask=near, use_cache=False).logits)


def test_whether_it_is_causal_may_be_left_open(kind: str, make: Any, tokens: Any) -> None:
    """``is_causal=None`` is what a caller passes on that has no opinion."""
    inputs, model = tokens(length=7), make(kind)
    with torch.no_grad():
        assert torch.equal(model(inputs, is_causal=None).logits, model(inputs).logits)
