"""The words at the beginning of a report say what each experiment found, whichever variant is ahead."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, judge
from diff_lab.record import Baseline, Headline, Result, ResultsFile
from diff_lab.report.findings import (
    ExperimentResults,
    certainty,
    corrected,
    learning_sentences,
    loss_sentences,
    summary,
)
from diff_lab.report.pages import build_results_report
from diff_lab.results_files import capture_results, write_json
from diff_lab.statistics import compare

CLAIM = "DIFF is better than the Transformer"
FLAT, EARLY, LATE = (0.9, 0.9, 0.9), (0.6, 0.95, 0.95), (0.2, 0.6, 0.95)
HEADLINE = Headline(name="x", claim=CLAIM)


def found(
    differences: Sequence[float],
    *,
    name: str = "recall",
    headline: Headline | None = HEADLINE,
    curves: dict[str, Sequence[float]] | None = None,
    curve: str = ACCURACY_CURVE,
    at: Coordinates = NO_COORDINATES,
    chance: float | None = None,
    rates: Sequence[float] = (1e-3, 1e-3),
) -> ExperimentResults:
    """A comparison in "x", better when higher, with so large differences by seed; the curves are those of each seed."""
    records = []
    for seed, difference in enumerate(differences):
        for variant, value in (("diff", 0.5 + difference), ("softmax", 0.5)):
            shared: dict[str, Any] = {"variant": variant, "seed": seed}
            records.append(Result(name="x", value=value, better="higher", **shared))
            for number, height in enumerate((curves or {}).get(variant, ()), start=1):
                step = Coordinates(at, step=100 * number)
                better: Any = "higher" if curve == ACCURACY_CURVE else "lower"
                records.append(Result(name=curve, value=height, better=better, coordinates=step, **shared))
    variants = [
        {"name": variant, "coordinates": dict(at), "parameters": 12_345, "learning_rate": rate}
        for variant, rate in zip(("diff", "softmax"), rates, strict=True)
    ]
    for one in variants:
        one |= {"shared_parameters": 9, "tried": {}, "diverged": []}
    settings = {"request": {"experiment": name, "preset": "cpu"}, "variants": variants}
    rows = [compare(records, "x", "diff", "softmax", quality=True)]
    file: ResultsFile = capture_results("t", settings, records, "cpu", comparisons=rows)
    levels = () if chance is None else (Baseline(name="x", chance=chance, floor=chance, steps=300),)
    return ExperimentResults(name, "cpu", judge(replace(file, headline=headline, baselines=levels)))


WON, LOST, OPEN = (0.2, 0.21, 0.19), (-0.2, -0.21, -0.19), (0.2, -0.21, 0.19)


@pytest.mark.parametrize(
    ("results", "title", "words"),
    [
        (found(WON), "Holds", f"{CLAIM}: 0.700 against 0.500, +0.200 [+0.175, +0.225]."),
        (found(LOST), "Does not hold", f"{CLAIM}: 0.300 against 0.500, −0.200 [−0.225, −0.175]."),
        (found(OPEN), "Open: the interval holds 0", " seeds would find such a difference in 80 % of repetitions"),
        (found(WON[:1]), "Open: the interval holds 0, or is not known", "+0.200, no interval (one seed)."),
        (
            found(WON, curves={"diff": (0.1, 0.5, 0.9), "softmax": FLAT}),
            "Open: training ended",
            "+0.200 [+0.175, +0.225] (at 300 steps; DIFF is ahead so far).",
        ),
        (
            found(WON, chance=0.6),
            "Not comparable",
            f"{CLAIM}: 0.700 against 0.500 (the Transformer is not shown to be above the floor at 300 steps).",
        ),
    ],
)
def test_each_verdict_has_its_place(results: ExperimentResults, title: str, words: str) -> None:
    part = summary([results])[0]
    assert part.title.startswith(title)
    assert words in part.findings[0].sentence


def test_all_experiments_are_in_it_in_their_order() -> None:
    parts = summary([found(LOST, name="fig4"), found(WON, name="table2"), found(LOST, name="table6")])
    assert [[one.results.title for one in part.findings] for part in parts] == [["Table 2"], ["Figure 4", "Table 6"]]


def test_a_comparison_without_a_sentence_is_described() -> None:
    another = Headline(name="x", coordinates=Coordinates(needles=2), claim=CLAIM)
    for headline in (Headline(name="x"), another):
        part = summary([found(WON, headline=headline)])[0]
        assert part.findings[0].sentence.startswith("DIFF has a higher x than the Transformer: 0.700")


def test_what_no_comparison_stands_for_is_left_out() -> None:
    assert summary([found(WON, headline=None)]) == []


def test_how_soon_is_told_once_for_shared_runs() -> None:
    curves = {"diff": EARLY, "softmax": LATE}
    parts = summary([found(WON, name="fig5", curves=curves), found(WON, name="table2", curves=curves)])
    assert parts[-1].title.startswith("How soon")
    sentence = "DIFF / Transformer, to a validation accuracy of 0.900: 0.65 [0.65, 0.65]."
    assert [(one.results.title, one.sentence) for one in parts[-1].findings] == [("Figure 5", sentence)]


def test_how_soon_of_a_loss_is_by_the_worse_end_with_its_size() -> None:
    curves = {"diff": (4.0, 3.0, 2.0), "softmax": (4.0, 2.0, 1.0)}
    results = found(WON, curves=curves, curve=LOSS_CURVE, at=Coordinates(parameters=260_000))
    sentence = "DIFF / Transformer (0.26M), to a validation loss of 2.000, with which DIFF ends: 1.50 [1.50, 1.50]."
    assert summary([results])[-1].findings[0].sentence == sentence


def test_who_is_sooner_is_not_said_of_different_learning_rates() -> None:
    results = found(WON, curves={"diff": EARLY, "softmax": LATE}, rates=(1e-3, 3e-3))
    assert not any(part.title.startswith("How soon") for part in summary([results]))


def test_what_was_not_reached_has_no_speed() -> None:
    results = found(WON, curves={"diff": (0.1, 0.1, 0.1), "softmax": (0.2, 0.2, 0.2)})
    assert not any(part.title.startswith("How soon") for part in summary([results]))


def test_how_sure_the_findings_are() -> None:
    text = certainty([found(WON), found(WON[:2], name="fig4")])
    assert "12,345 parameters" in text
    assert "2 to 3 seeds" in text
    assert "out of 2 with a verdict" in text
    assert "one comparison in twenty" in text


def test_what_a_correction_for_their_number_leaves() -> None:
    """Three comparisons of .2 ± .01 with three seeds: p is .0008, and that of one that holds 0 is not."""
    results = [found(WON), found(LOST, name="fig4"), found(OPEN, name="fig5")]
    tested, left = corrected(results)
    assert (tested, [one.title for _, one, _ in left]) == (3, ["Recall", "Figure 4"])
    assert [p for p, _, _ in left] == pytest.approx([3 * 0.00083, 3 * 0.00083], rel=0.01)
    assert "After Holm's correction for the 3 named comparisons p is below 0.05 in" in certainty(results)
    assert certainty([found(OPEN), found(OPEN, name="fig4")]).endswith("p is below 0.05 in none of them.")
    assert "Holm" not in certainty([found(WON)])
    assert (certainty([]), summary([])) == ("", [])


def test_the_report_begins_with_the_findings(tmp_path: Path) -> None:
    write_json(tmp_path / "recall.json", found(LOST).file)
    document, page = build_results_report([tmp_path], complete=lambda file: file)
    text = document.read_text(encoding="utf-8")
    opening = text[: text.index("## Overview")]
    words = MarkdownIt().render(opening)
    assert f'<a href="#recall-cpu">Recall</a>: {CLAIM}: 0.300 against 0.500' in words
    assert "Does not hold" in words
    assert "docs/log.md" in words
    assert "inconclusive" not in words  # how to read the verdicts comes after them
    assert "In a sentence each" not in text, "few experiments are told at once"
    assert text.index("## Overview") < text.index("## How to read the tables") < text.index("## Recall")
    html = page.read_text(encoding="utf-8")
    assert html.index("Does not hold") < html.index("Overview</h2>") < html.index("How to read the tables")


LEARNS = {"diff": (0.1, 0.5, 0.9), "softmax": (0.1, 0.4, 0.8)}


def test_the_opening_of_many_experiments_names_those_that_are_open_by_who_is_ahead(tmp_path: Path) -> None:
    """Their sentences come after the overview; those of the decided ones, won or lost, stay."""
    many = [
        found(LOST, name="fig4"),
        found(OPEN, name="fig5"),
        found(WON, name="table2", curves=LEARNS),
        found(LOST, name="table3", curves=LEARNS),
        found(OPEN, name="table6", curves=LEARNS),
    ]
    for results in many:
        write_json(tmp_path / f"{results.name}.json", results.file)
    document, page = build_results_report([tmp_path], complete=lambda file: file)
    text = document.read_text(encoding="utf-8")
    opening, rest = text.split("## Overview")
    assert f"- [Figure 4](#fig4-cpu): {CLAIM}: 0.300 against 0.500" in opening
    assert "**Open: the interval holds 0, or is not known**: [Figure 5](#fig5-cpu).\n" in opening
    learning = (
        "DIFF is ahead so far in [Table 2](#table2-cpu); the Transformer is ahead so far in [Table 3](#table3-cpu); "
    )
    learning += "no difference so far in [Table 6](#table6-cpu).\n"
    assert f"still learning**: {learning}" in opening
    assert opening.count(CLAIM) == 1
    assert "How soon" not in opening
    sentences = rest[rest.index("## In a sentence each") : rest.index("## How to read")]
    assert sentences.count(CLAIM) == 4
    assert "How soon" in sentences
    html = page.read_text(encoding="utf-8")
    assert html.index("is ahead so far in <a") < html.index("Overview") < html.index("In a sentence each")


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
