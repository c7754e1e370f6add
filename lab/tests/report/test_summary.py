"""The beginning of a report says what each experiment found, whichever variant is ahead."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.learning import ACCURACY_CURVE, judge
from diff_lab.record import Baseline, Headline, Result
from diff_lab.report.findings import ExperimentResults, certainty, findings
from diff_lab.statistics import compare
from made_up_results import made_up, trained

CLAIM = "DIFF is better than the Transformer"
FLAT = (0.9, 0.9, 0.9)
HEADLINE = Headline(name="x", claim=CLAIM)


def found(
    differences: Sequence[float],
    *,
    name: str = "recall",
    headline: Headline | None = HEADLINE,
    curves: dict[str, Sequence[float]] | None = None,
    chance: float | None = None,
) -> ExperimentResults:
    """A comparison in "x", better when higher, with so large differences by seed; the curves are those of each seed."""
    records = []
    for seed, difference in enumerate(differences):
        for variant, value in (("diff", 0.5 + difference), ("softmax", 0.5)):
            shared: dict[str, Any] = {"variant": variant, "seed": seed}
            records.append(Result(name="x", value=value, better="higher", **shared))
            for number, height in enumerate((curves or {}).get(variant, ()), start=1):
                step = Coordinates(step=100 * number)
                records.append(Result(name=ACCURACY_CURVE, value=height, better="higher", coordinates=step, **shared))
    rows = [compare(records, "x", "diff", "softmax", quality=True)]
    file = made_up(name, records, rows, trained("diff", "softmax", parameters=12_345, diverged=[]))
    levels = () if chance is None else (Baseline(name="x", chance=chance, floor=chance, steps=300),)
    return ExperimentResults(name, "cpu", judge(replace(file, headline=headline, baselines=levels)))


WON, LOST, OPEN = (0.2, 0.21, 0.19), (-0.2, -0.21, -0.19), (0.2, -0.21, 0.19)


RISING = {"diff": (0.1, 0.5, 0.9), "softmax": FLAT}


@pytest.mark.parametrize(
    ("results", "is_decided", "sentence"),
    [
        (found(WON), True, f"{CLAIM}: 0.700 against 0.500, +0.200 [+0.175, +0.225] (3 seeds)."),
        (found(LOST), True, f"{CLAIM}: 0.300 against 0.500, −0.200 [−0.225, −0.175] (3 seeds)."),
        (found(OPEN), False, " seeds would find such a difference in 80 % of repetitions)."),
        (found(WON[:1]), False, "+0.200, no interval (one seed)."),
        (found(WON, curves=RISING), True, "[+0.175, +0.225] (3 seeds; DIFF still training at 300 steps)."),
        (found(WON, chance=0.6), True, "(3 seeds; the Transformer is not shown to be above the floor at 300 steps)."),
    ],
)
def test_what_is_decided_is_what_the_interval_says(results: ExperimentResults, is_decided: bool, sentence: str) -> None:
    """Training that went on is a remark, and chance as well: neither hides a difference, whoever is ahead."""
    (finding,) = findings([results])
    assert finding.is_decided == is_decided
    assert finding.sentence.endswith(sentence)


def test_differences_come_by_their_p_and_the_rest_in_its_order() -> None:
    """Three comparisons of .2 ± .01 with three seeds have p = .0008, and that of one that holds 0 is not small."""
    results = [
        found(OPEN, name="fig5"),
        found(LOST, name="fig4", curves=RISING),
        found(WON),
        found(OPEN, name="table6"),
    ]
    sure = findings([*results, found((0.2, 0.2001, 0.1999), name="v2")])
    assert [one.results.title for one in sure] == ["V2", "Figure 4", "Recall", "Figure 5", "Table 6"]
    assert [one.p for one in sure[1:3]] == pytest.approx([4 * 0.00083, 4 * 0.00083], rel=0.01)
    assert [one.is_decided for one in sure] == [True, True, True, False, False]


def test_a_comparison_without_a_sentence_is_described() -> None:
    another = Headline(name="x", coordinates=Coordinates(needles=2), claim=CLAIM)
    for headline in (Headline(name="x"), another):
        (finding,) = findings([found(WON, headline=headline)])
        assert finding.sentence.startswith("DIFF has a higher x than the Transformer: 0.700")


def test_how_sure_the_findings_are() -> None:
    results = [found(WON), found(WON[:2], name="fig4")]
    text = certainty(results, findings(results))
    assert "have 12,345 parameters" in text
    assert "2 to 3 seeds" in text
    assert text.endswith("After Holm's correction for these 2, p is below 0.05 for 2.")
    assert certainty([], []) == ""
