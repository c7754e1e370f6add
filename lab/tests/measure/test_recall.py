"""Recall among distractors: answers, attention and floors, on models whose numbers are known otherwise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from any_model import any_model
from diff_lab.coordinates import Coordinates
from diff_lab.data import RecallBatches, RetrievalBatches
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.retrieval import Noise, answer_attention, retrieval_answers
from diff_lab.train import load_recipe
from diff_transformer.explorer import LambdaSettings
from diff_transformer.explorer.explored_model import replaced_lambdas
from diff_transformer.model import attention_maps

TASK = RecallBatches(8, questions=4, tokens=8)


def model_of(kind: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    return any_model(kind, vocab_size=16, initializer_range=0.5, **sizes)


@pytest.mark.parametrize("pairs", [2, 12, 40])
def test_the_floor_is_that_of_the_most_frequent_value(pairs: int) -> None:
    values = RecallBatches(pairs, tokens=40).sample(4000, 0).input_ids[:, 1 : 2 * pairs : 2]
    most = torch.nn.functional.one_hot(values).sum(1).amax(1).double().mean().item()
    (level,) = Noise(pairs=(pairs,)).baselines(load_recipe("recall", ["data.tokens=40"]))[:1]
    assert (level.floor, level.chance) == (pytest.approx(most / pairs, rel=0.01), 1 / 40)


@pytest.mark.parametrize("kind", ["diff", "diff_v2", "softmax"])
def test_attention_to_answers(kind: str) -> None:
    """By loops, from the maps and the values of each head."""
    model, sample = model_of(kind), TASK.sample(3, 0)
    values: list[Tensor] = []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, output: values.append(output.detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        maps = attention_maps(model, sample.input_ids)
    for hook in hooks:
        hook.remove()
    share, signed = answer_attention(model, sample, batch_size=2)
    for layer, number in ((layer, number) for layer in range(2) for number in range(maps[0].difference.shape[1])):
        heads = values[layer].unflatten(-1, (maps[layer].difference.shape[1], -1))
        shares, masses, scales = [], [], []
        for row in range(3):
            for query, answer in zip(sample.query_positions[row], sample.answer_spans[row], strict=True):
                weights = maps[layer].difference[row, number, query]
                norms = heads[row, :, number].norm(dim=-1)
                total = (weights * norms).abs().sum()
                shares.append((weights[answer] * norms[answer]).abs() / total)
                masses.append(weights[answer] * norms[answer])
                scales.append(weights.sum() * total / weights.abs().sum())
        assert share[layer, number].item() == pytest.approx(torch.stack(shares).mean().item(), rel=1e-4)
        expected = torch.stack(masses).sum() / torch.stack(scales).sum()
        assert signed[layer, number].item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", ["diff", "softmax"])
def test_the_records(kind: str) -> None:
    model = model_of(kind)
    measured = EvalInput(model=model, variant=kind, batches=TASK, seed=3)
    records = Noise(pairs=(2, 5), sequences=6, factors=(0.0, 1.0), batch_size=4).run(measured)
    found = {(record.name, record.coordinates.label): record for record in records}
    assert found["noise/accuracy", "2 pairs"].n == 6 * 2
    assert found["noise/accuracy", "5 pairs"].n == 6 * 4
    sample = TASK.sample(6, 3, 5)
    assert found["noise/accuracy", "5 pairs"].value == retrieval_answers(model, sample, 6).double().mean().item()
    by_lambda = {label: record.value for (name, label), record in found.items() if name == "noise/accuracy_by_lambda"}
    if kind == "diff":
        with replaced_lambdas(model, LambdaSettings(factor=0.0), 2):
            switched_off = retrieval_answers(model, sample, 6).double().mean().item()
        assert by_lambda == {"λ × 0": switched_off, "λ × 1": found["noise/accuracy", "5 pairs"].value}
    else:
        assert not by_lambda
    share, signed = answer_attention(model, sample, 6)
    whole = {
        part: found["noise/attention_share", f"all layers, {part}"].value for part in ("best head", "mean of the heads")
    }
    assert whole == {"best head": share.max().item(), "mean of the heads": pytest.approx(share.mean().item())}
    best = Coordinates(layer="all layers", part="best head")
    assert found["noise/attention_signed", best.label].value == signed.flatten()[share.argmax()].item()
    assert found["noise/attention_share", "layer 2, best head"].value == share[1].max().item()
    assert len(records) == 2 + (2 if kind == "diff" else 0) + 2 * 2 * 3


def test_other_data_and_contexts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^noise is measured on the recall task alone, which the model"):
        Noise().check(RetrievalBatches(), None)
