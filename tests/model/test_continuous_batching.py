"""``generate_batch``, where requests share one paged cache, against ``generate``, one request at a time.

On the CPU transformers runs it with "sdpa" and "paged|eager". FlashAttention, CUDA graphs, asynchronous batches and
block tables need a GPU.
"""

import functools
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from tiny_model import NOT_LATENT, kinds, make

kind = kinds(NOT_LATENT)
# float64 as in the tests of generate: no two logits are so close that rounding decides. 9 is the end of a text in some.
PROMPTS = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8],
    [2, 7],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 11],  # begins as the first does
    [11],
    [16, 1, 8, 3, 3, 9, 8],
    [3, 1, 4, 1, 5, 9, 2, 6, 12, 2],
)
NEW_TOKENS = 6
# Earlier releases of transformers call pages blocks.
PAGE_SIZE = "page_size" if "page_size" in {field.name for field in fields(ContinuousBatchingConfig)} else "block_size"
# Pages of 4 tokens. The longest request takes 7 of them, all of them together some 20.
ROOMY = {"num_blocks": 32, "max_batch_tokens": 64}
TIGHT = {"num_blocks": 9, "max_batch_tokens": 8}


def settings(**changes: Any) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": 28, "pad_token_id": 0, **changes}
    )


@functools.lru_cache(maxsize=None, typed=True)  # two forms of a type are equal as strings
def shared_model(kind: str, make: Any) -> tuple[Any, list[list[int]]]:
    """A model of the default configuration, which no test may change, and what it answers to each prompt alone."""
    model = make(kind)
    return model, generated_alone(model)


def generated_alone(model: Any, prompts: Any = PROMPTS, **changes: Any) -> list[list[int]]:
    out = [model.generate(torch.tensor([prompt]), generation_config=settings(**changes))[0] for prompt in prompts]
    return [tokens[len(prompt) :].tolist() for tokens, prompt in zip(out, prompts, strict=True)]


def generated_in_batch(model: Any, prompts: Any = PROMPTS, page_size: int = 4, **sizes: Any) -> list[list[int]]:
    config = ContinuousBatchingConfig(**{PAGE_SIZE: page_size, **ROOMY, **sizes})
    results = model.generate_batch(list(prompts), settings(), continuous_batching_config=config, warmup=False)
    assert all(result.error is None for result in results.values())
    return [result.generated_tokens for result in results.values()]


@pytest.mark.parametrize("implementation", ["diff_attention", "eager"])
def test_the_tokens_are_those_of_generate(kind: str, implementation: str) -> None:
    """More requests than fit."""
    model, (_, expected) = make(kind, attn_implementation=implementation), shared_model(kind, make)
    assert len({tuple(tokens) for tokens in expected}) > 3
    assert generated_in_batch(model, **TIGHT) == expected
    assert model.config._attn_implementation == implementation
    assert generated_alone(model, PROMPTS[:1]) == expected[:1]


def test_requests_that_begin_alike_share_pages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []  # how many tokens of each request were found in the cache
    search = PagedAttentionCache.search_prefix_match

    def noted(self: PagedAttentionCache, *args: Any, **kwargs: Any) -> int:
        lengths.append(search(self, *args, **kwargs))
        return lengths[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", noted)
    model, expected = shared_model(kind, make)
    assert generated_in_batch(model, max_batch_tokens=20) == expected
    assert max(lengths) >= 8  # two pages or more of the first request serve a later one


def test_layers_with_a_window(kind: str) -> None:
    model = make(kind, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    expected = generated_alone(model)
    assert expected != shared_model(kind, make)[1]
    assert generated_in_batch(model) == expected


def test_a_cache_of_latents_is_not_paged() -> None:
    with pytest.raises(NotImplementedError, match=r"keys and values of one width, .* 'gdla' does not cache\.$"):
        generated_in_batch(make("gdla"))
