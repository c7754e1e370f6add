"""A run that meets a bad step: it stops with a report, or leaves the batch out, but not for ever."""

import json
import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_lab.train import Data, DivergenceError, TrainingInterrupted, read_metrics, train
from diff_lab.train.divergence import BadStep, SpikeDetector
from small_runs import Watcher, assert_equal, small_recipe, weights

STEPS = 60
recipe = partial(
    small_recipe,
    data={"batch_size": 4},
    steps=STEPS,
    learning_rate=2e-2,
    warmup_steps=0,
    log_every=20,
    inspect_every=10,
    checkpoint_every=10,
    keep_checkpoints=9,
)


class Text:
    """Each token is the one before it and one more; in the bad steps anything."""

    vocab_size, source = 20, ""

    def __init__(self, bad: range = range(0), other: int = 0) -> None:
        self.bad, self.other = bad, other

    def train_batch(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        input_ids = (torch.randint(20, (4, 1), generator=generator) + torch.arange(12)) % 20
        if step in self.bad:
            generator.manual_seed(step + self.other)
            input_ids = torch.randint(20, (4, 12), generator=generator)
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        yield self.train_batch(0)


def test_a_run_stops_with_a_report(tmp_path: Path) -> None:
    recorder = Watcher()
    with pytest.raises(DivergenceError) as raised:
        train(recipe(), tmp_path / "run", data=Data(Text(range(55, 57))), progress=recorder)
    message = str(raised.value)
    assert message.startswith("At step 55 the loss rose to ")
    assert "of the batch" in message
    assert str(tmp_path / "run" / "divergence.json") in message
    assert str(tmp_path / "run" / "checkpoints" / "step-000050") in message
    assert len(message) < 8 * 120
    report = json.loads((tmp_path / "run" / "divergence.json").read_text())
    assert report["step"] == 55
    assert len(report["rows"]) == 4
    assert report["before"].keys() == {"norm_input_rms", "logit_max", "hidden_rms"}
    assert not (tmp_path / "run" / "model").exists()


def test_a_run_leaves_bad_batches_out(tmp_path: Path) -> None:
    recorder = Watcher()
    settings = recipe(on_divergence="skip", log_every=1)
    run = train(settings, tmp_path / "run", data=Data(Text(range(52, 55))), progress=recorder)
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "skipped" in line] == [52, 53, 54]
    assert all("the loss rose to" in line["skipped"] for line in lines[51:54])
    assert lines[50]["lambdas"] == lines[53]["lambdas"] != lines[54]["lambdas"]
    assert lines[54]["loss"] < 1
    assert [f"At step {step} " in message for step, message in zip((52, 53, 54), recorder.messages[-3:], strict=True)]
    assert run.last["step"] == STEPS


def test_without_the_option_bad_batches_are_learnt(tmp_path: Path) -> None:
    """So what the tests before see is the option's doing."""
    run = train(recipe(max_loss_rise=None, log_every=1), tmp_path / "run", data=Data(Text(range(52, 55))))
    lines = read_metrics(run.folder / "metrics.jsonl")
    assert not [line for line in lines if "skipped" in line]
    assert lines[50]["lambdas"] != lines[53]["lambdas"]
    assert not (run.folder / "divergence.json").exists()


def test_too_many_bad_batches_in_a_row_end_a_run(tmp_path: Path) -> None:
    settings = recipe(on_divergence="skip", log_every=1)
    with pytest.raises(DivergenceError, match="At step 51 the loss rose"):
        train(settings, tmp_path / "run", data=Data(Text(range(41, STEPS + 1))), progress=Watcher())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "skipped" in line] == list(range(41, 51))


def test_a_batch_that_is_left_out_leaves_nothing_behind(tmp_path: Path) -> None:
    """No gradient either, which the next step would add to its own: other bad batches end in the same weights."""
    settings, bad = recipe(on_divergence="skip", log_every=1, accumulation=2), range(52, 55)
    runs = []
    for number in (0, 1000):
        with pytest.warns(UserWarning, match=r"The step is skipped\. At step 5"):  # without a progress to tell
            runs.append(train(settings, tmp_path / str(number), data=Data(Text(bad, number))))
    lines = [[(line["loss"], line["grad_norm"]) for line in read_metrics(run.folder / "metrics.jsonl")] for run in runs]
    assert [one == other for one, other in zip(*lines, strict=True)] == [step + 1 not in bad for step in range(STEPS)]
    assert_equal(*(weights(run.model_folder) for run in runs))


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those before it, and the run goes on."""
    seen: list[Tensor] = []

    def evaluate(model: Any, step: int) -> dict[str, float]:
        seen.append(model.lm_head.weight.detach().clone())
        return {}

    def check(detector: SpikeDetector, loss: float, norm: float) -> BadStep | None:
        return original(detector, math.inf if len(seen) == 2 else loss, norm)

    original, watcher = SpikeDetector.check, Watcher()
    monkeypatch.setattr(SpikeDetector, "check", check)
    settings = small_recipe(evaluate_every=1, on_divergence="skip")
    run = train(settings, tmp_path / "run", progress=watcher, on_evaluate=evaluate)
    assert [torch.equal(one, other) for one, other in pairwise(seen)] == [False, True, False, False, False]
    skipped = [line.get("skipped") for line in read_metrics(run.folder / "metrics.jsonl")]
    assert skipped == [None, None, "the loss became inf", None, None, None]
    assert watcher.messages[1].startswith("The step is skipped. At step 3 the loss became inf. The same step with the")


def test_a_resumed_run_leaves_the_same_out(tmp_path: Path) -> None:
    """The losses before the interruption decide."""
    settings, data = recipe(on_divergence="skip"), Data(Text(range(52, 55)))
    uninterrupted = train(settings, tmp_path / "whole", data=data, progress=Watcher())
    with pytest.raises(TrainingInterrupted):
        train(settings, tmp_path / "halves", data=data, progress=Watcher(interrupt_after=51))
    recorder = Watcher()
    halves = train(settings, tmp_path / "halves", data=data, progress=recorder, resume=True)
    assert len([message for message in recorder.messages if "the loss rose" in message]) == 3
    assert_equal(weights(uninterrupted.model_folder), weights(halves.model_folder))


def test_broken_weights_end_a_run_at_once(tmp_path: Path) -> None:
    def evaluate(model: Any, step: int) -> dict[str, float]:
        if step == 15:
            model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
        return {}

    settings, watcher = recipe(on_divergence="skip", evaluate_every=5), Watcher()
    message = r"At step 16 the loss became nan\. It began in layer 2 of 2 .*up_proj.* newest checkpoint is .*-000010"
    with pytest.raises(DivergenceError, match=message):
        train(settings, tmp_path / "run", data=Data(Text()), on_evaluate=evaluate, progress=watcher)
    assert watcher.stopped == 1
    assert json.loads((tmp_path / "run" / "divergence.json").read_text())["module"] == "model.layers.1.mlp.up_proj"
