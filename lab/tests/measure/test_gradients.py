"""Gradients by kind of parameter, against the backward pass."""

import math

import pytest
import torch

from any_model import any_model
from diff_lab.data import RetrievalBatches
from diff_lab.measure.gradients import Gradients, gradient_callback, gradient_magnitudes
from diff_lab.measure.measurement import EvalInput
from tiny_model import KINDS, PAIRED, SIZES

# What any model has, and what else a kind has.
SHARED = {"q", "k", "v", "o", "mlp", "norm", "embedding", "output"}
MORE = {
    **{kind: {"lambda", "head norm", "q1", "q2", "k1", "k2"} for kind in PAIRED},
    "diff_v2": {"lambda", "q1", "q2"},
    "softmax": set(),
    "llama": set(),
    "diffllama": {"lambda"},
}


@pytest.mark.parametrize("kind", MORE)
def test_magnitudes_are_those_of_backward(kind: str) -> None:
    model = any_model(kind, **SIZES)
    tokens = torch.randint(0, 29, (3, 11))
    with torch.no_grad():  # as training calls its callback
        magnitudes = gradient_magnitudes(model, {"input_ids": tokens, "labels": tokens})
    assert magnitudes.keys() == SHARED | MORE[kind]
    assert all(parameter.grad is None for parameter in model.parameters())
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    for kind_of, part in {**{letter: f".{letter}_proj." for letter in "qkvo"}, "mlp": ".mlp."}.items():
        gradients = [p.grad.flatten() for name, p in model.named_parameters() if part in name]
        assert magnitudes[kind_of] == pytest.approx(torch.cat(gradients).square().mean().sqrt().item(), rel=1e-5)
    if kind in KINDS and "q1" in magnitudes:
        ratio = model.model.layers[0].self_attn.ratio  # so many of q's rows are the first map's, to one of the second
        whole = (ratio * magnitudes["q1"] ** 2 + magnitudes["q2"] ** 2) / (ratio + 1)
        assert math.sqrt(whole) == pytest.approx(magnitudes["q"], rel=1e-5)


def test_the_halves_are_the_two_maps() -> None:
    """Where λ is 0 the second map has no say, so its queries and keys have no gradient."""
    model = any_model("diff", **SIZES)
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
    model = any_model("diff", **{**SIZES, "vocab_size": batches.vocab_size})
    measured = EvalInput(model=model, variant="diff", batches=batches)
    records = Gradients(sequences=6).run(measured)
    assert {record.name: record.value for record in records} == gradient_callback(batches, 6)(model, 3)
    assert {(record.n, record.coordinates.label, record.better) for record in records} == {(6, "", None)}
