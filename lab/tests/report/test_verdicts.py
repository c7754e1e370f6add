"""Differences in words."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Comparison, Interval
from diff_lab.report.documents import Table
from diff_lab.report.tables import verdict_table
from diff_lab.report.wording import (
    format_difference,
    level_cells,
    missing_word,
    verdict_text,
)
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
        ({"verdict": "reproduced", "exploratory": True}, "open question: yes"),
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


def trained(name: str, millions: int | None = None, diverged: tuple[int, ...] = ()) -> dict[str, Any]:
    size = {} if millions is None else {"parameters": millions * 1_000_000}
    return {"name": name, "coordinates": size, "diverged": list(diverged)}


@pytest.mark.parametrize(
    ("settings", "variants", "word"),
    [
        ({}, [], "not known"),
        ({}, [trained("diff"), trained("softmax")], "not known"),
        ({}, [trained("diff"), trained("softmax", diverged=(1,))], "diverged"),
        ({}, [trained("diff"), trained("softmax"), trained("diff_v2", diverged=(0,))], "not known"),
        ({"coordinates": Coordinates(depth=0.0)}, [trained("diff", diverged=(2,)), trained("softmax")], "diverged"),
        (
            {"coordinates": Coordinates(parameters=1_000_000)},
            [trained("diff", 1, (0,)), trained("diff", 2)],
            "diverged",
        ),
        (
            {"coordinates": Coordinates(parameters=2_000_000)},
            [trained("diff", 1, (0,)), trained("diff", 2)],
            "not known",
        ),
        ({}, [trained("diff", 1, (0,)), trained("diff", 2)], "diverged"),
        ({"reason": "the fits do not meet"}, [trained("diff", diverged=(1,))], "not known"),
    ],
)
def test_what_is_missing_diverged_only_where_a_run_of_its_variants_did(
    settings: dict[str, Any], variants: list[dict[str, Any]], word: str
) -> None:
    assert missing_word(judged(verdict="inconclusive", **settings), variants) == word


def terminal_table(*rows: Comparison, variants: Sequence[dict[str, Any]] = ()) -> Table:
    return verdict_table(capture_results("t", {"variants": list(variants)}, [], "cpu", comparisons=rows))


def test_the_terminal_tells_what_diverged_from_what_is_not_known() -> None:
    nothing = {"ours": (math.nan, 1.0), "difference": math.nan, "verdict": "inconclusive"}
    variants = [trained("diff"), trained("softmax", diverged=(1,)), trained("other")]
    table = terminal_table(judged(**nothing), judged(**nothing, against="other"), variants=variants)
    assert column(table, "Here") == ["diverged / 1.000", "not known / 1.000"]
    assert column(table, "Difference") == ["diverged", "not known"]
    assert "No verdict is corrected for the number of comparisons" in table.caption


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
    assert ("A variant is still training when" in terminal_table(row).caption) == row.quality


def test_chance_and_floor_stand_beside_accuracies_alone() -> None:
    row = judged(verdict="reproduced", baseline=LEVELS)
    assert level_cells(row) == ("0.062", "0.531; 0.766 by elimination")
    assert column(terminal_table(row), "Chance / floor") == ["0.062 / 0.531; 0.766 by elimination"]
    assert "at chance" in terminal_table(row).caption
    variance = judged(verdict="reproduced", baseline=replace(LEVELS, is_accuracy=False))
    for unlevelled in (judged(verdict="reproduced"), variance):
        assert "Chance / floor" not in terminal_table(unlevelled).head
