"""Differences in words."""

import math
from typing import Any

import pytest

from diff_transformer.report.rows import arm_label
from diff_transformer.report.verdicts import format_difference, verdict_table, verdict_text
from diff_transformer.results import Comparison, Interval, ResultsFile


@pytest.mark.parametrize(
    ("difference", "interval", "text"),
    [
        (-0.0214, (-0.0431, 0.0003), "−0.0214 [−0.0431, +0.0003]"),
        (0.5, None, "+0.500, no interval"),
        (-279.2, (-300.0, -250.0), "−279 [−300, −250]"),
        (-1e-9, (-1.5e-9, -5e-10), "−1.00e−09 [−1.50e−09, −5.00e−10]"),
        (math.nan, (math.nan, math.nan), "diverged"),
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
    ],
)
def test_a_verdict_in_words(settings: dict[str, Any], text: str) -> None:
    assert verdict_text(judged(**settings)) == text


def test_the_terminal_says_that_verdicts_are_uncorrected() -> None:
    environment = {"command": "x", "device": "a machine", "versions": {}, "commit": None, "created": "today"}
    table = verdict_table(ResultsFile(title="t", settings={}, records=(), **environment))
    assert "No verdict is corrected for the number of comparisons" in str(table.caption)
