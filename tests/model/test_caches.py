"""Caches of transformers against no cache: sliding windows, offloaded caches, operations on a cache."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Request
from tiny_model import CACHES, COMPUTES_IN, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WINDOW = 4


def windowed(length: int) -> tuple[Tensor, Tensor]:
    """Which key each query sees, (1, 1, N, N): all before it, and the last four."""
    i = torch.arange(length)
    causal = i[None, :] <= i[:, None]
    return causal[None, None], (causal & (i[None, :] > i[:, None] - WINDOW))[None, None]


@pytest.mark.parametrize("types", [None, ("full_attention", "sliding_attention")], ids=["every layer", "one layer"])
@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_reference", "sdpa", "eager"])
def test_sliding_window(kind: str, implementation: str, types: Any) -> None:
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
        for name in CACHES:
            for chunks in ((1,) * 13, (9, 1, 1, 2), (2, 5, 6)):
                cache = CACHES[name](config=model.config)
                assert cache.is_sliding == ([True, True] if types is None else [False, True])
                parts = [model(part, past_key_values=cache).logits for part in inputs.split(chunks, dim=1)]
                check(torch.cat(parts, 1), expected, dtype=precision)
        assert cache.layers[1].keys.shape[2] == WINDOW


@pytest.mark.parametrize("cache_name", CACHES)
def test_sliding_window_of_a_padded_batch(kind: str, cache_name: str) -> None:
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


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_from_a_gpu(kind: str, cache: str) -> None:
    model, inputs = make(kind, torch.float32).cuda(), tokens().cuda()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(inputs)}
    settings["disable_compile"] = True
    expected = model.generate(inputs, **settings)
    assert torch.equal(model.generate(inputs, **settings, cache_implementation=cache), expected)


@pytest.mark.parametrize("cache_name", CACHES)
def test_operations_on_a_cache(kind: str, cache_name: str) -> None:
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


def test_a_window_is_no_mask_where_a_sequence_begins(kind: str, requests: list[Request]) -> None:
    """The operator hides what the window leaves behind; torch's attention, which cannot, gets a mask of N × N."""
    model, inputs = make(kind, sliding_window=WINDOW), tokens(length=13)
    with torch.no_grad():
        filled = model(inputs, use_cache=True)
        beginning, requests[:] = list(requests), []
        continued = model(inputs[:, :2], past_key_values=filled.past_key_values)
        expected = make(kind, sliding_window=WINDOW, attn_implementation="sdpa")(torch.cat((inputs, inputs[:, :2]), 1))
    check(torch.cat((filled.logits, continued.logits), 1), expected.logits)
    if kind == "softmax":
        assert requests == beginning == []
        return
    assert [(asked.attn_mask, asked.window, asked.is_causal) for asked in beginning] == [(None, WINDOW, True)] * 2
    assert [(asked.attn_mask.shape[-2:], asked.window) for asked in requests] == [((2, WINDOW + 1), None)] * 2
