"""λ (Equation 2): its value, its constant, its dtype, its gradient and how it starts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import oracle
from diff_transformer import DiffAttention
from diff_transformer.nn import Lambda


def trained(lam: Lambda) -> Lambda:
    """Vectors as after training: far from 0, so that exp and the dot products matter."""
    with torch.no_grad():
        for vector in lam.parameters():
            vector.normal_(std=0.7)
    return lam


def vectors(lam: Lambda) -> list[Any]:
    return [getattr(lam, name).detach().double().numpy() for name in ("q1", "k1", "q2", "k2")]


def test_layers_are_counted_from_one() -> None:
    """λ_init is 0.2 in the first layer and 0.8 − 0.6·exp(−0.3) in the second; the vectors at 0 leave λ there."""
    for layer, init in ((1, 0.2), (2, 0.8 - 0.6 * math.exp(-0.3)), (1000, 0.8)):
        module = DiffAttention(16, 4, layer)
        assert module.lam.lambda_init == pytest.approx(init, abs=1e-15)
        assert module.head_norm.factor == pytest.approx(1 - init, abs=1e-15)
        for vector in module.lam.parameters():
            nn.init.zeros_(vector)
        assert module.lam().item() == pytest.approx(init, abs=1e-7)
        assert module.layer_idx == layer - 1


@pytest.mark.parametrize("constant", [0.8, 0.5, 0, 1, -0.3, 1.4])
def test_one_constant_for_all_layers(constant: float) -> None:
    for layer in (1, 9):
        module = DiffAttention(16, 4, layer, lambda_init=constant)
        assert module.lam.lambda_init == constant
        assert module.head_norm.factor == 1 - constant
        expected = oracle.lambda_value(*vectors(trained(module.lam)), constant)
        assert module.lam().item() == pytest.approx(expected, abs=1e-6)


def test_two_numbers_in_the_place_of_vectors() -> None:
    """exp(a) − exp(b) + λ_init, which starts at λ_init and stays in float32; the norm's factor is that of λ_init."""
    module = DiffAttention(16, 4, 2, dual_lambda=True).half()
    init = 0.8 - 0.6 * math.exp(-0.3)
    assert module.lam().item() == pytest.approx(init, abs=1e-7)
    assert module.head_norm.factor == pytest.approx(1 - init, abs=1e-15)
    assert {parameter.dtype for parameter in module.lam.parameters()} == {torch.float32}
    nn.init.constant_(module.lam.a, 0.3)
    nn.init.constant_(module.lam.b, -0.2)
    module.lam().backward()
    assert module.lam().item() == pytest.approx(math.exp(0.3) - math.exp(-0.2) + init, abs=1e-6)
    gradients = module.lam.a.grad.item(), module.lam.b.grad.item()
    assert gradients == pytest.approx((math.exp(0.3), -math.exp(-0.2)), abs=1e-6)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16], ids=str)
def test_float32_under_another_default_dtype(default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        module = DiffAttention(16, 4, 3)
    finally:
        torch.set_default_dtype(before)
    assert module.q_proj.weight.dtype == default
    assert {parameter.dtype for parameter in module.lam.parameters()} == {torch.float32}


def test_start() -> None:
    """N(0, 0.1²): of 4 × 10,000 draws the mean and the deviation are within five standard errors of that."""
    lam = Lambda(10_000, 1)
    draws = torch.cat([vector.detach() for vector in lam.parameters()])
    assert abs(draws.mean().item()) < 5 * 0.1 / 200
    assert abs(draws.std().item() - 0.1) < 5 * 0.1 / (200 * math.sqrt(2))
    assert not torch.equal(lam.q1, lam.k1)
    before = lam.q1.clone()
    lam.reset_parameters()
    assert not torch.equal(lam.q1, before)


def test_a_checkpoint_in_half_precision_loads_into_float32() -> None:
    source, target = trained(Lambda(8, 2)), Lambda(8, 2)
    target.load_state_dict({name: vector.bfloat16() for name, vector in source.state_dict().items()})
    assert list(target.state_dict()) == ["q1", "k1", "q2", "k2"]
    assert target.q1.dtype == torch.float32
    assert torch.equal(target.q1, source.q1.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrower_parameter_put_in_place_is_widened(dtype: torch.dtype) -> None:
    """Servers set every parameter anew, in the model's dtype, before they load a checkpoint into them."""
    lam = Lambda(8, 1)
    before = lam.q1.detach().clone()
    lam.q1 = torch.nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False)
    assert lam.q1.dtype == torch.float32
    assert not lam.q1.requires_grad
    lam.q1.data.copy_(before)
    assert torch.equal(lam.q1, before)
    lam.k1 = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
    assert lam.k1.dtype == torch.float64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lambda_is_never_that_of_earlier_vectors(mode: Callable[[], Any]) -> None:
    """Without a gradient it is computed once, and again when anything that makes it has changed, in whatever way."""
    lam = Lambda(head_dim=8, layer=2)
    optimizer = torch.optim.AdamW(lam.parameters(), lr=0.1)

    def step() -> None:
        lam().backward()
        optimizer.step()

    changes: list[Callable[[], object]] = [
        step,
        lambda: lam.q1.data.mul_(2),  # which no version counts
        lambda: setattr(lam.k2, "data", torch.full((8,), 0.3)),
        lambda: lam.load_state_dict({name: torch.randn(8) for name in ("q1", "k1", "q2", "k2")}),
        lam.double,
        lambda: lam.q2.data.add_(1e-9),
        lam.float,
        lam.reset_parameters,
        lambda: setattr(lam, "lambda_init", 0.5),
    ]
    for change in changes:
        with mode():
            number = lam().item()
            lam().add_(1.0)  # a caller's own
            assert lam().item() == number
        change()
        with mode():
            value = lam()
        expected = lam()
        assert expected.requires_grad
        assert (value.dtype, value.item()) == (expected.dtype, expected.item())
