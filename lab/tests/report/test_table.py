"""The table of `eval --measure`: every record, none folded into another."""

import math
from io import StringIO

import pytest
from rich.console import Console

from diff_lab.coordinates import Coordinates
from diff_lab.record import Result, ResultsFile
from diff_lab.report.measured_tables import measure_table

DEPTHS = [
    Result(
        name="needles/accuracy_by_depth",
        variant="diff",
        value=value,
        interval=(value - 0.1, value + 0.1),
        n=1200,
        coordinates=Coordinates(depth=depth / 100),
        better="higher",
        seed=0,
    )
    for depth, value in ((0, 0.5), (50, 0.75))
]


def printed(*records: Result) -> list[list[str]]:
    """The cells of each line of the table, the heads first."""
    results = ResultsFile(
        title="[red]of a model[/red]",
        command="eval",
        device="[bold]cpu",
        versions={},
        commit=None,
        created="now",
        settings={},
        records=records,
    )
    stream = StringIO()
    Console(file=stream, width=160).print(measure_table(results))
    text = stream.getvalue()
    assert text.startswith("[red]of a model[/red]")
    assert "[bold]cpu" in text
    lines = text.replace("┃", "│").splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_each_depth_has_a_row_with_its_interval() -> None:
    assert printed(*DEPTHS) == [
        ["measure", "part", "DIFF", "n"],
        ["needles/accuracy_by_depth ↑", "depth 0 %", "0.500 [0.400, 0.600]", "1,200"],
        ["needles/accuracy_by_depth ↑", "depth 50 %", "0.750 [0.650, 0.850]", "1,200"],
    ]


def test_a_record_without_all_of_it_and_one_with_a_unit() -> None:
    loss = Result(name="repeats/loss", variant="llama", value=2.5, unit="nats/token", better="lower")
    share = Result(
        name="repeats/share", variant="llama", value=math.nan, n=7, coordinates=Coordinates(part="[b]here[/b]")
    )
    assert printed(loss, share) == [
        ["measure", "part", "llama", "unit", "n"],
        ["repeats/loss ↓", "–", "2.500", "nats/token", "–"],
        ["repeats/share", "[b]here[/b]", "not known", "–", "7"],
    ]


def test_several_variants_are_named() -> None:
    softmax = Result(name="m/loss", variant="softmax", value=1.0)
    assert printed(softmax, Result(name="m/loss", variant="diff", value=2.0)) == [
        ["measure", "variant", "value"],
        ["m/loss", "Transformer", "1.000"],
        ["m/loss", "DIFF", "2.000"],
    ]


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (-0.0, (-0.0, 0.0), "0.000 [0.000, 0.000]"),
        (0.012, (-0.0004, 0.0244), "0.012 [-0.0004, 0.024]"),
        (1.2e-5, (1.1e-5, 1.3e-5), "1.2e-05 [1.1e-05, 1.3e-05]"),
        (105.0, (98.76, 111.0), "105 [98.8, 111]"),
    ],
)
def test_small_numbers_stay_what_they_are(value: float, interval: tuple[float, float], text: str) -> None:
    assert printed(Result(name="m", variant="diff", value=value, interval=interval))[1][1] == text
