"""Gradients by kind of parameter, and Equations 7 and 9, against autograd in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_lab.data import RetrievalBatches
from diff_lab.measure import gradients
from diff_lab.measure.gradients import (
    Gradients,
    HeadWeights,
    closed_form_error,
    differential_gradients,
    gradient_callback,
    gradient_magnitudes,
    ordinary_gradients,
)
from diff_lab.measure.measurement import EvalInput
from diff_transformer import DiffAttentionV2, DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.ops import diff_attention
from tiny_model import KINDS, PAIRED, SIZES, check_rounding

N, D, WIDTH, LAM = 7, 10, 4, 0.3


def one_head() -> tuple[Tensor, HeadWeights, Tensor]:
    shapes = ((D, WIDTH),) * 4 + ((D, 2 * WIDTH), (2 * WIDTH, D))
    weights = HeadWeights(*(torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes))
    return torch.randn(N, D, dtype=torch.float64), weights, torch.randn(N, D, dtype=torch.float64)


@pytest.mark.parametrize("with_norm", [False, True])
def test_equation_7_is_what_autograd_finds(with_norm: bool) -> None:
    """Through our own operator: without the norm as printed in the paper, with it exact."""
    x, weights, output_gradient = one_head()
    q, k = (torch.stack((x @ first, x @ second))[None, None] for first, second in (weights[0:3:2], weights[1:4:2]))
    arguments: dict[str, Any] = {"is_causal": True}
    norm = None
    if with_norm:
        weight = torch.rand(2 * WIDTH, dtype=torch.float64)
        norm = (0.64 * weight, 1e-5)
        arguments |= {"norm_weight": weight, "norm_eps": 1e-5, "norm_scale": 0.64}
    output = diff_attention(q, k, (x @ weights.v)[None, None], LAM, **arguments)[0, 0] @ weights.o
    expected = torch.autograd.grad(output, weights, output_gradient)
    for closed, reference in zip(differential_gradients(x, weights, LAM, output_gradient, norm), expected, strict=True):
        check_rounding(closed, reference)


def test_equation_9_is_what_autograd_finds() -> None:
    x, weights, output_gradient = one_head()
    q, k = (torch.cat((x @ a, x @ b), dim=1)[None] for a, b in (weights[0:3:2], weights[1:4:2]))
    attend = torch.nn.functional.scaled_dot_product_attention
    output = attend(q, k, (x @ weights.v)[None], is_causal=True)[0] @ weights.o
    expected = torch.autograd.grad(output, weights, output_gradient)
    for closed, by_autograd in zip(ordinary_gradients(x, weights, output_gradient), expected, strict=True):
        check_rounding(closed, by_autograd)


@pytest.mark.parametrize("kind", ["diff", "softmax", "diff without its norm"])
def test_the_closed_form_of_a_models_layer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads of a layer, with weights of its own in the norm; a formula without λ would not do."""
    sizes = {**SIZES, "num_key_value_heads": 8, "headwise_norm": kind == "diff"}
    config = DiffTransformerConfig(**sizes, attention_type=kind.split()[0], initializer_range=0.5)
    attention = DiffTransformerForCausalLM(config).model.layers[1].self_attn
    if kind == "diff":
        torch.nn.init.uniform_(attention.head_norm.weight)
    x = torch.randn(6, 24)
    assert 0 < closed_form_error(attention, x) < 1e-12
    closed_form = gradients.differential_gradients

    def without_lambda(*arguments: Any) -> HeadWeights:
        weights_gradients = closed_form(*arguments)
        return weights_gradients._replace(q2=-weights_gradients.q1)

    monkeypatch.setattr(gradients, "differential_gradients", without_lambda)
    assert (closed_form_error(attention, x) > 0.1) == (kind != "softmax")


def test_layers_that_the_equations_are_not_of() -> None:
    attention = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"got a layer with num_key_value_heads below num_attention_heads\.$"):
        closed_form_error(attention, torch.randn(3, 24))
    attention = DiffAttentionV2(24, 6, 1)
    with pytest.raises(ValueError, match=r"got DiffAttentionV2 with heads of 4\.$"):
        closed_form_error(attention, torch.randn(3, 24))


def build(kind: str) -> Any:
    if kind == "Llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    if kind == "DiffLlama":
        return DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES))
    return DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, attention_type=kind))


# What any model has, and what else a kind has.
SHARED = {"q", "k", "v", "o", "mlp", "norm", "embedding", "output"}
MORE = {
    **{kind: {"lambda", "head norm", "q1", "q2", "k1", "k2"} for kind in PAIRED},
    "diff_v2": {"lambda", "q1", "q2"},
    "softmax": set(),
    "Llama": set(),
    "DiffLlama": {"lambda"},
}


@pytest.mark.parametrize("kind", MORE)
def test_magnitudes_are_those_of_backward(kind: str) -> None:
    model = build(kind)
    tokens = torch.randint(0, 29, (3, 11))
    with torch.no_grad():  # as training calls its callback
        magnitudes = gradient_magnitudes(model, {"input_ids": tokens, "labels": tokens})
    assert magnitudes.keys() == SHARED | MORE[kind]
    assert all(parameter.grad is None for parameter in model.parameters())
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for letter in "qkvo":
        gradients = [p.grad.flatten() for name, p in model.named_parameters() if f".{letter}_proj." in name]
        assert magnitudes[letter] == pytest.approx(torch.cat(gradients).square().mean().sqrt().item(), rel=1e-5)
    inner = [p.grad.flatten() for name, p in model.named_parameters() if ".mlp." in name]
    assert magnitudes["mlp"] == pytest.approx(torch.cat(inner).square().mean().sqrt().item(), rel=1e-5)
    if kind in KINDS and "q1" in magnitudes:
        ratio = model.model.layers[0].self_attn.ratio  # so many of q's rows are the first map's, to one of the second
        whole = (ratio * magnitudes["q1"] ** 2 + magnitudes["q2"] ** 2) / (ratio + 1)
        assert math.sqrt(whole) == pytest.approx(magnitudes["q"], rel=1e-5)


def test_the_halves_are_the_two_maps() -> None:
    """Where λ is 0 the second map has no say, so its queries and keys have no gradient."""
    model = build("diff")
    for layer in model.model.layers:
        layer.self_attn.lam.lambda_init = 0.0
        for vector in layer.self_attn.lam.parameters():
            torch.nn.init.zeros_(vector)
    tokens = torch.randint(0, 29, (2, 9))
    magnitudes = gradient_magnitudes(model, {"input_ids": tokens, "labels": tokens})
    assert magnitudes["q2"] == magnitudes["k2"] == 0 < magnitudes["q1"]
    assert magnitudes["k1"] > 0


def test_records_and_callback_agree() -> None:
    batches = RetrievalBatches(num_pairs=2, length=24, batch_size=4)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**{**SIZES, "vocab_size": batches.vocab_size}))
    measured = EvalInput(model=model, variant="diff", batches=batches)
    records = Gradients(sequences=6).run(measured)
    assert {record.name: record.value for record in records} == gradient_callback(batches, 6)(model, 3)
    assert {(record.n, record.coordinates.label, record.better) for record in records} == {(6, "", None)}
    with pytest.raises(ValueError, match=r"^no parameter of this DiffTransformerForCausalLM takes a gradient\.$"):
        gradient_magnitudes(model.requires_grad_(False), {})
