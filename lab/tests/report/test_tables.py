"""Tables of single measurements: every record with its interval, and no verdict."""

import math
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.record import Baseline, Result, ResultsFile
from diff_lab.report.tables import demo_table, measure_table, rows_of
from diff_lab.report.wording import format_number, format_result
from diff_lab.results_files import capture_results
from table_cells import column


def pair(
    diff: float,
    softmax: float,
    *,
    better: str | None = "higher",
    intervals: tuple | None = None,
    name: str = "task/measure",
    coordinates: Coordinates = NO_COORDINATES,
    seed: int | None = 0,
) -> list[Result]:
    low, high = intervals or (None, None)
    common = {"name": name, "coordinates": coordinates, "seed": seed, "better": better}
    return [
        Result(variant="diff", value=diff, interval=low, **common),
        Result(variant="softmax", value=softmax, interval=high, **common),
    ]


def results_file(*records: Result) -> ResultsFile:
    return replace(capture_results("[red]title[/red]", {}, records, "cpu"), device="[bold]cpu")


def test_records_pair_by_measure_and_seed() -> None:
    rows = rows_of([*pair(1, 2, seed=0), *pair(3, 4, seed=1)])
    assert [[result.value for (result,) in row.results.values()] for row in rows] == [[1, 2], [3, 4]]
    assert [row.label for row in rows] == ["measure ↑, seed 0", "measure ↑, seed 1"]


def test_a_line_sums_up_its_places() -> None:
    first, second = Coordinates(part="a"), Coordinates(part="b")
    variants = ["diff", "softmax"]
    (row,) = rows_of([*pair(0.5, 0.2, coordinates=first), *pair(0.7, 0.1, coordinates=second)])
    assert row.texts(variants) == ["0.500 … 0.700", "0.100 … 0.200"]
    one_each = [pair(0.5, 0.2, coordinates=first)[0], pair(0.5, 0.2, coordinates=second)[1]]
    (row,) = rows_of(one_each)
    assert row.texts([*variants, "dex"]) == ["0.500", "0.200", "–"]


def test_single_measurements_get_no_verdict() -> None:
    """However far apart their intervals are: they say nothing of other seeds."""
    apart = ((0.4, 0.6), (0.1, 0.3))
    for better in ("higher", "lower"):
        table = demo_table(results_file(*pair(0.5, 0.2, intervals=apart, better=better)))
        assert table.head == ("Measure", "DIFF", "Transformer")
        assert list(table.rows[1])[1:] == ["0.500 [0.400, 0.600]", "0.200 [0.100, 0.300]"]
        assert "paired seeds" in table.caption
    assert "paired seeds" not in demo_table(results_file(*pair(0.5, 0.2)[:1])).caption


def test_chance_and_floor_stand_behind_the_label_of_an_accuracy() -> None:
    levels = {"chance": 0.25, "floor": 0.25, "steps": 1}
    known = [
        Baseline(name="task/accuracy", **(levels | {"floor": 0.5, "by_elimination": 0.75})),
        Baseline(name="task/guess", **levels),
        Baseline(name="task/variance", is_accuracy=False, **levels),
    ]
    records = [record for name in ("accuracy", "guess", "variance") for record in pair(0.5, 0.2, name=f"task/{name}")]
    table = demo_table(replace(results_file(*records), baselines=tuple(known)))
    assert column(table, "Measure") == [
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
        (812825.0, "812,825"),
        (0.00012345, "0.000123"),
        (-1.2e-15, "-1.2e-15"),
        (math.inf, "not known"),
        (-0.0, "0.000"),
    ],
)
def test_numbers_keep_their_telling_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_intervals_keep_the_digits_of_their_value() -> None:
    for value, interval, text in (
        (-0.0, (-0.0004, 0.2), "0.000 [0.000, 0.200]"),
        (1.2e-5, (1.1e-5, 1.3e-5), "1.2e-05 [1.1e-05, 1.3e-05]"),
        (9.98, (9.5, 10.26), "9.980 [9.500, 10.260]"),
        (2000.4, (90.0, 3000.0), "2,000 [90, 3,000]"),
    ):
        assert format_result(Result(name="m", variant="diff", value=value, interval=interval)) == text


# --- Every record in a row of its own ---


def printed(*records: Result) -> list[list[str]]:
    """The cells of each line of the table in a terminal, the heads first."""
    stream = StringIO()
    Console(file=stream, width=160).print(measure_table(results_file(*records)))
    text = stream.getvalue()
    assert text.startswith("[red]title[/red]")
    assert "[bold]cpu" in text
    lines = text.replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_a_record_without_all_of_it_and_one_with_a_unit() -> None:
    loss = Result(
        name="repeats/loss", variant="llama", value=2.5, interval=(2.4, 2.6), unit="nats/token", better="lower"
    )
    share = Result(
        name="repeats/share", variant="llama", value=math.nan, n=7, coordinates=Coordinates(part="[b]here[/b]")
    )
    assert printed(loss, share) == [
        ["measure", "part", "llama", "unit", "n"],
        ["repeats/loss ↓", "–", "2.500 [2.400, 2.600]", "nats/token", "–"],
        ["repeats/share", "[b]here[/b]", "not known", "–", "7"],
    ]
    other = Result(name="repeats/loss", variant="softmax", value=1.0, better="lower")
    assert printed(other, loss)[1:] == [
        ["repeats/loss ↓", "Transformer", "1.000", "–"],
        ["repeats/loss ↓", "llama", "2.500 [2.400, 2.600]", "nats/token"],
    ]
