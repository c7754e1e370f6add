"""Runs as their files tell of them, and their curves as characters."""

import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diff_lab.report.run_watch import TerminalPanel, WatchedRun, compact, duration, picture, watched

NOW = 2_000_000_000.0
DOTS = {0x01: (0, 0), 0x02: (0, 1), 0x04: (0, 2), 0x40: (0, 3), 0x08: (1, 0), 0x10: (1, 1), 0x20: (1, 2), 0x80: (1, 3)}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """(name, lines, steps, age in seconds) → the folder of a run."""

    def write(name: str, lines: list[dict[str, Any]], steps: int | None = None, age: float = 0.0) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        recipe = "name: x\n" + (f"train:\n  steps: {steps}\n" if steps else "")
        (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for file in folder.iterdir():
            os.utime(file, (NOW - age, NOW - age))
        return folder

    return write


def drawn(*folders: Path, width: int = 80, height: int = 24) -> list[str]:
    runs = watched(folders)
    for run in runs:
        run.read()
    return picture(runs, width, height, NOW).plain.split("\n")


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """The dots (column, row from the top) of lines whose axis is 9 characters wide."""
    drawn_dots = set()
    for row, line in enumerate(lines):
        for column, letter in enumerate(line[9:]):
            if 0x2800 < ord(letter) < 0x2900:
                drawn_dots |= {
                    (2 * column + x, 4 * row + y) for bit, (x, y) in DOTS.items() if ord(letter) - 0x2800 & bit
                }
    return drawn_dots


def test_a_panel_of_ones_own_has_limits_and_levels_over_all_steps(write: Callable[..., Path]) -> None:
    """One panel of 11 lines: from 1 at the top to 0 at the bottom, .1 to a line."""
    run = WatchedRun(write("run", [{"step": step, "score": 0.5} for step in (10, 50)], 200), "run")
    run.read()
    panel = TerminalPanel("score", "score", limits=(0.0, 1.0), levels=(("floor", 0.5), ("elimination", 0.3)))
    *_, heading = drawn_panel = picture([run], 80, 14, NOW, [panel], to_the_end=True).plain.split("\n")
    assert heading.strip() == "steps 0 … 200"
    lines = drawn_panel[2:13]
    assert [line[:9].strip(" │") for line in lines] == ["1", *[""] * 4, "floor", "", "eliminat", "", "", "0"]
    assert lines[7][9:] == "╌" * 71
    columns = [column for column, _ in dots(lines)]
    assert [round(200 * end / 141) for end in (min(columns), max(columns))] == [10, 50]
    assert lines[5][9:].count("╌") == 71 - len({column // 2 for column in columns}), "the curve covers its level"


def test_a_line_is_drawn_from_corner_to_corner(write: Callable[..., Path]) -> None:
    """One panel, 71 × 8 characters: 142 dots to the right for the steps, 32 upwards for the numbers."""
    rising = write("run", [{"step": step, "loss": 1.0 + step} for step in range(1, 144)], 143)
    heading, title, *curve, steps = drawn(rising, width=80, height=11)
    assert heading == "run: running · step 143 of 143"
    assert title.rstrip() == "loss (o: validation) 144"
    assert steps == "         steps 1 … 143"
    assert [line[:9] for line in curve] == ["     144│", *["        │"] * 6, "       2│"]
    drawn_dots = dots(curve)
    assert {column for column, _ in drawn_dots} == set(range(142))
    assert all(abs((1 - column / 141) * 31 - row) <= 1 for column, row in drawn_dots)
    assert (0, 31) in drawn_dots
    assert (141, 0) in drawn_dots


def test_numbers_that_fall_together(write: Callable[..., Path]) -> None:
    """Of very many numbers the mean is drawn, and of what warns of instability the largest."""
    lines = [{"step": step, "loss": float(step % 2), "logit_max": [float(step == 5000)]} for step in range(1, 10001)]
    lines[0]["loss"], lines[-1]["loss"] = 1.0, 0.0
    picture = drawn(write("run", lines), width=80, height=12)
    loss, logits = [line[:39] for line in picture[2:11]], [line[41:] for line in picture[2:11]]
    assert {row for _, row in dots(loss)} <= {17, 18}  # the middle of 36
    assert 0 in {row for _, row in dots(logits)}


def test_what_is_not_finite_is_a_gap_and_said(write: Callable[..., Path]) -> None:
    lines = [{"step": step, "loss": None if 4 <= step <= 7 else 2.0, "logit_max": [1.0, None]} for step in range(1, 10)]
    picture = drawn(write("run", [*lines, {"step": 10, "loss": None}]), width=80, height=8)
    loss = [line[:39] for line in picture[2:7]]
    columns = {column for column, _ in dots(loss)}
    assert columns
    assert not columns & set(range(24, 40))
    assert "loss (o: validation) not finite" in picture[1]
    assert "largest logit 1 | not finite" in picture[1]


def test_layers_without_a_finite_number_have_no_panel(write: Callable[..., Path]) -> None:
    lines = [{"step": step, "loss": 2.0, "logit_max": [None, None]} for step in (1, 2)]
    assert "largest logit" not in "\n".join(drawn(write("run", lines)))


def test_a_flat_curve_and_a_single_number(write: Callable[..., Path]) -> None:
    flat = drawn(write("flat", [{"step": step, "loss": 3.0} for step in (1, 2)]), height=8)
    assert {row for _, row in dots(flat[2:7])} == {10}
    assert len(dots(drawn(write("one", [{"step": 5, "loss": 3.0}]), height=8)[2:7])) == 1


def everything(layers: int = 3, **more: Any) -> list[dict[str, Any]]:
    names = ("lambdas", "norm_input_rms", "logit_max", "hidden_rms")
    scalars = {"loss": 3.0, "grad_norm": 1.0, "learning_rate": 3e-4, "tokens_per_second": 12345.0}
    lists = {name: [layer + 1.0 for layer in range(layers)] for name in names}
    return [{"step": step, "seconds": step * 60.0, **scalars, **lists, **more} for step in (1, 2, 3)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (60, 70), (30, 6), (9, 3), (1, 1)])
def test_a_picture_fits(width: int, height: int, write: Callable[..., Path]) -> None:
    lines = drawn(write("run", everything()), write("twin", everything(5)), width=width, height=height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_all_panels_have_room_in_an_ordinary_terminal(write: Callable[..., Path]) -> None:
    for size in ((80, 23), (160, 49)):
        text = "\n".join(drawn(write("run", everything()), width=size[0], height=size[1]))
        for title in ("loss", "gradient", "learning rate", "tokens/s", "λ", "norm input", "largest logit", "residual"):
            assert title in text


def test_the_heading(write: Callable[..., Path]) -> None:
    more = {"mfu": 0.3824, "memory": 3 << 30}
    run = write("run", [{**line, **more} for line in everything()], 1234567)
    heading = drawn(run, width=200)[0]
    assert heading == "run: running · step 3 of 1,234,567 · 857 d 8 h left · 12.3k tokens/s · MFU 38.2 % · 3 GiB"
    assert " · ".join(line.removeprefix("  · ") for line in drawn(run, width=40)[:3]) == heading
    run = write("other", [{"step": 3, "loss": 1.0}])
    assert drawn(run)[0] == "other: running · step 3"


def test_how_a_run_stands(write: Callable[..., Path]) -> None:
    """By silence, which is longer where lines are far apart; and by the model, which is written at the end."""
    assert "run: running" in drawn(write("run", everything(), age=299))[0]
    assert "run: no news for 5 min, stopped?" in drawn(write("run", everything(), age=301))[0]
    quick = [{**line, "seconds": line["step"]} for line in everything()]
    assert "quick: running" in drawn(write("quick", quick, age=59))[0]
    assert "quick: no news for 1 min" in drawn(write("quick", quick, age=61))[0]
    folder = write("run", everything(), 3, age=1e6)
    (folder / "model").mkdir()
    assert drawn(folder)[0].startswith("run: finished · step 3 of 3 · 12.3k")


def test_twins_have_numbers_at_the_ends_of_their_curves(write: Callable[..., Path]) -> None:
    runs = [
        write(name, [{"step": step, "loss": slope * step, "lambdas": None} for step in (0, 1)])
        for name, slope in (("down", -1.0), ("up", 1.0), ("on", 1.0))
    ]
    one, two, three, title, *curve, _ = drawn(*runs, height=12)
    assert [line.split(":")[0] for line in (one, two, three)] == ["1 down", "2 up", "3 on"]
    assert title.rstrip() == "loss (o: validation) -1 | 1 | 1"
    assert curve[0].rstrip().endswith("23")
    assert curve[-1].rstrip().endswith("1")


def test_layers_have_numbers(write: Callable[..., Path]) -> None:
    lines = [{"step": step, "loss": 1.0, "logit_max": [layer + 1.0 for layer in range(9)]} for step in (0, 1)]
    picture = drawn(write("run", lines), height=12)
    assert [line[79] for line in picture[2:11]] == list("987654321")
    assert "largest logit 1 … 9" in picture[1]


def test_validation_is_drawn_as_points(write: Callable[..., Path]) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1.0} for step in range(10)]
    for step in (0, 9):
        lines[step]["validation/loss"] = 2.0
    _, _, *curve, _ = drawn(write("run", lines), height=8)
    assert [line.count("o") for line in curve] == [2, 0, 0, 0, 0]


def test_colours_only_where_there_are_any(write: Callable[..., Path]) -> None:
    (run,) = watched([write("run", everything())])
    run.read()
    for terminal, colours in ((False, "auto"), (True, "truecolor")):
        out = io.StringIO()
        Console(file=out, width=80, force_terminal=terminal, color_system=colours).print(picture([run], 80, 24, NOW))
        assert ("\x1b[" in out.getvalue()) == terminal
        assert ("38;2;86;180;233" in out.getvalue()) == terminal  # layer 1
        assert ("38;2;230;159;0" in out.getvalue()) == terminal  # the last one


def test_nothing_logged_yet(write: Callable[..., Path]) -> None:
    folder = write("run", [], 10)
    (folder / "metrics.jsonl").unlink()
    assert drawn(folder) == ["run: running · nothing has been logged yet"]


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def test_a_growing_file_is_read_on(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is parsed once, and not before it is whole."""
    folder = write("run", [{"step": 1}, {"step": 2}], 10)
    run, parsed = WatchedRun(folder, "run"), []
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or parse(text))
    for text, steps in (("", [1, 2]), ('{"step": 3', [1, 2]), ("}\n", [1, 2, 3]), ("", [1, 2, 3])):
        append(folder, text)
        run.read()
        assert [line["step"] for line in run.lines] == steps
    assert len(parsed) == 3


def test_a_file_that_was_cut_is_read_again(write: Callable[..., Path]) -> None:
    """As a resumption does; also where it has become longer than it was."""
    folder = write("run", [{"step": step, "loss": 1} for step in (1, 2, 3)], 10)
    run = WatchedRun(folder, "run")
    run.read()
    for steps in ((1, 2), (1, 2, 4, 5, 6, 7), (1,)):
        write("run", [{"step": step, "loss": 2} for step in steps], 10)
        run.read()
        assert run.lines == [{"step": step, "loss": 2} for step in steps]
    (folder / "metrics.jsonl").unlink()
    run.read()
    assert run.lines == []


def test_a_broken_line_is_named(write: Callable[..., Path]) -> None:
    folder = write("run", [{"step": 1}], 10)
    append(folder, "nonsense\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
        WatchedRun(folder, "run").read()


@pytest.mark.parametrize("recipe", [None, "", "train: {steps", "train:\n  steps: many", "- 1", "\0\1"])
def test_a_recipe_that_says_nothing_of_steps(recipe: str | None, write: Callable[..., Path]) -> None:
    folder = write("run", [{"step": 1, "loss": 1.0}], 10)
    (folder / "recipe.yaml").unlink()
    if recipe is not None:
        (folder / "recipe.yaml").write_text(recipe)
    run = WatchedRun(folder, "run")
    run.read()
    assert run.steps is None


def test_what_is_watched(write: Callable[..., Path], tmp_path: Path) -> None:
    folders = [write("language-diff", [{"step": 1}]), write("language-softmax", [])]
    assert [run.folder for run in watched([tmp_path])] == folders  # a demo's
    with pytest.raises(FileNotFoundError, match="missing does not exist"):
        watched([tmp_path / "missing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is not a run folder"):
        watched([tmp_path / "empty"])
    with pytest.raises(ValueError, match="can be watched once"):
        watched([folders[0], folders[0]])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3661, "1 h 1 min"), (47 * 3600, "47 h 0 min"), (200000, "2 d 7 h")],
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_numbers_are_short() -> None:
    spoken = {
        0.0: "0",
        0.5: "0.5",
        3e-4: "3.0e-04",
        1234.4: "1234",
        12345.0: "12.3k",
        1.5e9: "1.5G",
        999.9: "1000",
        999_950.0: "1M",
        2e11: "200G",
    }
    assert {value: compact(value) for value in spoken} == spoken
    for exponent in range(-12, 13):
        for value in (math.pi * 10.0**exponent, -math.pi * 10.0**exponent):
            text = compact(value)
            assert len(text) <= 8
            number = float(text.translate(str.maketrans({"k": "e3", "M": "e6", "G": "e9"})))
            assert number == pytest.approx(value, rel=0.05)
