"""Padded batches through caches against no cache; generate on top.

In float64, so that two logits are never so close that rounding decides which token comes next.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from diff_transformer import DiffTransformerForCausalLM, DiffTransformerForSequenceClassification
from diff_transformer.model.cache import CACHE_NAME
from tiny_model import CACHES, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("cache_name", CACHES)
@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa"])
def test_chunks_of_a_padded_batch(kind: str, implementation: str, cache_name: str) -> None:
    model, inputs = make(kind, attn_implementation=implementation), tokens()
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(inputs, attention_mask=mask, use_cache=False).logits
        cache, start, parts = CACHES[cache_name](config=model.config), 0, []
        for size in (2, 4, 1, 2):
            stop = start + size
            part = model(inputs[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
            parts.append(part.logits)
            start = stop
    check(torch.cat(parts, 1) * mask[..., None], expected * mask[..., None])


def generate(model: DiffTransformerForCausalLM, inputs: Tensor, **options: Any) -> Tensor:
    options.setdefault("attention_mask", torch.ones_like(inputs))
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(inputs, **settings)


def greedily(model: DiffTransformerForCausalLM, inputs: Tensor, steps: int = 10) -> Tensor:
    """The most probable token, appended again and again; no cache, no generate."""
    with torch.no_grad():
        for _ in range(steps):
            logits = model(inputs, use_cache=False).logits[:, -1]
            top = logits.topk(2).values
            assert (top[:, 0] - top[:, 1]).min() > 1e-4, "too close to call: choose other weights"
            inputs = torch.cat((inputs, logits.argmax(-1, keepdim=True)), 1)
    return inputs


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa", "eager"])
def test_greedy(kind: str, implementation: str) -> None:
    model, inputs = make(kind, attn_implementation=implementation), tokens()
    expected = greedily(model, inputs)
    assert len(expected[:, 9:].unique()) > 5  # no text of one token
    for options in ({}, {"use_cache": False}, STATIC, {"prefill_chunk_size": 4}, {**STATIC, "prefill_chunk_size": 3}):
        assert torch.equal(generate(model, inputs, **options), expected), options


@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_beams(kind: str, options: dict[str, Any]) -> None:
    """The cache is reordered between beams: with one it finds what it finds without."""
    model, inputs = make(kind), tokens()
    expected = generate(model, inputs, num_beams=4, use_cache=False)
    assert torch.equal(generate(model, inputs, num_beams=4, **options), expected)
    assert not torch.equal(expected, greedily(model, inputs))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_by_each_of_its_names(name: str) -> None:
    """transformers says ``cache`` as of 5.24, and passes it to models and layers by that name."""
    model, inputs = make("diff"), tokens()
    cache, hidden = DynamicCache(config=model.config), torch.zeros(1, 3, model.config.hidden_size, dtype=model.dtype)
    model(inputs[:, :6], **{name: cache})
    torch.testing.assert_close(model(inputs[:, 6:], **{name: cache}).logits, model(inputs).logits[:, 6:])
    cache, embeddings = DynamicCache(config=model.config), model.model.rotary_emb(hidden, torch.arange(3)[None])
    model.model.layers[0](hidden, position_embeddings=embeddings, **{name: cache})
    assert cache.get_seq_length() == 3
    classifier, none = DiffTransformerForSequenceClassification(model.config), {"cache": None, "past_key_values": None}
    cache = DynamicCache(config=model.config)
    classifier(inputs[:1], **(none | {name: cache}))
    assert cache.get_seq_length() == 9


def test_two_caches_are_refused() -> None:
    config = make("diff").config
    caches: dict[str, Any] = {name: DynamicCache(config=config) for name in ("cache", "past_key_values")}
    for model in (make("diff"), DiffTransformerForSequenceClassification(config)):
        with pytest.raises(ValueError, match="cache and past_key_values name one cache, got both"):
            model(tokens(), **caches)


@pytest.mark.parametrize("options", [{}, STATIC, {"num_beams": 3}], ids=["dynamic", "static", "beams"])
def test_left_padded_generation_equals_single(kind: str, options: dict[str, Any]) -> None:
    model, rows = make(kind), [tokens(1, n) for n in (9, 5, 2)]
    batch = torch.cat([torch.cat((torch.zeros(1, 9 - row.shape[1], dtype=torch.long), row), 1) for row in rows])
    batched = generate(model, batch, attention_mask=(batch != 0).long(), **options)
    for text, row in zip(batched, rows, strict=True):
        assert torch.equal(text[9:], generate(model, row, **options)[0, row.shape[1] :])


def test_going_on_from_a_cache(kind: str) -> None:
    """A second call of generate, with the cache of the first."""
    model, inputs = make(kind), tokens()
    expected, cache = greedily(model, inputs), DynamicCache(config=model.config)
    first = generate(model, inputs, max_new_tokens=4, **{CACHE_NAME: cache})
    assert torch.equal(generate(model, first, max_new_tokens=6, **{CACHE_NAME: cache}), expected)


@pytest.mark.parametrize("options", [{}, STATIC, {"num_beams": 3}], ids=["dynamic", "static", "beams"])
def test_prompt_given_as_embeddings(kind: str, options: dict[str, Any]) -> None:
    model, inputs = make(kind), tokens()
    embeds = model.get_input_embeddings()(inputs)
    settings = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    new = model.generate(inputs_embeds=embeds, **settings, **options)
    assert torch.equal(new, generate(model, inputs, **options)[:, 9:])


@pytest.mark.parametrize("helper", ["itself", "another", "the prompt", "its first layer"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}], ids=["full", "sliding"])
def test_speculative_decoding(kind: str, helper: str, options: dict[str, Any]) -> None:
    """Whoever drafts, the text is the greedy one: rejected drafts are cut off the cache again."""
    model, inputs = make(kind, **options), tokens(batch=1)
    expected = greedily(model, inputs)
    # With an end token that never comes: transformers 5.4 looks for one in the prompt's drafts whatever it is told.
    draft: dict[str, Any] = {"prompt_lookup_num_tokens": 3, "eos_token_id": 29}
    if helper in ("itself", "another"):
        assistant = model if helper == "itself" else make("softmax", num_hidden_layers=1)
        assistant.generation_config.num_assistant_tokens = 3
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        draft = {"assistant_model": assistant}
    elif helper == "its first layer":
        draft = {"assistant_early_exit": 1}
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    assert torch.equal(generate(model, inputs, **draft), expected)
    assert max(calls[1:]) > 1, "no draft was ever checked"
