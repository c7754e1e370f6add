"""Modules alone with each kind of cache that transformers has: the same output as without one."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from diff_transformer.nn import DiffAttention, DiffAttentionV2, RotaryEmbedding, SoftmaxAttention

CONFIG = LlamaConfig(hidden_size=16, num_attention_heads=4, num_hidden_layers=2)
CACHES: dict[str, Callable[[], DynamicCache | StaticCache]] = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(config=CONFIG, max_cache_len=10),
    "static, full": lambda: StaticCache(config=CONFIG, max_cache_len=6),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", [DiffAttention, DiffAttentionV2, SoftmaxAttention])
@pytest.mark.parametrize("chunks", [[6], [4, 2], [1, 1, 3, 1]], ids=str)
def test_chunks_through_a_cache(
    kind: type[DiffAttention] | type[DiffAttentionV2] | type[SoftmaxAttention], cache: str, chunks: list[int]
) -> None:
    torch.manual_seed(0)
    module = kind(16, 4, layer=2).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    rotary, x, cached = RotaryEmbedding(4), torch.randn(2, 6, 16, dtype=torch.float64), CACHES[cache]()
    with torch.no_grad():
        expected = module(x, position_embeddings=rotary.positions(x), is_causal=True)
        parts, past = [], 0
        for chunk in x.split(chunks, dim=1):
            positions = rotary.positions(chunk, past)
            parts.append(module(chunk, position_embeddings=positions, is_causal=True, cache=cached))
            past += chunk.shape[1]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=1e-10, rtol=1e-10)
