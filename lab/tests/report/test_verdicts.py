"""Differences in words."""

import math
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.record import Baseline, Comparison, Interval
from diff_lab.report.documents import Table
from diff_lab.report.tables import verdict_table
from diff_lab.report.wording import format_difference, level_cells, verdict_text
from diff_lab.results_files import capture_results
from table_cells import column


@pytest.mark.parametrize(
    ("difference", "interval", "text"),
    [
        (-0.0214, (-0.0431, 0.0003), "−0.0214 [−0.0431, +0.0003]"),
        (0.5, None, "+0.500, no interval"),
        (-279.2, (-300.0, -250.0), "−279 [−300, −250]"),
        (-1e-9, (-1.5e-9, -5e-10), "−1.00e−09 [−1.50e−09, −5.00e−10]"),
        (math.nan, (math.nan, math.nan), "not known"),
        (0.0, (0.0, 0.0), "+0.000 [+0.000, +0.000]"),
    ],
)
def test_a_difference_has_the_decimals_that_tell_it(difference: float, interval: Interval | None, text: str) -> None:
    row = Comparison(name="a", variant="diff", against="softmax", ours=(1, 1), difference=difference, interval=interval)
    assert format_difference(row) == text


def judged(**settings: Any) -> Comparison:
    return Comparison(
        **{
            "name": "a",
            "variant": "diff",
            "against": "softmax",
            "ours": (1, 1),
            "difference": -1,
            "differences": (-1.0, -1.0),
            "better": "lower",
            **settings,
        }
    )


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"verdict": "contrary"}, "contrary"),
        ({"verdict": "contrary", "exploratory": True}, "open question: no"),
        (
            {"verdict": "inconclusive", "seeds_needed": 1200},
            "inconclusive: 1,200 seeds would find such a difference in 80 % of repetitions",
        ),
        ({"verdict": "inconclusive", "documents_needed": True}, "inconclusive: needs more documents"),
        (
            {"verdict": "inconclusive", "differences": (1.0,), "exploratory": True},
            "open question: inconclusive: one seed",
        ),
        ({"verdict": None, "better": None, "exploratory": True}, "nothing claimed"),
        ({"verdict": "inconclusive", "reason": "the fits do not meet"}, "inconclusive: the fits do not meet"),
    ],
)
def test_a_verdict_in_words(settings: dict[str, Any], text: str) -> None:
    assert verdict_text(judged(**settings)) == text


def terminal_table(*rows: Comparison) -> Table:
    return verdict_table(capture_results("t", {"variants": []}, [], "cpu", comparisons=rows))


LEVELS = Baseline(name="a", chance=0.0625, floor=0.53125, by_elimination=0.765625, steps=1000)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"at_floor": ("softmax",)}, "the Transformer is not shown to be above the floor"),
        (
            {"against": "softmax, half the heads", "at_elimination": ("softmax, half the heads",)},
            "the Transformer, half the heads is not shown to be above elimination",
        ),
        ({"at_floor": ("diff", "softmax")}, "neither is shown to be above the floor"),
        ({"at_elimination": ("diff", "softmax")}, "neither is shown to be above elimination"),
    ],
)
def test_a_verdict_says_who_is_not_above_chance(settings: dict[str, Any], text: str) -> None:
    row = judged(baseline=LEVELS, verdict="not comparable", exploratory=True, **settings)
    assert verdict_text(row) == f"open question: not comparable: {text} at 1,000 steps"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"verdict": "reproduced"}, "reproduced: the Transformer still training at 1,500 steps"),
        (
            {"verdict": "contrary", "exploratory": True, "still_learning": ("diff", "softmax")},
            "open question: no: both still training at 1,500 steps",
        ),
        (
            {"verdict": "inconclusive", "seeds_needed": 9},
            "inconclusive: 9 seeds would find such a difference in 80 % of repetitions; the Transformer still training "
            "at 1,500 steps",
        ),
        ({"verdict": "reproduced", "quality": False}, "reproduced"),
        ({"verdict": None, "better": None}, "nothing claimed"),
    ],
)
def test_a_verdict_says_who_was_still_training(settings: dict[str, Any], text: str) -> None:
    row = judged(**{"steps": 1500, "still_learning": ("softmax",), "quality": True, **settings})
    assert verdict_text(row) == text


def test_chance_and_floor_stand_beside_accuracies_alone() -> None:
    row = judged(verdict="reproduced", baseline=LEVELS)
    assert level_cells(row) == ("0.062", "0.531; 0.766 by elimination")
    assert column(terminal_table(row), "Chance / floor") == ["0.062 / 0.531; 0.766 by elimination"]
    assert "at chance" in terminal_table(row).caption
    variance = judged(verdict="reproduced", baseline=replace(LEVELS, is_accuracy=False))
    for unlevelled in (judged(verdict="reproduced"), variance):
        assert "Chance / floor" not in terminal_table(unlevelled).head
