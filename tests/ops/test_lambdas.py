"""λ (Equation 2) and its schedule."""

import math

import pytest
import torch

import oracle
from diff_transformer.ops import lambda_init_schedule, lambda_value


def test_schedule_counts_layers_from_one() -> None:
    assert lambda_init_schedule(1) == pytest.approx(0.2)
    assert lambda_init_schedule(2) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    for layer in range(1, 41):
        assert lambda_init_schedule(layer) == pytest.approx(oracle.lambda_init(layer), rel=1e-14)
    assert lambda_init_schedule(1000) == pytest.approx(0.8)


@pytest.mark.parametrize("layer", [0, -1])
def test_schedule_refuses_a_layer_before_the_first(layer: int) -> None:
    with pytest.raises(ValueError, match=f"layer must be 1 or more.*got {layer}"):
        lambda_init_schedule(layer)


def vectors(dtype: torch.dtype = torch.float32, spread: float = 0.5) -> list[torch.Tensor]:
    return [(torch.randn(8, dtype=torch.float64) * spread).to(dtype) for _ in range(4)]


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_value(dtype: torch.dtype, result: torch.dtype) -> None:
    q1, k1, q2, k2 = vectors(dtype)
    value = lambda_value(q1, k1, q2, k2, 0.8)
    expected = oracle.lambda_value(*(x.double() for x in (q1, k1, q2, k2)), 0.8)
    assert value.dtype == result
    assert value.shape == ()
    # Two exponentials, each of a sum of eight products, then two additions, all in `result`.
    largest = 0.8 + sum(math.exp(float(a.double() @ b.double())) for a, b in ((q1, k1), (q2, k2)))
    sums = 1 + float((q1 * k1).double().abs().sum() + (q2 * k2).double().abs().sum())
    assert float(value) == pytest.approx(expected, abs=4 * sums * largest * torch.finfo(result).eps)


def test_value_is_not_clamped() -> None:
    one, zero = torch.ones(4), torch.zeros(4)
    assert float(lambda_value(one, one, zero, zero, 0.8)) == pytest.approx(math.exp(4) - 1 + 0.8)
    assert float(lambda_value(zero, zero, one, one, 0.8)) == pytest.approx(1 - math.exp(4) + 0.8)


def test_value_stays_in_float32_under_autocast() -> None:
    q1, k1, q2, k2 = vectors()
    plain = lambda_value(q1, k1, q2, k2, 0.8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = lambda_value(q1, k1, q2, k2, 0.8)
    assert value.dtype == torch.float32
    assert torch.equal(value, plain)


def test_gradients() -> None:
    leaves = [x.requires_grad_() for x in vectors(torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: lambda_value(*x, 0.8), leaves)
