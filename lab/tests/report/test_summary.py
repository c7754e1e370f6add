"""The beginning of a report says what each experiment found, whichever variant is ahead."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, judge
from diff_lab.record import Baseline, Headline, Result, ResultsFile
from diff_lab.report.findings import (
    ExperimentResults,
    certainty,
    findings,
    learning_sentences,
    loss_sentences,
)
from diff_lab.report.tables import findings_table
from diff_lab.results_files import capture_results
from diff_lab.statistics import compare

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
    variants = [
        {"name": variant, "coordinates": {}, "parameters": 12_345, "learning_rate": 1e-3}
        for variant in ("diff", "softmax")
    ]
    for one in variants:
        one |= {"shared_parameters": 9, "tried": {}, "diverged": []}
    settings = {"request": {"experiment": name, "preset": "cpu"}, "variants": variants}
    rows = [compare(records, "x", "diff", "softmax", quality=True)]
    file: ResultsFile = capture_results("t", settings, records, "cpu", comparisons=rows)
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
    assert len(findings_table([finding]).rows) == is_decided


def test_the_table_has_every_difference_by_its_p_and_the_rest_comes_in_its_order() -> None:
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
    rows = [[cell.text for cell in row] for row in findings_table(sure).rows]
    assert [row[0] for row in rows] == ["V2", "Figure 4", "Recall"]
    assert rows[1][1:] == [
        CLAIM,
        "no",
        "0.300 against 0.500, −0.200 [−0.225, −0.175]",
        "0.003",
        "3",
        "DIFF still training at 300 steps",
    ]


def test_a_comparison_without_a_sentence_is_described() -> None:
    another = Headline(name="x", coordinates=Coordinates(needles=2), claim=CLAIM)
    for headline in (Headline(name="x"), another):
        (finding,) = findings([found(WON, headline=headline)])
        assert finding.sentence.startswith("DIFF has a higher x than the Transformer: 0.700")


def test_what_no_comparison_stands_for_is_left_out() -> None:
    assert findings([found(WON, headline=None)]) == []


def test_how_sure_the_findings_are() -> None:
    results = [found(WON), found(WON[:2], name="fig4")]
    text = certainty(results, findings(results))
    assert "12,345 parameters" in text
    assert "2 to 3 seeds" in text
    assert text.endswith("After Holm's correction for these 2, 2 have a p below 0.05.")
    assert "Holm" not in certainty(results[:1], findings(results[:1]))
    assert certainty([], []) == ""


# --- The demo: one seed, whichever variant is ahead ---

LEVELS = [Baseline(name=ACCURACY_CURVE, chance=0.06, floor=0.34, steps=400)]


def demo_curves(name: str, diff: Sequence[float], softmax: Sequence[float]) -> list[Result]:
    """Both curves, with a validation every 100 steps."""
    return [
        Result(name=name, variant=variant, value=value, seed=0, coordinates=Coordinates(step=100 * number))
        for variant, values in (("softmax", softmax), ("diff", diff))
        for number, value in enumerate(values, 1)
    ]


SOON, LATER = (0.5, 0.7, 0.9, 0.94), (0.3, 0.4, 0.6, 0.96)


@pytest.mark.parametrize(
    ("diff", "softmax", "said"),
    [
        (
            SOON,
            LATER,
            [
                "DIFF reaches 50 % after 100 steps, the Transformer after 250 (2.5 times as many).",
                "DIFF reaches 90 % after 300 steps, the Transformer after 383 (1.3 times as many).",
                "At the end the Transformer is ahead: DIFF has 94.0 % and the Transformer 96.0 %.",
            ],
        ),
        (
            LATER,
            SOON,
            [
                "The Transformer reaches 50 % after 100 steps, DIFF after 250 (2.5 times as many).",
                "The Transformer reaches 90 % after 300 steps, DIFF after 383 (1.3 times as many).",
                "At the end DIFF is ahead: DIFF has 96.0 % and the Transformer 94.0 %.",
            ],
        ),
        (
            (0.3, 0.4, 0.4, 0.6),
            (0.3, 0.3, 0.3, 0.35),
            [
                "DIFF reaches 50 % after 350 steps; the Transformer does not within 400.",
                "At the end DIFF is ahead: DIFF has 60.0 % and the Transformer 35.0 %.",
            ],
        ),
        (
            (0.1, 0.2, 0.3, 0.3),
            (0.1, 0.2, 0.3, 0.305),
            [
                "Neither reaches 50 % within 400 steps.",
                "At the end they are equal within a point: DIFF has 30.0 % and the Transformer 30.5 %.",
            ],
        ),
        (
            (0.4, 0.6, 0.8, 0.8),
            (0.4, 0.6, 0.6, 0.6),
            [
                "Both reach 50 % after 150 steps.",
                "DIFF reaches 70 % after 250 steps; the Transformer does not within 400.",
                "At the end DIFF is ahead: DIFF has 80.0 % and the Transformer 60.0 %.",
            ],
        ),
    ],
    ids=["crossed", "the other way round", "one alone", "neither", "both at once"],
)
def test_sentences_on_learning(diff: Sequence[float], softmax: Sequence[float], said: list[str]) -> None:
    assert learning_sentences(demo_curves(ACCURACY_CURVE, diff, softmax), LEVELS) == said


def test_sentences_on_losses_say_who_is_behind() -> None:
    records = demo_curves(LOSS_CURVE, (6.0, 5.0, 4.52), (5.5, 4.9, 4.515))
    assert loss_sentences(records, 2048) == [
        "After 100 steps (0.2 million tokens), DIFF's validation loss is 0.50 nats above that of the Transformer.",
        "At the end, after 300 steps (0.61 million tokens), DIFF's validation loss equals that of the Transformer "
        "within 0.01 nats.",
    ]
    records = demo_curves(LOSS_CURVE, (6.0, 4.0), (6.0, 4.25))
    assert loss_sentences(records)[1].endswith(
        "after 200 steps, DIFF's validation loss is 0.25 nats below that of the Transformer."
    )
    assert loss_sentences(demo_curves(LOSS_CURVE, (), ())) == []
    assert loss_sentences(demo_curves(LOSS_CURVE, (float("nan"),), (4.0,))) == []
