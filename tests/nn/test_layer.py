"""The headwise norm of Equation 3, SwiGLU, PolyNorm in its place, and the decoder layer of Section 2.2."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
from diff_transformer.nn import DecoderLayer, HeadwiseNorm, PolyNorm, PolyNormGLU, SwiGLU
from sharp_layers import build, by_oracle, check, inputs, tables

WIDTH, INNER = 24, 20


def large(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return module.double()


def test_headwise_norm() -> None:
    """Over each head's own channels: (B, N, H, 2d), times 1 − λ_init, one weight for all heads."""
    norm, x = large(HeadwiseNorm(8, 0.3)), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    assert norm.weight.shape == (8,)
    expected = 0.7 * oracle.rms_norm(x.numpy(), norm.weight.detach().numpy(), 1e-5)
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-13)


def mlp_weights(mlp: SwiGLU) -> list[Any]:
    return [getattr(mlp, name).weight.detach().numpy() for name in ("gate_proj", "up_proj", "down_proj")]


def act_fn(mlp: PolyNormGLU) -> tuple[Any, Any]:
    return mlp.act_fn.weight.detach().numpy(), mlp.act_fn.bias.detach().numpy()


def test_gradients_of_poly_norm() -> None:
    norm, x = large(PolyNorm()), torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, x)

    arguments = x, norm.weight, norm.bias
    assert torch.autograd.gradcheck(of, arguments)
    assert torch.autograd.gradgradcheck(of, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_poly_norm_in_half_precision(dtype: torch.dtype) -> None:
    """x⁶ would be infinite in float16 already where x is 7."""
    norm, x = PolyNorm().to(dtype), (20 * torch.randn(3, 64)).to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    weight = norm.weight.detach().double().numpy()
    expected = torch.from_numpy(oracle.poly_norm(x.double().numpy(), weight, [0.0]))
    torch.testing.assert_close(out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"hidden_act must be one of 'silu', 'poly_norm', got 'gelu'\."):
        DecoderLayer(nn.Identity(), WIDTH, INNER, hidden_act="gelu")


@pytest.mark.parametrize("hidden_act", ["silu", "poly_norm"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_decoder_layer(kind: str, eps: float, hidden_act: str) -> None:
    """Pre-norm, two residuals, and the layer's keyword arguments handed on to its attention."""
    attention, x = build(kind, num_key_value_heads=4), inputs()
    layer = DecoderLayer(attention, WIDTH, INNER, eps, hidden_act=hidden_act).double()
    for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
        large(module)
    answer = layer(x, position_embeddings=tables(range(7)), is_causal=True)

    def attend(normed: Any) -> Any:
        return by_oracle(attention, torch.from_numpy(normed), positions=range(7), is_causal=True)

    norms = [norm.weight.detach().numpy() for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    activation = act_fn(layer.mlp) if hidden_act == "poly_norm" else None
    check(answer, oracle.decoder_layer(x.numpy(), attend, *mlp_weights(layer.mlp), *norms, eps, activation))
