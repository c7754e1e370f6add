"""λ stays in float32 whatever is done to the model around it; caches and heads follow the model's dtype."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from tiny_model import has_lambda_vectors

CASTS: dict[str, Callable[[DiffTransformerForCausalLM], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "to, as another tensor": lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
    "each module": lambda model: model.apply(lambda module: module.to(torch.float16)),
    "there and back": lambda model: model.half().float().bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
def test_casts(kind: str, cast: str, make: Any, tokens: Any) -> None:
    model, inputs = make(kind, torch.float32), tokens()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".lam." in name}
    lambdas = model.lambdas()
    CASTS[cast](model)
    assert model.dtype in (torch.float16, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in before else model.dtype), name
    for name, parameter in before.items():
        assert torch.equal(model.get_parameter(name), parameter), name
    assert model.lambdas() == lambdas
    assert (lambdas is not None) == has_lambda_vectors(kind)
    out = model(inputs)
    assert out.logits.dtype == model.dtype
    assert out.logits.isfinite().all()
    assert {layer.keys.dtype for layer in out.past_key_values.layers} == {model.dtype}


@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa", "eager"])
def test_autocast_equals_half_precision(kind: str, implementation: str, make: Any, tokens: Any) -> None:
    """Logits under autocast are off by bfloat16's rounding: 8 roundings of eps/2 in their root mean square.

    Gradients arrive in float32 everywhere.
    """
    model, inputs = make(kind, torch.float32, attn_implementation=implementation), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs).logits
        cache = model(inputs[:, :6]).past_key_values
        continued = model(inputs[:, 6:], past_key_values=cache).logits
    truth = make(kind, torch.float64, attn_implementation="diff_attention_reference")(inputs).logits
    error = (logits.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    limit = 8 * torch.finfo(torch.bfloat16).eps / 2
    assert 1e-4 < error < limit
    assert (continued.double() - truth[:, 6:]).square().mean().sqrt() < limit * truth.square().mean().sqrt()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(inputs, labels=inputs).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_names_of_what_loads_in_float32(kind: str, make: Any, tmp_path: Path) -> None:
    """The names that the model gives to transformers are there, and they are all that loads in float32."""
    make(kind, torch.float32).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    float32_names = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert float32_names == {
        name
        for name, _ in model.named_parameters()
        if any(name.endswith(part) for part in model._keep_in_fp32_modules_strict)
    }
    assert bool(float32_names) == has_lambda_vectors(kind)


def test_what_stays_in_float32_is_a_unit_of_its_own(kind: str, make: Any) -> None:
    """FSDP wants one dtype in a unit; accelerate and the Trainer make a unit of each class that is named so."""
    assert ("Lambda" in make(kind).model._no_split_modules) == has_lambda_vectors(kind)
