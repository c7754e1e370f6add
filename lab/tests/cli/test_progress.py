import io
import itertools
import re

import pytest
from rich.console import Console

from diff_lab.cli import recipe_options
from diff_lab.cli.recipe_options import tokenising_progress
from diff_lab.train import progress
from diff_lab.train.progress import RunProgress


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (progress, recipe_options):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def logged(clock: Clock, seconds: float, first: int, total: int) -> list[str]:
    """The lines of a run that does steps `first` to `total` and takes so many seconds for each."""
    stream = io.StringIO()
    bars = RunProgress(Console(file=stream, width=40))
    bars.start(total, "retrieval · [diff]")
    for step in range(first, total + 1):
        clock.now += seconds
        bars.update(step, 2.0, 12345.6)
    bars.stop()
    assert "\x1b" not in stream.getvalue()
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_at_least_every_minute_with_the_time_left(clock: Clock) -> None:
    lines = logged(clock, seconds=7.0, first=1, total=2_000)
    assert lines[0] == "retrieval · [diff]: step 1 of 2000, loss 2.000, 12,346 tokens/s"
    assert lines[1] == "retrieval · [diff]: step 6 of 2000, loss 2.000, 12,346 tokens/s, 3:52:38 left"
    steps = [int(re.findall(r"step (\d+)", line)[0]) for line in lines]
    assert steps[-1] == 2_000
    assert max(after - before for before, after in itertools.pairwise(steps)) * 7 <= 60
    assert "left" not in lines[-1]


def test_a_log_of_a_short_or_resumed_run(clock: Clock) -> None:
    assert len(logged(clock, seconds=0.01, first=1, total=200)) == 2
    lines = logged(clock, seconds=40.0, first=51, total=100)
    assert len(lines) == 50  # a step is longer than the time between lines
    assert lines[1].endswith("step 52 of 100, loss 2.000, 12,346 tokens/s, 0:32:00 left")


def test_a_log_of_preparing(clock: Clock) -> None:
    stream = io.StringIO()
    with tokenising_progress(Console(file=stream)) as tell:
        for number in range(1, 61):
            tell(number, 1000 * number)
            clock.now += 1
    assert stream.getvalue().splitlines() == [
        "tokenised: 1 documents, 1,000 tokens",
        "tokenised: 31 documents, 31,000 tokens",
    ]


def of_several(bars: RunProgress, clock: Clock) -> None:
    """Two of three runs, at the same time; the first ends."""
    first, second = bars.run("first [red]"), bars.run("second")
    for run in (first, second):
        run.start(2, "recipe")
    for step in (1, 2):
        clock.now += 40
        first.evaluated(step, {"validation/loss": 2.5 + step})
        first.update(step, 3.0 + step, 1000.0)
        second.update(1, 1.0, 10.0)
    for run in (first, second):
        run.tell("1 process (cpu), float32")  # which is told once
    first.stop()
    first.stop()
    second.tell("skips a step")
    second.stop()


def test_a_log_of_several_runs_names_the_run_in_every_line(clock: Clock) -> None:
    stream = io.StringIO()
    of_several(RunProgress(Console(file=stream)), clock)
    assert "\x1b" not in stream.getvalue()
    assert stream.getvalue().splitlines() == [
        "first [red]: step 1 of 2, loss 4.000, 1,000 tokens/s, validation loss 3.500",
        "second: step 1 of 2, loss 1.000, 10 tokens/s",
        "first [red]: step 2 of 2, loss 5.000, 1,000 tokens/s, validation loss 4.500",
        "second: step 1 of 2, loss 1.000, 10 tokens/s",
        "first [red]: 1 process (cpu), float32",
        "second: skips a step",
    ]


def test_a_terminal_shows_several_runs_at_once_and_leaves_a_line_of_each(clock: Clock) -> None:
    stream = io.StringIO()
    of_several(RunProgress(Console(file=stream, force_terminal=True, width=120)), clock)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()  # without colours and movements
    assert "first [red]: step 2 of 2, loss 5.000, 1,000 tokens/s, validation loss 4.500" in shown
    assert "second: skips a step" in shown
    assert any("0/2" in line for line in shown)
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "the cursor is back"
