"""Differences in words."""

import math
from dataclasses import replace
from typing import Any

import pytest

from diff_transformer.report.experiment_tables import comparison_table
from diff_transformer.report.rows import arm_label
from diff_transformer.report.verdicts import (
    chance_cell,
    floor_cell,
    floor_mark,
    format_difference,
    levels_mark,
    missing_word,
    verdict_table,
    verdict_text,
)
from diff_transformer.results import Baseline, Comparison, Interval, ResultsFile


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
    row = Comparison(name="a", arm="diff", against="softmax", ours=(1, 1), difference=difference, interval=interval)
    assert format_difference(row) == text


def test_a_variant_is_named_after_its_arm() -> None:
    assert arm_label("softmax, half the heads") == "Transformer, half the heads"
    assert arm_label("diff") == "DIFF"
    assert arm_label("a tenfold difference") == "a tenfold difference"


def judged(**settings: Any) -> Comparison:
    return Comparison(
        **{
            "name": "a",
            "arm": "diff",
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
        ({"verdict": "contrary", "claimed_by": "us"}, "our question: no"),
        ({"verdict": "reproduced", "claimed_by": "us"}, "our question: yes"),
        ({"verdict": "inconclusive", "seeds_needed": 1200}, "inconclusive: 80 % power needs 1,200 seeds"),
        ({"verdict": "inconclusive", "documents_needed": True}, "inconclusive: needs more documents"),
        (
            {"verdict": "inconclusive", "differences": (1.0,), "claimed_by": "us"},
            "our question: inconclusive: one seed",
        ),
        ({"verdict": None, "better": None, "claimed_by": "us"}, "nothing claimed"),
        ({"verdict": "inconclusive", "reason": "the fits do not meet"}, "inconclusive: the fits do not meet"),
    ],
)
def test_a_verdict_in_words(settings: dict[str, Any], text: str) -> None:
    assert verdict_text(judged(**settings)) == text


def trained(name: str, group: str | None = None, diverged: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"name": name, "group": group, "diverged": list(diverged)}


@pytest.mark.parametrize(
    ("settings", "arms", "word"),
    [
        ({}, [], "not known"),
        ({}, [trained("diff"), trained("softmax")], "not known"),
        ({}, [trained("diff"), trained("softmax", diverged=(1,))], "diverged"),
        ({}, [trained("diff"), trained("softmax"), trained("diff_v2", diverged=(0,))], "not known"),
        ({"group": "depth 0 %"}, [trained("diff", diverged=(2,)), trained("softmax")], "diverged"),
        ({"group": "1M"}, [trained("diff", "1M", (0,)), trained("diff", "2M")], "diverged"),
        ({"group": "2M"}, [trained("diff", "1M", (0,)), trained("diff", "2M")], "not known"),
        ({}, [trained("diff", "1M", (0,)), trained("diff", "2M")], "diverged"),
        ({"reason": "the fits do not meet"}, [trained("diff", diverged=(1,))], "not known"),
    ],
)
def test_what_is_missing_diverged_only_where_a_run_of_its_arms_did(
    settings: dict[str, Any], arms: list[dict[str, Any]], word: str
) -> None:
    assert missing_word(judged(verdict="inconclusive", **settings), arms) == word


def test_the_terminal_tells_what_diverged_from_what_is_not_known() -> None:
    nothing = {"ours": (math.nan, 1.0), "difference": math.nan, "verdict": "inconclusive"}
    rows = (judged(**nothing), judged(**nothing, against="other"))
    arms = [trained("diff"), trained("softmax", diverged=(1,)), trained("other")]
    environment = {"command": "x", "device": "a machine", "versions": {}, "commit": None, "created": "today"}
    table = verdict_table(ResultsFile(title="t", settings={"arms": arms}, records=(), comparisons=rows, **environment))
    here, difference = (list(table.columns[number].cells) for number in (3, 4))
    assert here == ["diverged / 1.000", "not known / 1.000"]
    assert difference == ["diverged", "not known"]


def test_the_terminal_says_that_verdicts_are_uncorrected() -> None:
    environment = {"command": "x", "device": "a machine", "versions": {}, "commit": None, "created": "today"}
    table = verdict_table(ResultsFile(title="t", settings={}, records=(), **environment))
    assert "No verdict is corrected for the number of comparisons" in str(table.caption)


LEVELS = Baseline(name="a", group=None, chance=0.0625, floor=0.53125, by_elimination=0.765625, steps=1000)


@pytest.mark.parametrize(
    ("settings", "text", "mark"),
    [
        (
            {"verdict": "reproduced", "at_floor": ("softmax",)},
            "reproduced; the Transformer has not begun to learn at 1,000 steps",
            "Transformer at floor",
        ),
        (
            {"verdict": "inconclusive", "seeds_needed": 9, "at_floor": ("diff",)},
            "inconclusive: 80 % power needs 9 seeds; DIFF has not begun to learn at 1,000 steps",
            "DIFF at floor",
        ),
        (
            {
                "verdict": "reproduced",
                "against": "softmax, half the heads",
                "at_elimination": ("softmax, half the heads",),
            },
            "reproduced; the Transformer, half the heads has learned no more than elimination at 1,000 steps",
            "second at floor",
        ),
        (
            {"verdict": "not comparable", "at_floor": ("diff", "softmax"), "claimed_by": "us"},
            "our question: not comparable: neither has begun to learn at 1,000 steps",
            "",
        ),
        (
            {"verdict": "not comparable", "at_elimination": ("diff", "softmax")},
            "not comparable: neither has learned more than elimination at 1,000 steps",
            "",
        ),
        ({"verdict": None, "better": None, "at_floor": ("diff", "softmax")}, "nothing claimed", ""),
    ],
)
def test_a_verdict_says_who_has_not_begun_to_learn(settings: dict[str, Any], text: str, mark: str) -> None:
    row = judged(baseline=LEVELS, **settings)
    assert verdict_text(row) == text
    assert floor_mark(row) == mark


def test_chance_and_floor_stand_beside_accuracies_alone() -> None:
    row = judged(verdict="reproduced", baseline=LEVELS)
    assert (chance_cell(row), floor_cell(row)) == ("0.062", "0.531; 0.766 by elimination")
    assert levels_mark(row) == " (0.06,\N{NO-BREAK SPACE}0.77)"
    head, cells = (list(part) for part in (comparison_table([row]).head, comparison_table([row]).rows[0]))
    assert cells[head.index("Chance")] == "0.062"
    assert cells[head.index("Floor")] == "0.531; 0.766 by elimination"
    for other in (
        judged(verdict="reproduced"),
        judged(verdict="reproduced", baseline=replace(LEVELS, is_accuracy=False)),
    ):
        assert (chance_cell(other), floor_cell(other), levels_mark(other)) == ("–", "–", "")
        assert "Chance" not in comparison_table([other]).head
    environment = {"command": "x", "device": "a machine", "versions": {}, "commit": None, "created": "today"}
    table = verdict_table(ResultsFile(title="t", settings={}, records=(), comparisons=(row,), **environment))
    assert "0.062 / 0.531; 0.766 by elimination" in [cell for column in table.columns for cell in column.cells]
    assert "has not begun to learn" in str(table.caption)
