"""A cache that grows in place: a DynamicCache's tokens and logits, bit by bit, without copying a token twice."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.cache import CACHE_NAME, DiffCache
from diff_transformer.ops import operator
from diff_transformer.ops.cpu.cpu_backend import decode_fast_path
from tiny_model import DIFFERENTIAL, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


def both(model: DiffTransformerForCausalLM, inputs: Tensor, **options: Any) -> tuple[Any, Any]:
    """What generate gives with its own cache, and with a DynamicCache of the caller's."""
    settings = {"attention_mask": torch.ones_like(inputs), **SETTINGS, **options}
    given = DynamicCache(config=model.config)
    own, expected = model.generate(inputs, **settings), model.generate(inputs, **{CACHE_NAME: given}, **settings)
    assert type(own.past_key_values) is DiffCache
    assert expected.past_key_values is given
    return own, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 5])
def test_generate_has_the_bits_of_a_dynamic_cache(
    kind: str, dtype: torch.dtype, implementation: str, window: int | None
) -> None:
    model = make(kind, dtype, attn_implementation=implementation, sliding_window=window)
    own, expected = both(model, tokens())
    assert torch.equal(own.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(own.logits, expected.logits, strict=True))
    for ours, theirs in zip(own.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)


OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "beams, samples": {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
    "chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_other_ways_to_generate(kind: str, options: dict[str, Any]) -> None:
    model, inputs, sequences = make(kind, torch.float32), tokens(), []
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    for cache in ({}, {CACHE_NAME: DynamicCache(config=model.config)}):
        torch.manual_seed(3)
        sequences.append(model.generate(inputs, attention_mask=mask, **{**SETTINGS, **options}, **cache).sequences)
    assert torch.equal(*sequences)


def test_a_text_is_gone_on_with() -> None:
    """Two texts from one beginning: by a deep copy, as transformers' documentation has it, or by cropping."""
    model, inputs = make("diff", torch.float32), tokens(1)
    own, expected = both(model, inputs, max_new_tokens=4)
    cache = own.past_key_values
    longer = [
        model.generate(own.sequences, **SETTINGS, attention_mask=torch.ones_like(own.sequences), **{CACHE_NAME: past})
        for past in (copy.deepcopy(cache), expected.past_key_values, cache)
    ]
    for others in longer[1:]:
        assert torch.equal(longer[0].sequences, others.sequences)
        assert all(torch.equal(a, b) for a, b in zip(longer[0].logits, others.logits, strict=True))


@pytest.mark.parametrize("implementation", ["offloaded", "static"])
def test_another_implementation_stays(implementation: str) -> None:
    model, inputs = make(), tokens()
    if implementation == "offloaded" and not torch.accelerator.is_available():
        pytest.skip("an offloaded cache needs an accelerator")
    settings = {**SETTINGS, "attention_mask": torch.ones_like(inputs), "disable_compile": True}
    made = model.generate(inputs, cache_implementation=implementation, **settings).past_key_values
    assert not isinstance(made, DiffCache)


def update(cache: Any, count: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """The cache's keys and values after so many random tokens more."""
    return cache.update(torch.randn(batch, 3, count, 8), torch.randn(batch, 3, count, 8), 0)


def memory_of(cache: DiffCache) -> tuple[int, int]:
    """Where the keys' memory is, and for how many tokens."""
    keys = cache.layers[0].keys
    storage = keys.untyped_storage()
    return storage.data_ptr(), storage.nbytes() // (keys.itemsize * keys.shape[0] * keys.shape[1] * keys.shape[3])


@torch.no_grad()
def test_memory_doubles_and_is_exact_where_the_length_is_known() -> None:
    cache, sizes = DiffCache(), []
    for count in (7, *[1] * 100):
        keys, _ = update(cache, count)
        pointer, size = memory_of(cache)
        assert keys.data_ptr() == pointer
        assert size <= 2 * keys.shape[2]
        sizes.append(size)
    assert list(dict.fromkeys(sizes)) == [7, 16, 34, 70, 142]
    cache, sizes = DiffCache(expected_length=20), []
    for count in (7, *[1] * 15):
        update(cache, count)
        sizes.append(memory_of(cache)[1])
    assert list(dict.fromkeys(sizes)) == [7, 16, 20, 42]


@torch.no_grad()
def test_a_window_slides_through_memory_twice_as_wide() -> None:
    cache = DiffCache(make(sliding_window=6).config)
    seen, moves = [], set()
    for count in (3, *[1] * 40):
        keys, _ = update(cache, count)
        seen.append(keys[:, :, -count:].clone())
        assert torch.equal(keys, torch.cat(seen, 2)[:, :, -keys.shape[2] :])
        pointer, size = memory_of(cache)
        moves.add(pointer)
        assert size <= 2 * 6
        assert cache.layers[0].keys.shape[2] == min(5, cache.get_seq_length())
    assert len(moves) < 10


@torch.no_grad()
def test_what_changes_rows_or_length_writes_to_no_other_memory() -> None:
    cache, other = DiffCache(), DynamicCache()
    for operation in (
        lambda cache: cache.crop(-3),
        lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.reorder_cache(torch.tensor([3, 0, 2, 2])),
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    ):
        for _ in range(3):
            batch = other.layers[0].keys.shape[0] if other.layers else 2
            torch.manual_seed(other.get_seq_length())
            update(cache, 4, batch)
            torch.manual_seed(other.get_seq_length())
            update(other, 4, batch)
        for each in (cache, other):
            operation(each)
        assert torch.equal(cache.layers[0].keys, other.layers[0].keys)
        assert torch.equal(cache.layers[0].values, other.layers[0].values)


def test_beams_keep_their_memory() -> None:
    cache = DiffCache(expected_length=20)
    with torch.no_grad():
        update(cache, 10)
        update(cache, 1)
        before = memory_of(cache)
        for _ in range(9):
            cache.reorder_cache(torch.tensor([1, 0]))
            update(cache, 1)
    assert memory_of(cache) == before


class Tagged(Tensor):
    """A subclass, which may hold something else than it shows."""


def test_tokens_of_another_kind_are_appended_as_to_a_dynamic_cache() -> None:
    seen = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    for new in (torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4, dtype=torch.bfloat16).as_subclass(Tagged)):
        caches = DiffCache(), DynamicCache()
        for tokens_of in (seen, new):
            with torch.no_grad():
                own, expected = (cache.update(tokens_of, tokens_of, 0)[0] for cache in caches)
        assert (type(own), own.dtype) == (type(expected), expected.dtype)
        assert torch.equal(own, expected)


def test_inference_mode_and_gradients_take_turns() -> None:
    cache = DiffCache()
    with torch.inference_mode():
        update(cache, 3)
        update(cache, 1)
    with torch.no_grad():
        update(cache, 1)
        update(cache, 1)
        before = memory_of(cache)
        update(cache, 1)
        assert memory_of(cache) == before
    keys, _ = update(cache, 1)  # may be saved for a gradient
    assert memory_of(cache) != before
    with torch.inference_mode():
        assert update(cache, 1)[0].shape[2] == keys.shape[2] + 1
    assert torch.equal(cache.layers[0].keys[:, :, :-1], keys)


def test_gradients_pass_through_it(kind: str) -> None:
    model, inputs = make(kind), tokens()
    gradients = []
    for cache in (None, DiffCache(model.config)):
        outputs = [model(part, past_key_values=cache).logits for part in inputs.split(9 if cache is None else 3, 1)]
        loss = torch.cat(outputs, 1).square().mean()
        gradients.append(torch.cat([each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]))
    check(gradients[1], gradients[0])


@pytest.mark.all
@torch.no_grad()
@pytest.mark.usefixtures("cold")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_compiled() -> None:
    """The graph concatenates: it takes a cache that has grown in place, and what it leaves grows on."""
    model, inputs = make("diff", num_hidden_layers=1), tokens(length=12)
    compiled, cache = torch.compile(model, fullgraph=True, backend="aot_eager"), DiffCache(model.config)
    calls = [model, model, compiled, compiled, model, model]
    parts = [call(part, past_key_values=cache).logits for call, part in zip(calls, inputs.split(2, 1), strict=True)]
    check(torch.cat(parts, 1), model(inputs, use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", DIFFERENTIAL)
def test_the_kernel_reads_the_views(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding is answered by the kernel's fast path, whose keys and values are the memory itself."""
    given = []

    def recorded(*arguments: Any) -> Tensor | None:
        answer = decode_fast_path(*arguments)
        given.append((arguments[2], arguments[3], answer is not None))
        return answer

    model, cache = make(form, dtype), DiffCache()
    with torch.no_grad():
        for part in tokens(1, 20).split((17, 1, 1, 1), 1):
            given.clear()
            monkeypatch.setattr(operator, "decode_fast_path", recorded)
            model(part, past_key_values=cache)
    assert len(given) == 2
    for layer, (keys, values, answered) in zip(cache.layers, given, strict=True):
        assert answered or (form == "gdla" and dtype == torch.bfloat16)  # whose eight rows are a block's product
        assert keys.data_ptr() == layer.keys.data_ptr()
        assert values.data_ptr() == (layer.keys if form == "gdla" else layer.values).data_ptr()
        assert not values.is_contiguous()
        assert values.stride(1) == 36 * (12 if form == "gdla" else values.shape[-1])
