"""SwiGLU and the decoder layer of Section 2.2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from diff_transformer.nn import DecoderLayer, SwiGLU

WIDTH, INNER = 24, 20


def large(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return module.double()


def mlp_weights(mlp: SwiGLU) -> list[Any]:
    return [getattr(mlp, name).weight.detach().numpy() for name in ("gate_proj", "up_proj", "down_proj")]


def test_swiglu(check: Any) -> None:
    mlp, x = large(SwiGLU(WIDTH, INNER)), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    assert [tuple(p.shape) for p in mlp.parameters()] == [(INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)]
    gate, up, down = mlp_weights(mlp)
    check(mlp(x), oracle.swiglu(x.numpy(), gate, up, down))
    wrong = oracle.swiglu(x.numpy(), up, gate, down)
    assert abs(mlp(x).detach().numpy() - wrong).max() > 0.1


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_decoder_layer(kind: str, eps: float, build: Any, by_oracle: Any, inputs: Any, tables: Any, check: Any) -> None:
    """Pre-norm, two residuals, and the layer's keyword arguments handed on to its attention."""
    attention, x = build(kind, num_key_value_heads=4), inputs()
    layer = DecoderLayer(attention, WIDTH, INNER, eps).double()
    for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
        large(module)
    answer = layer(x, position_embeddings=tables(range(7)), is_causal=True)

    def attend(normed: Any) -> Any:
        return by_oracle(attention, torch.from_numpy(normed), positions=range(7), is_causal=True)

    norms = [norm.weight.detach().numpy() for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    expected = oracle.decoder_layer(x.numpy(), attend, *mlp_weights(layer.mlp), *norms, eps)
    check(answer, expected)
    swapped = oracle.decoder_layer(x.numpy(), attend, *mlp_weights(layer.mlp), *norms[::-1], eps)
    assert abs(answer.detach().numpy() - swapped).max() > 0.01


def test_any_attention_will_do() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return factor * x

    layer = DecoderLayer(Twice(), 4, 8)
    nn.init.zeros_(layer.mlp.down_proj.weight)
    x = torch.full((1, 1, 4), 3.0)
    torch.testing.assert_close(layer(x, factor=2.0), x + 2.0)


def test_parameters() -> None:
    """What a layer has beside its attention: the feed-forward network's three matrices and two norms, no biases."""
    layer = DecoderLayer(nn.Identity(), WIDTH, INNER)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 3 * WIDTH * INNER + 2 * WIDTH
    assert torch.equal(layer.input_layernorm.weight, torch.ones(WIDTH))
