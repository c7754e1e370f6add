import io

from rich.console import Console

from diff_transformer.cli.progress import Bars


def test_a_log_gets_ten_lines_and_no_control_codes() -> None:
    stream = io.StringIO()
    bars = Bars(Console(file=stream, width=40))
    bars.start(200, "retrieval · [diff]")
    for step in range(1, 201):
        bars.update(step, 2.0, 12345.6)
    bars.stop()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "retrieval · [diff]: step 20 of 200, loss 2.000, 12,346 tokens/s"
    assert lines[-1].startswith("retrieval · [diff]: step 200 of 200")
    assert "\x1b" not in stream.getvalue()


def test_a_log_of_a_short_or_resumed_run_has_a_line_for_each_tenth_at_most() -> None:
    stream = io.StringIO()
    bars = Bars(Console(file=stream))
    bars.start(3, "short")
    for step in (1, 2, 3):
        bars.update(step, float("nan"), 1.0)
    bars.stop()
    bars.start(100, "resumed")
    for step in range(51, 101):
        bars.update(step, 1.0, 1.0)
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [f"short: step {step} of 3" for step in (1, 2, 3)]
    assert len(lines) == 3 + 6


def test_a_terminal_gets_one_bar_for_each_run() -> None:
    stream = io.StringIO()
    bars = Bars(Console(file=stream, force_terminal=True, width=120))
    for name in ("first [red]", "second"):
        bars.start(2, name)
        bars.update(1, 3.25, 1000.0)
        bars.update(2, 3.0, 1000.0)
        bars.stop()
        bars.stop()
    text = stream.getvalue()
    assert "first [red]" in text
    assert "second" in text
    assert "2/2" in text
    assert "loss 3.000" in text
