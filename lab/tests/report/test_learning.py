"""What a report shows of validation curves: curves with their levels, and differences of losses."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, judge
from diff_lab.record import OWN, Baseline, Headline, Result, ResultsFile
from diff_lab.report.figures import experiment_figures
from diff_lab.report.findings import ExperimentResults
from diff_lab.report.pages import build_results_report
from diff_lab.results_files import write_json
from diff_lab.statistics import compare, mean_interval
from made_up_results import made_up, trained

NAN = math.nan
FAST, SLOW, FLAT = (0.2, 0.6, 0.8, 0.95, 0.95), (0.1, 0.2, 0.3, 0.6, 0.8), (0.1, 0.1, 0.1, 0.1, 0.1)
LEVELS = Baseline(name=ACCURACY_CURVE, chance=0.1, floor=0.3, by_elimination=0.5, steps=500)


def results(
    curves: Mapping[str, Sequence[Sequence[float]]],
    *,
    name: str = ACCURACY_CURVE,
    baselines: Sequence[Baseline] = (LEVELS,),
    at: Coordinates = NO_COORDINATES,
    **more: Any,
) -> ResultsFile:
    """The curves of each variant by seed, with a validation at every hundredth step, and a comparison of their ends."""
    records = []
    better: Any = "higher" if name == ACCURACY_CURVE else "lower"
    for variant, by_seed in curves.items():
        for seed, values in enumerate(by_seed):
            shared: dict[str, Any] = {"variant": variant, "seed": seed, "better": better}
            for number, value in enumerate(values, start=1):
                where = Coordinates(at, step=100 * number)
                records.append(Result(name=name, value=value, coordinates=where, **shared))
            records.append(Result(name="x", value=values[-1] if values else 0.0, coordinates=at, **shared))
    first, *others = curves
    rows = [compare(records, "x", first, other, coordinates=at, quality=True) for other in others]
    variants = trained(*curves, at=at, **more)
    file = made_up("recall", records, rows, variants, preset=OWN)
    headline = Headline(name="x", variant=first, against=others[0], coordinates=at)
    return judge(replace(file, baselines=tuple(baselines), headline=headline))


HIGH, LOW = (5.0, 4.0, 3.5, 3.2, 3.0), (4.0, 3.0, 2.8, 2.7, 2.6)


def drawings(file: ResultsFile) -> list[Any]:
    return experiment_figures(ExperimentResults("recall", OWN, file), "Recall")


def legend(drawing: Any) -> list[str]:
    return [text.get_text() for text in drawing.figure.legends[0].get_texts()]


def test_curves_are_drawn_with_their_levels() -> None:
    (drawing,) = drawings(results({"diff": [FAST, SLOW], "softmax": [SLOW, FLAT]}))
    assert legend(drawing) == ["DIFF", "Transformer", "chance 0.10", "floor 0.30", "by elimination 0.50"]
    assert drawing.figure.axes[0].get_ylim() == (0.0, 1.0)
    assert drawing.name == "recall-own-learning-accuracy"
    assert "DIFF goes from 0.150 to 0.875; Transformer goes from 0.100 to 0.450" in drawing.alt
    assert "Mean of 2 seeds" in drawing.caption
    guessing = Baseline(name=ACCURACY_CURVE, chance=0.25, floor=0.25, steps=500)
    (drawing,) = drawings(results({"diff": [FAST], "softmax": [SLOW]}, baselines=[guessing]))
    assert legend(drawing)[2:] == ["floor 0.25"], "levels of one height are one line"
    assert "One seed" in drawing.caption


def test_of_losses_the_differences_are_drawn_too_over_tokens() -> None:
    file = results({"diff": [LOW, HIGH], "softmax": [HIGH, HIGH]}, name=LOSS_CURVE, tokens_per_step=2048)
    curves, difference = drawings(file)
    for drawing in (curves, difference):
        axes = drawing.figure.axes[0]
        assert axes.get_xlabel() == "tokens of training"
        assert list(axes.lines[0].get_xdata()) == [100 * number * 2048 for number in range(1, 6)]
    assert difference.name == "recall-own-difference"
    assert "DIFF − Transformer goes from -0.500 to -0.200" in difference.alt
    line, band = difference.figure.axes[0].lines[0], difference.figure.axes[0].collections[0]
    assert line.get_ydata()[0] == pytest.approx(-0.5)
    ends = mean_interval((LOW[-1] - HIGH[-1], 0.0))
    heights = [y for x, y in band.get_paths()[0].vertices if x == 500 * 2048]
    assert ends == pytest.approx((min(heights), max(heights)))
    # Results that do not tell how many tokens a step has are drawn over steps.
    curves, _ = drawings(results({"diff": [LOW], "softmax": [HIGH]}, name=LOSS_CURVE))
    assert curves.figure.axes[0].get_xlabel() == "step of training"


def test_runs_that_diverged_and_single_validations_leave_no_curve() -> None:
    for curves in ({"diff": [(0.9,)], "softmax": [(0.8,)]}, {"diff": [()], "softmax": [()]}):
        assert drawings(results(curves)) == []
    lost = results({"diff": [LOW, (5.0, 4.0, NAN)], "softmax": [HIGH, HIGH]}, name=LOSS_CURVE)
    curves, difference = drawings(lost)
    assert "DIFF goes from 4.500 to not known" in curves.alt, "not to what the other seed comes to"
    line, cross, *_ = difference.figure.axes[0].lines
    assert list(line.get_xdata()) == [100, 200, 300]
    assert (list(cross.get_xdata()), cross.get_marker()) == ([300], "x")


@pytest.mark.parametrize(
    ("diverged", "ends"),
    [((5.0, *[NAN] * 19), (4.94, 5.06)), ((5.0, 4.0, *[NAN] * 18), (3.94, 4.06)), ([NAN] * 20, None)],
)
def test_losses_that_all_diverged_in_the_beginning_are_drawn(
    tmp_path: Path, diverged: Sequence[float], ends: tuple[float, float] | None
) -> None:
    """As with `compare --learning-rates 1`: no mean is left after the first tenth of training, and no level."""
    file = results({"diff": [diverged], "softmax": [diverged]}, name=LOSS_CURVE)
    assert ends is None or drawings(file)[0].figure.axes[0].get_ylim() == pytest.approx(ends)
    write_json(tmp_path / "recall.json", file)
    document = build_results_report([tmp_path])
    assert "recall-own-learning-loss.svg" in document.read_text(encoding="utf-8")


def test_an_accuracy_and_a_loss_have_a_figure_each() -> None:
    """A run on masked text logs both."""
    accuracies = results({"diff": [FAST], "softmax": [SLOW]})
    losses = results({"diff": [LOW], "softmax": [HIGH]}, name=LOSS_CURVE)
    curves = tuple(record for record in losses.records if record.name == LOSS_CURVE)
    both = replace(accuracies, records=(*accuracies.records, *curves))
    names = ["recall-own-learning-accuracy", "recall-own-learning-loss", "recall-own-difference"]
    assert [drawing.name for drawing in drawings(both)] == names


def test_an_experiment_has_the_difference_alone_and_of_the_size_of_its_headline() -> None:
    """The interval is drawn of the headline's pair, of which the reader is told."""
    large = Coordinates(parameters=2_000_000)
    losses = {"diff": [LOW, LOW], "softmax": [HIGH, HIGH], "diff_v2": [HIGH, LOW]}
    file = results(losses, name=LOSS_CURVE, at=large)
    others = results(losses, name=LOSS_CURVE, at=Coordinates(parameters=1_000_000))
    both = replace(file, records=(*others.records, *file.records))
    (difference,) = experiment_figures(ExperimentResults("language", "cpu", both), "Language")
    assert difference.name == "language-cpu-difference-2m"
    assert len(difference.figure.axes[0].collections) == 1
    assert "of DIFF − Transformer with the 95 % interval" in difference.caption
    assert "DIFF − DIFF V2 goes from" in difference.alt
