"""The table of verdicts: the paper beside what was found, and no case less visible than another."""

import math
from dataclasses import replace
from io import StringIO

from rich.console import Console

from diff_transformer.report import arms_table, verdict_table
from diff_transformer.report.verdicts import format_difference, verdict_text
from diff_transformer.results import Comparison, capture_results

ROW = Comparison(
    name="validation loss",
    arm="diff",
    against="softmax",
    ours=(3.062, 3.0871),
    difference=-0.0251,
    differences=(-0.02, -0.0302),
    interval=(-0.09, -0.0012),
    better="lower",
    unit="nats",
    paper=(3.062, math.nan),
    verdict="reproduced",
)


def printed(table: object) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_every_verdict_has_its_row() -> None:
    contrary = replace(ROW, name="accuracy", group="depth 0 %", better="higher", verdict="contrary", paper=None)
    opened = replace(ROW, name="order spread", verdict="inconclusive", seeds_needed=1234)
    none = replace(ROW, name="throughput", better=None, verdict=None)
    results = capture_results("Table 6", {}, [], "cpu", comparisons=[ROW, contrary, opened, none])
    lines = printed(verdict_table(results)).splitlines()

    def line(name: str) -> str:
        return next(line for line in lines if name in line)

    assert "validation loss (nats) ↓" in line("validation loss")
    assert "3.062 / –" in line("validation loss")
    assert "3.062 / 3.087" in line("validation loss")
    assert "−0.0251 [−0.0900, −0.0012]" in line("validation loss")
    assert "reproduced" in line("validation loss")
    assert "accuracy, depth 0 % (nats) ↑" in line("accuracy")
    assert "contrary" in line("accuracy")
    assert "inconclusive: 80 % power needs 1,234 seeds" in line("order spread")
    assert "nothing claimed" in line("throughput")


def test_what_is_not_known_is_said() -> None:
    one = replace(ROW, differences=(-0.02,), interval=None, verdict="inconclusive")
    assert format_difference(one) == "−0.0251, no interval"
    assert verdict_text(one) == "inconclusive: one seed"
    assert verdict_text(replace(one, differences=(0.0, 0.0))) == "inconclusive"
    diverged = replace(one, difference=math.nan, interval=(math.nan, math.nan))
    assert format_difference(diverged) == "diverged [diverged, diverged]"
    assert format_difference(replace(ROW, difference=12.5, interval=(-1.0, 26.0))) == "+12.5 [−1.0, +26.0]"
    assert format_difference(replace(ROW, difference=0.0, interval=None)) == "+0.000, no interval"


def test_the_arms_and_the_rates_that_were_tried() -> None:
    arm = {"name": "diff", "group": "small", "parameters": 1234567, "shared_parameters": 1234000}
    arms = [{**arm, "learning_rate": 1e-3, "tried": {"0.001": 2.5, "0.01": None}}]
    text = printed(arms_table(capture_results("t", {"arms": arms}, [], "cpu")))
    for part in ("DIFF, small", "1,234,567", "1,234,000", "0.001: 2.500, 0.01: diverged"):
        assert part in text
