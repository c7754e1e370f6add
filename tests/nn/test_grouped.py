"""Grouped differential attention: one signal head to a group is DIFF, and what sizes are refused."""

import pytest
import torch

from diff_transformer import DiffAttention, DiffTransformerConfig, GroupedDiffAttention, diff_attention
from diff_transformer.nn import DiffAttentionV2, DiffAttentionV3, GroupedDiffAttentionV2
from sharp_layers import build, by_oracle, check, inputs
from tiny_model import SIZES


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [8, 4, 2])
def test_one_signal_head_to_a_group_is_diff_bit_for_bit(kv_heads: int, is_causal: bool) -> None:
    sizes = {"num_key_value_heads": kv_heads, "head_dim": 4}
    grouped, diff = GroupedDiffAttention(24, 8, 3, num_noise_heads=4, **sizes), DiffAttention(24, 8, 3, **sizes)
    diff.load_state_dict(grouped.state_dict())
    x = torch.randn(2, 7, 24)
    outputs = [module(x, is_causal=is_causal) for module in (grouped, diff)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(
        *([parameter.grad for parameter in layer.parameters()] for layer in (grouped, diff)), rtol=0, atol=0
    )


def test_one_signal_head_to_a_group_is_version_two_bit_for_bit() -> None:
    grouped = GroupedDiffAttentionV2(24, 8, 3, 2, 4, num_noise_heads=4)
    second = DiffAttentionV2(24, 4, 3, 2, 4)
    second.load_state_dict(grouped.state_dict())
    x = torch.randn(2, 7, 24)
    assert torch.equal(grouped(x, is_causal=True), second(x, is_causal=True))


def test_version_three_with_open_first_gates_is_version_two() -> None:
    x = inputs()
    x[..., 0] = 1.0
    second, third = (layer(24, 8, 1, head_dim=4).double() for layer in (DiffAttentionV2, DiffAttentionV3))
    weights = second.state_dict()
    gates = torch.zeros(8, 2, 24, dtype=torch.float64)
    gates[:, 0, 0], gates[:, 1] = 40.0, weights["lambda_proj.weight"]
    third.load_state_dict(weights | {"lambda_proj.weight": gates.flatten(0, 1)})
    torch.testing.assert_close(third(x, is_causal=True), second(x, is_causal=True))


def test_groups_are_for_the_types_that_have_them() -> None:
    with pytest.raises(ValueError, match=r"^DiffAttentionV2: num_noise_heads must be left out, .* got 2\.$"):
        DiffAttentionV2(24, 8, 1, num_noise_heads=2)
    with pytest.raises(ValueError, match=r"^GroupedDiffAttentionV2: num_noise_heads must be given, got None\.$"):
        GroupedDiffAttentionV2(24, 8, 1)
    with pytest.raises(ValueError, match=r"^GroupedDiffAttention: dual_lambda and token_lambda exclude each other"):
        GroupedDiffAttention(24, 8, 1, num_noise_heads=2, dual_lambda=True, token_lambda=True)
    message = r"must be a multiple of num_key_value_heads, got 2 and num_key_value_heads 4\.$"
    with pytest.raises(ValueError, match=message):
        GroupedDiffAttentionV2(24, 8, 1, 4, num_noise_heads=2)


def test_a_pair_of_queries_is_their_stripes() -> None:
    q, k, v = torch.randn(2, 2, 4, 7, 6), torch.randn(2, 1, 2, 9, 6), torch.randn(2, 1, 9, 12)
    pair = q[:, :, :3].flatten(1, 2), q[:, :, 3]
    assert torch.equal(diff_attention(pair, k, v, 0.4, is_causal=True), diff_attention(q, k, v, 0.4, is_causal=True))
    repeated = torch.stack((pair[0], pair[1].repeat_interleave(3, 1)), 2)
    torch.testing.assert_close(diff_attention(pair, k, v, 0.4), diff_attention(repeated, k, v, 0.4))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "noise", "message"),
    [
        (8, 4, 3, r"must be \(r \+ 1\) · num_noise_heads, .*, with r of 1 or more, got 8 and 3\.$"),
        (8, 4, 8, r"with r of 1 or more, got 8 and 8\.$"),
        (8, 4, 0, r"with r of 1 or more, got 8 and 0\.$"),
        (8, 3, 2, r"a multiple of the pairs of keys, num_key_value_heads / 2, got 2 and num_key_value_heads 3\.$"),
        (8, 8, 2, r"a multiple of the pairs of keys, num_key_value_heads / 2, got 2 and num_key_value_heads 8\.$"),
    ],
)
def test_sizes_that_do_not_fit(heads: int, kv_heads: int, noise: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^GroupedDiffAttention: .*{message}"):
        GroupedDiffAttention(24, heads, 1, kv_heads, 4, num_noise_heads=noise)
    sizes = {**SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_noise_heads": noise}
    with pytest.raises(Exception, match=message):
        DiffTransformerConfig(attention_type="diff_grouped", **sizes)


def test_key_heads_unless_given() -> None:
    config = DiffTransformerConfig(
        hidden_size=40, num_attention_heads=10, num_noise_heads=2, attention_type="diff_grouped"
    )
    assert config.num_key_value_heads == 4
    view = config.get_text_config()
    assert (view.num_attention_heads, view.num_key_value_heads, view.head_dim) == (10, 2, 8)
    layer = GroupedDiffAttention(40, 10, 1, num_noise_heads=2)
    assert (layer.ratio, layer.k_proj.out_features, layer.o_proj.in_features) == (4, 16, 64)


@pytest.mark.parametrize("headwise_norm", [True, False])
def test_lambda_of_each_token_and_signal_head(headwise_norm: bool) -> None:
    """sigmoid(X W_λ), and a norm with the factor 1."""
    module, x = build("diff_grouped", token_lambda=True, headwise_norm=headwise_norm), inputs()
    lam = module.lambdas(x)
    assert lam.shape == (2, 6, 7)
    assert lam.std() > 0.05
    check(module(x, is_causal=True), by_oracle(module, x, is_causal=True))
