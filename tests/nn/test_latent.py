"""Latent differential attention: what a cache holds, both forms of a call, and the sizes that are refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from diff_transformer import DiffTransformerConfig
from diff_transformer.model.parallel_plan import check_ranks
from diff_transformer.nn import LatentDiffAttention, differential
from sharp_layers import build, by_oracle, check, inputs, tables
from tiny_model import SIZES, sizes_for


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, ...]]:
    """Queries, keys and values that the operator is given."""
    seen, attend = [], differential.diff_attention

    def noted(*tensors: Tensor, **settings: Any) -> Tensor:
        seen.append(tensors[:3])
        return attend(*tensors, **settings)

    monkeypatch.setattr(differential, "diff_attention", noted)
    return seen


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_decoding_absorbs_what_makes_keys_and_values(kv_heads: int, calls: list[tuple[Tensor, ...]]) -> None:
    """Its output, and its gradient of every weight, are those of keys and values made for the whole sequence."""
    module, x = build("gdla", num_key_value_heads=kv_heads, num_noise_heads=4), inputs(1, 12)
    cache = DynamicCache()
    module(x[:, :11], tables(range(11)), is_causal=True, cache=cache)
    token = module(x[:, 11:], tables(range(11, 12)), is_causal=True, cache=cache)
    q, k, v = calls[-1]
    assert (q.shape, k.shape, v.shape) == ((1, 4, 2, 1, 12), (1, 1, 1, 12, 12), (1, 1, 12, 8))
    assert v.data_ptr() == k.data_ptr() == cache.layers[2].keys.data_ptr()
    whole = module(x, tables(range(12)), is_causal=True)[:, 11:]
    assert [each.shape[1] for each in calls[-1]] == [4, kv_heads // 2, kv_heads // 2]
    check(whole, by_oracle(module, x, positions=range(12), is_causal=True)[:, 11:])
    direction = torch.randn_like(whole)
    for one, other in zip(
        (token, *torch.autograd.grad(token, [*module.parameters()], direction)),
        (whole, *torch.autograd.grad(whole, [*module.parameters()], direction)),
        strict=True,
    ):
        assert other.abs().max() > 1e-3
        assert (one - other).abs().max() < 1e-12 * max(1.0, other.abs().max().item())


def test_which_form_a_call_takes() -> None:
    """The cheaper one, by what a key costs each query; nothing is absorbed of what is no plain matrix."""
    module = build("gdla", num_noise_heads=2)
    most = 2 * 8 * (2 + 4) // (8 * (8 - 2 + 8 - 4))
    assert [module.absorbs(n, s) for n, s in ((1, 1), (most, 9), (most + 1, 9))] == [False, True, False]
    assert not build("gdla", num_noise_heads=2, kv_lora_rank=4).absorbs(1, 9)  # as wide as a value
    hook = module.v_proj.register_forward_hook(lambda *_: None)
    assert not module.absorbs(1, 9)
    hook.remove()
    assert module.absorbs(1, 9)
    module.v_proj = nn.Sequential(module.v_proj)
    assert not module.absorbs(1, 9)


def test_sizes_unless_given() -> None:
    config = DiffTransformerConfig(attention_type="gdla", hidden_size=1024, num_attention_heads=16)
    assert (config.q_lora_rank, config.kv_lora_rank, config.v_head_dim, config.num_noise_heads) == (768, 256, 64, 8)
    assert (config.qk_nope_head_dim, config.qk_rope_head_dim, config.head_dim, config.qk_head_dim) == (32, 32, 64, 64)
    with torch.device("meta"):
        parameters = LatentDiffAttention(1024, 16, 1).parameters()
    weights = sum(weight.numel() for weight in parameters if weight.dim() == 2)
    assert config.spec.attention_weights(config) == config.num_hidden_layers * weights
    view = config.get_text_config()
    assert (view.num_attention_heads, view.num_key_value_heads, view.head_dim) == (16, 1, 288)
    wide = LatentDiffAttention(30, 4, 1, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
    assert (wide.head_dim, wide.cache_width, wide.q_a_proj.out_features) == (192, 576, 30)
    assert DiffTransformerConfig(attention_type="diff", q_lora_rank=7).qk_head_dim is None  # which leaves it aside
    odd = DiffTransformerConfig(attention_type="gdla", qk_nope_head_dim=5, qk_rope_head_dim=2, kv_lora_rank=3)
    assert (odd.head_dim, odd.v_head_dim) == (7, 7)  # what is turned has an even width


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_lora_rank": 0}, r"kv_lora_rank must be 1 or more, got 0\.$"),
        ({"qk_nope_head_dim": 1, "qk_rope_head_dim": 3}, r"qk_rope_head_dim must be even .*, got 3\.$"),
        ({"qk_nope_head_dim": 4}, r"qk_rope_head_dim must be 1 or more, got 0\.$"),
        ({"qk_nope_head_dim": 4, "qk_rope_head_dim": 4}, r"head_dim must be qk_nope_head_dim \+ .*, got 4, 4 and 4\.$"),
        (
            {"head_dim": None, "hidden_size": 30},
            r"hidden_size must be a multiple of num_attention_heads, .*, got 30 and 8\.$",
        ),
        ({"num_noise_heads": 3}, r"num_attention_heads must be \(r \+ 1\) · num_noise_heads, .*, got 8 and 3\.$"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatentDiffAttention(**{"hidden_size": 24, "num_attention_heads": 8, "layer": 1, "head_dim": 4, **sizes})
    with pytest.raises(ValueError, match=message):
        DiffTransformerConfig(attention_type="gdla", **{**SIZES, "num_key_value_heads": 2, **sizes})


@pytest.mark.parametrize("option", ["qk_norm", "qk_clip", "exclusive_attention", "headwise_norm"])
def test_options_that_a_latent_cannot_have(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be .*left out for attention_type 'gdla', got True"):
        DiffTransformerConfig(attention_type="gdla", **{**sizes_for("gdla"), option: True})
    name = option.removesuffix("_attention")
    with pytest.raises(ValueError, match=rf"^LatentDiffAttention: {name} must be left out, got True\.$"):
        LatentDiffAttention(24, 8, 1, **{name: True})


def test_a_part_of_the_heads_is_refused() -> None:
    module = build("gdla")
    module.q_proj.weight = nn.Parameter(module.q_proj.weight[:24])
    with pytest.raises(ValueError, match=r"^this rank has 4 of 8 query heads: latents are not spread by heads"):
        module(inputs())
    with pytest.raises(ValueError, match=r"does not spread attention_type 'gdla', asked for on 2 ranks; its one head"):
        check_ranks(2, DiffTransformerConfig(attention_type="gdla", **sizes_for("gdla")))
