"""A step that goes wrong is noticed: a run stops there, or skips the batch, but not for ever."""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diff_lab.data.batches import ALL_ROWS
from diff_lab.train import Data, DivergenceError, TrainingInterrupted, read_metrics, train
from diff_lab.train.step import SpikeDetector
from small_runs import Watcher, assert_equal, small_recipe, weights


def test_what_is_not_finite_is_a_fault() -> None:
    for bad in (math.nan, math.inf):
        assert SpikeDetector(2.0).check(bad, 1.0) == f"the loss became {bad}"
        assert SpikeDetector(None).check(3.0, bad) == f"the gradient norm became {bad}"
    assert SpikeDetector(None).check(3.0, 1e30) is None


def noisy(step: int, spread: float) -> float:
    """Losses around 2, by a fixed rule, evenly spread."""
    return 2.0 + spread * (((step * 37) % 101) / 50 - 1)


@pytest.mark.parametrize(
    ("losses", "good", "bad"),
    [
        ([noisy(step, 0.05) for step in range(150)], 3.99, 4.01),
        # The first steps may do what they like.
        ([5.0, 9.0, *[3.0] * 17], 9.0, 9.0),
        # A loss that jumps by nature, by 0.74 from step to step, is no spike: 25 such jumps count.
        ([noisy(step, 1.0) for step in range(100)], 20.4, 20.6),
        # That it falls by 8 makes no jumps of it.
        ([10 - step / 10 for step in range(81)], 8.4, 8.6),
    ],
    ids=["noisy", "beginning", "jumpy", "falling"],
)
def test_a_rise_above_the_median_is_a_fault(losses: list[float], good: float, bad: float) -> None:
    detector = SpikeDetector(2.0)
    assert [detector.check(loss, 1.0) for loss in (*losses, good)] == [None] * (len(losses) + 1)
    reason = detector.check(bad, 1.0)
    assert reason is not None
    assert reason.startswith(f"the loss rose to {bad:.2f}, from ")
    off = SpikeDetector(None)
    assert all(off.check(loss, 1.0) is None for loss in [2.0] * 50 + [1e9])


def test_bad_losses_are_not_compared_with_and_are_left_out_so_often() -> None:
    detector = SpikeDetector(2.0)
    for _ in range(30):
        detector.check(3.0, 1.0)
    for number in range(1, 13):
        assert detector.check(50.0, 1.0) == "the loss rose to 50.00, from 3.00 as the median of the last 30 steps"
        assert detector.may_skip == (number <= 10)
    assert detector.check(3.0, 1.0) is None
    assert detector.check(math.nan, 1.0) is not None
    assert detector.may_skip


def test_a_resumed_detector_decides_the_same() -> None:
    losses = [noisy(step, 0.3) for step in range(140)] + [9.0, 2.0, 9.0, 9.0, *[2.1] * 60, 4.3]
    uninterrupted = SpikeDetector(2.0)
    expected = [(uninterrupted.check(loss, 1.0), uninterrupted.may_skip) for loss in losses]
    assert sum(reason is not None for reason, _ in expected) == 4
    for at in (5, 60, 141, 143):
        first, resumed = SpikeDetector(2.0), SpikeDetector(2.0)
        for loss in losses[:at]:
            first.check(loss, 1.0)
        state = json.loads(json.dumps(first.state_dict()))
        assert len(state["losses"]) <= 100
        former = {"losses": state["losses"], "faults": state["bad_steps"], "overflows": 0}  # of earlier versions
        resumed.load_state_dict(state if at % 2 else former)
        assert [(resumed.check(loss, 1.0), resumed.may_skip) for loss in losses[at:]] == expected[at:]
        assert resumed.state_dict() == uninterrupted.state_dict()


STEPS = 44
recipe = partial(
    small_recipe,
    data={"batch_size": 4},
    steps=STEPS,
    learning_rate=2e-2,
    warmup_steps=0,
    log_every=1,
    inspect_every=None,
    checkpoint_every=10,
    keep_checkpoints=9,
)


class Text:
    """Each token is the one before it and one more; in the bad steps anything."""

    vocab_size, source = 20, ""

    def __init__(self, bad: range = range(0), other: int = 0) -> None:
        self.bad, self.other = bad, other

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        input_ids = (torch.randint(20, (4, 1), generator=generator) + torch.arange(12)) % 20
        if step in self.bad:
            generator.manual_seed(step + self.other)
            input_ids = torch.randint(20, (4, 12), generator=generator)
        return {"input_ids": input_ids[rows], "labels": input_ids[rows].clone()}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        yield self.train_batch(0)


def test_a_run_stops_and_says_how_to_go_on(tmp_path: Path) -> None:
    watcher = Watcher()
    with pytest.raises(DivergenceError) as raised:
        train(recipe(), tmp_path / "run", data=Data(Text(range(39, 41))), progress=watcher)
    message = str(raised.value)
    assert message.startswith("At step 39 the loss rose to ")
    for part in ("gradient norm", "DebugUnderflowOverflow", str(tmp_path / "run" / "checkpoints" / "step-000030")):
        assert part in message
    assert "\n" not in message
    assert not (tmp_path / "run" / "model").exists()
    assert watcher.stopped == 1


def test_a_run_skips_bad_batches(tmp_path: Path) -> None:
    """Nothing is left of them, no gradient either: other bad batches end in the same weights."""
    settings, bad = recipe(on_divergence="skip", accumulation=2), range(36, 39)
    runs = []
    for number in (0, 1000):
        with pytest.warns(UserWarning, match=r"The step is skipped\. At step 3"):  # without a progress to tell
            runs.append(train(settings, tmp_path / str(number), data=Data(Text(bad, number))))
    lines, others = (read_metrics(run.folder / "metrics.jsonl") for run in runs)
    assert [line["step"] for line in lines if "skipped" in line] == [*bad]
    assert all("the loss rose to" in lines[step - 1]["skipped"] for step in bad)
    assert lines[34]["lambdas"] == lines[37]["lambdas"] != lines[38]["lambdas"]
    assert [one["loss"] == other["loss"] for one, other in zip(lines, others, strict=True)] == [
        step not in bad for step in range(1, STEPS + 1)
    ]
    assert_equal(*(weights(run.model_folder) for run in runs))


def test_too_many_bad_batches_in_a_row_end_a_run(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match=r"At step 40 the loss rose .*transformers\.debug_utils"):
        train(recipe(on_divergence="skip"), tmp_path / "run", data=Data(Text(range(30, STEPS + 1))), progress=Watcher())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "skipped" in line] == list(range(30, 40))
    # What led to them may be broken weights, which replace no checkpoint from before.
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) < "step-000030"


def test_a_resumed_run_leaves_the_same_out(tmp_path: Path) -> None:
    """The losses before the interruption decide."""
    settings, data = recipe(on_divergence="skip"), Data(Text(range(36, 39)))
    uninterrupted = train(settings, tmp_path / "whole", data=data, progress=Watcher())
    with pytest.raises(TrainingInterrupted):
        train(settings, tmp_path / "halves", data=data, progress=Watcher(interrupt_after=35))
    watcher = Watcher()
    halves = train(settings, tmp_path / "halves", data=data, progress=watcher, resume=True)
    assert len([message for message in watcher.messages if "the loss rose" in message]) == 3
    assert_equal(weights(uninterrupted.model_folder), weights(halves.model_folder))
