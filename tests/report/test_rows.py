import math
from io import StringIO

import pytest
from rich.console import Console

from diff_transformer.report import demo_table
from diff_transformer.report.rows import Verdict, arms_of, format_number, format_result, lines_of, rows_of
from diff_transformer.results import Baseline, Result, ResultsFile


def pair(
    diff: float,
    softmax: float,
    *,
    better: str | None = "higher",
    intervals: tuple | None = None,
    name: str = "task/measure",
    group: str | None = None,
    seed: int | None = 0,
) -> list[Result]:
    low, high = intervals or (None, None)
    common = {"name": name, "group": group, "seed": seed, "better": better}
    return [
        Result(arm="diff", value=diff, interval=low, **common),
        Result(arm="softmax", value=softmax, interval=high, **common),
    ]


@pytest.mark.parametrize(
    ("records", "verdict"),
    [
        (pair(0.5, 0.2, intervals=((0.4, 0.6), (0.1, 0.3))), Verdict("diff", "DIFF")),
        (pair(0.2, 0.5, intervals=((0.1, 0.3), (0.4, 0.6))), Verdict("softmax", "Transformer")),
        (pair(0.2, 0.5, better="lower", intervals=((0.1, 0.3), (0.4, 0.6))), Verdict("diff", "DIFF")),
        (pair(0.5, 0.2, better="lower", intervals=((0.4, 0.6), (0.1, 0.3))), Verdict("softmax", "Transformer")),
        (pair(0.5, 0.2, intervals=((0.3, 0.6), (0.1, 0.3))), Verdict(None, "no clear difference")),
        (pair(0.5, 0.2, intervals=((0.1, 0.9), (0.2, 0.2))), Verdict(None, "no clear difference")),
        (pair(0.5, 0.2), Verdict(None, "DIFF, no interval")),
        (pair(0.2, 0.2), Verdict(None, "equal")),
        (pair(0.5, 0.2, better=None), Verdict(None, "–")),
        (pair(math.nan, 0.2), Verdict(None, "not comparable")),
        (pair(0.5, 0.2)[:1], Verdict(None, "–")),
    ],
)
def test_the_verdict_names_who_is_better_and_favours_neither(records: list[Result], verdict: Verdict) -> None:
    (row,) = rows_of(records)
    assert row.verdict() == verdict
    (mirrored,) = rows_of(records[::-1])
    assert mirrored.verdict() == verdict


def test_records_pair_by_measure_group_and_seed() -> None:
    records = [*pair(1, 2, seed=0), *pair(3, 4, seed=1), *pair(5, 6, group="0–50 %"), *pair(7, 8, group="50–100 %")]
    rows = rows_of(records)
    assert [[result.value for result in row.cells.values()] for row in rows] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [row.label for row in rows] == ["measure ↑, seed 0", "measure ↑, seed 1", "measure ↑", "measure ↑"]
    assert [row.group for row in rows] == [None, None, "0–50 %", "50–100 %"]


def test_arms_come_in_a_fixed_order_and_unknown_ones_last() -> None:
    records = [Result(name="m", arm=arm, value=1.0) for arm in ("softmax", "mine", "diff")]
    assert arms_of(records) == ["diff", "softmax", "mine"]


def test_a_line_sums_up_its_groups() -> None:
    clear, unclear = ((0.4, 0.6), (0.1, 0.3)), ((0.1, 0.9), (0.1, 0.9))
    same = [*pair(0.5, 0.2, intervals=clear, group="a"), *pair(0.7, 0.1, intervals=clear, group="b")]
    (line,) = lines_of(same)
    assert line.cells == {"diff": "0.500 … 0.700", "softmax": "0.100 … 0.200"}
    assert line.verdict == Verdict("diff", "DIFF (all 2)")
    (line,) = lines_of([*same, *pair(0.5, 0.4, intervals=unclear, group="c")])
    assert line.verdict == Verdict(None, "DIFF (2 of 3), no clear difference (1 of 3)")
    one_each = [pair(0.5, 0.2, group="a")[0], pair(0.5, 0.2, group="b")[1]]
    (line,) = lines_of(one_each)
    assert line.cells == {"diff": "0.500", "softmax": "0.200"}
    assert line.verdict.arm is None


def test_chance_and_floor_stand_behind_the_label_of_an_accuracy() -> None:
    levels = {"group": None, "chance": 0.25, "floor": 0.25, "steps": 1}
    known = [
        Baseline(name="task/accuracy", **(levels | {"floor": 0.5, "by_elimination": 0.75})),
        Baseline(name="task/guess", **levels),
        Baseline(name="task/variance", is_accuracy=False, **levels),
    ]
    records = [record for name in ("accuracy", "guess", "variance") for record in pair(0.5, 0.2, name=f"task/{name}")]
    assert [line.label for line in lines_of(records, known)] == [
        "accuracy ↑ (chance 0.250, floor 0.500, by elimination 0.750)",
        "guess ↑ (chance 0.250)",
        "variance ↑",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.54721, "0.547"),
        (-0.0214, "-0.021"),
        (14.25, "14.2"),
        (143.2, "143"),
        (812825.0, "812,825"),
        (0.00012345, "0.000123"),
        (-1.2e-15, "-1.2e-15"),
        (math.inf, "not known"),
        (-0.0, "0.000"),
        (0.0, "0.000"),
        (-10.0, "-10.0"),
    ],
)
def test_numbers_keep_their_telling_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(("value", "digits", "text"), [(-0.0004, 3, "0.000"), (-0.4, 0, "0"), (-0.0006, 3, "-0.001")])
def test_what_is_rounded_to_nothing_has_no_sign(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_intervals_keep_the_digits_of_their_value() -> None:
    assert format_result(Result(name="m", arm="diff", value=-0.0, interval=(-0.0004, 0.2))) == "0.000 [0.000, 0.200]"
    assert format_result(Result(name="m", arm="diff", value=9.98, interval=(9.5, 10.26))) == "9.980 [9.500, 10.260]"
    assert format_result(Result(name="m", arm="diff", value=2000.4, interval=(90, 3000))) == "2,000 [90, 3,000]"


def test_the_terminal_table_shows_every_measure_and_no_markup_of_its_input() -> None:
    records = [
        *pair(0.547, 0.254, name="retrieval/accuracy"),
        *pair(2.1, 2.0, name="language/bits_per_byte", better="lower"),
    ]
    results = ResultsFile(
        title="[red]title[/red]",
        command="demo",
        device="[bold]cpu",
        versions={},
        commit=None,
        created="now",
        settings={},
        records=tuple(records),
    )
    stream = StringIO()
    Console(file=stream, width=120).print(demo_table(results))
    text = stream.getvalue()
    assert "[red]title[/red]" in text
    assert "[bold]cpu" in text
    assert "\x1b" not in text
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:5]]
        for line in text.splitlines()
        if len(cells := line.split("│")) > 4
    }
    assert rows["accuracy ↑"] == ["0.547", "0.254", "DIFF, no interval"]
    assert rows["bits per byte ↓"] == ["2.100", "2.000", "Transformer, no interval"]
    assert list(rows)[:2] == ["retrieval", "accuracy ↑"]
