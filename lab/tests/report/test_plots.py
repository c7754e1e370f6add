"""Figures show what results say, in the colours of the page that shows them, and load nothing."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import pytest

import made_up_results
from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Comparison, Headline, Result
from diff_lab.report.figures import Drawing, Series, experiment_figures, line_plot, variant_style
from diff_lab.report.findings import ExperimentResults
from diff_lab.results_files import capture_results
from diff_lab.statistics import mean_interval


def texts(drawing: Drawing) -> list[str]:
    nodes = ET.fromstring(drawing.svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()).strip() for node in nodes]


def test_an_svg_keeps_its_text_and_brings_its_colours_for_both_pages() -> None:
    lines = [
        Series("DIFF", [1, 2], [3.0, 2.0], **variant_style("diff")),
        *(Series(label, [1], [1.0]) for label in ("Other <b>", "$\\frac", "模型", "x" * 500)),
    ]
    before = dict(mpl.rcParams)
    figure = line_plot(lines, title="Loss & more $", ylabel="nats")
    drawing = Drawing(figure, "In <words>")
    text = drawing.svg
    assert dict(mpl.rcParams) == before, "the user's matplotlib is left alone"
    assert {"Loss & more $", "nats", "DIFF", "Other <b>", "$\\frac", "模型", "…" + "x" * 59} <= set(texts(drawing))
    assert ET.fromstring(text).findtext("{http://www.w3.org/2000/svg}desc") == "In <words>"
    light, dark = text[text.index("<style>") : text.index("</style>")].split("prefers-color-scheme: dark")
    for colour in {"--diff", "--ink", *re.findall(r"var\((--\w+)\)", text)}:
        assert f"var({colour})" in text
        assert f"{colour}: #" in light
        assert f"{colour}: #" in dark
    assert not re.search(r"#ffffff", text.replace(light, ""))
    assert "<metadata" not in text
    assert text == Drawing(figure, "In <words>").svg, "the same figure gives the same text"


def test_a_noisy_line_has_its_running_mean_and_a_lost_number_a_cross() -> None:
    noisy = [float(step % 2) for step in range(400)]
    raw, smooth = line_plot([Series("a", range(400), noisy)], title="t", ylabel="y").axes[0].lines
    assert list(raw.get_ydata()) == noisy
    assert all(abs(value - 0.5) < 0.06 for value in smooth.get_ydata())
    line, cross = line_plot([Series("a", [1, 2, 3], [1.0, math.nan, 1.0])], title="t", ylabel="y").axes[0].lines
    assert (list(cross.get_xdata()), cross.get_marker()) == ([2], "x")
    assert math.isnan(line.get_ydata()[1])
    low, high = line_plot([Series("a", [1, 2], [5.0, 4.0])], title="t", ylabel="y").axes[0].get_ylim()
    assert 3.5 < low < 4 < 5 < high < 5.5, "without limits the axis holds the line"


def test_a_long_title_and_a_long_legend_lie_within_the_figure() -> None:
    title = "Language on Python code, preset evening: difference in validation loss, 0.26M over training"
    label = "Transformer, half the heads, headwise norm − Transformer"
    lines = [Series(label, [1, 2], [-0.02, 3.0]), Series("DIFF", [1, 2], [0.0, 1.0])]
    figure = line_plot(lines, title=title, ylabel="first − second (nats/token)")
    assert figure.axes[0].get_title(loc="left").replace("\n", " ") == title
    figure.draw_without_rendering()
    bounds = figure.get_tightbbox()
    assert bounds.x0 >= 0
    assert bounds.x1 <= figure.get_figwidth()


# --- A measure along a coordinate ---


def records(positions: Sequence[Coordinates], values: Sequence[float] = (1.0, 2.0), name: str = "a/b") -> list[Result]:
    """A measure of the twins with a seed for each value, larger by 0.1 at each place after the first."""
    found = []
    for number, position in enumerate(positions):
        diff = [value + 0.1 * number for value in values]
        found += made_up_results.measured(name, {"diff": diff, "softmax": [x + 1 for x in diff]}, coordinates=position)
    return found


def along(name: str, *values: Any, **others: Any) -> list[Coordinates]:
    return [Coordinates(others, **{name: value}) for value in values]


def drawn(measured: Sequence[Result], baselines: Sequence[Baseline] = ()) -> list[Drawing]:
    """The figures of an experiment whose headline is the first place of the measure."""
    first = measured[0]
    row = Comparison(
        name=first.name,
        variant="diff",
        against="softmax",
        ours=(0, 0),
        difference=0,
        better="lower",
        verdict="inconclusive",
        coordinates=first.coordinates,
    )
    headline = Headline(name=first.name, coordinates=first.coordinates)
    file = capture_results("t", {}, measured, "cpu", comparisons=[row])
    file = replace(file, baselines=tuple(baselines), headline=headline)
    return experiment_figures(ExperimentResults("fig9", "cpu", file), "Figure 9")


@pytest.mark.parametrize(
    ("name", "values", "label", "numbers", "ticks"),
    [
        ("step", (0, 60, 300), "step of training", (0, 60, 300), ["0", "60", "300"]),
        ("first_tokens", (64, 1024, 128), "tokens from the start of the document", (64, 128, 1024), None),
        ("parameters", (6e4, 830e6, 1.4e10), "parameters", (6e4, 8.3e8, 1.4e10), ["0.06M", "0.83B", "14B"]),
        ("bits", (16, 8, 4, "whole"), "bits of a number", (4, 8, 16), None),
        ("depth", ((0, 0.2), (0.2, 0.4), (0.4, 0.6)), "depth in the context", (0.1, 0.3, 0.5), None),
        ("depth", (0.0, 0.5, 1.0), "depth in the context", (0, 0.5, 1), ["0 %", "50 %", "100 %"]),
        ("position", ((1, 63), (64, 127), (128, 255)), "position in the document", (32, 95.5, 191.5), None),
        ("made_up", (1, 2, 3), "made up", (1, 2, 3), ["1", "2", "3"]),
    ],
)
def test_a_measure_is_drawn_along_a_coordinate(
    name: str, values: tuple[Any, ...], label: str, numbers: tuple[float, ...], ticks: list[str] | None
) -> None:
    (drawing,) = drawn(records(along(name, *values)))
    axes = drawing.figure.axes[0]
    assert axes.get_xlabel() == label
    assert [line.get_label() for line in axes.lines] == ["DIFF", "Transformer"]
    assert all(list(line.get_xdata()) == pytest.approx(numbers) for line in axes.lines)
    assert ticks is None or [text.get_text() for text in axes.get_xticklabels()] == ticks
    assert f"by {label}" in drawing.alt


def titles(positions: Sequence[Coordinates]) -> list[str]:
    """The beginnings of the descriptions."""
    return [drawing.alt.removeprefix("Figure 9: b").partition(": b")[0] for drawing in drawn(records(positions))]


def test_what_else_coordinates_say_is_that_of_the_headline() -> None:
    both = [Coordinates(parameters=size, tokens=count) for size in (6e4, 5e5) for count in (100, 2000, 30_000)]
    assert titles(both) == [", 0.06M by tokens of training"]
    cells = [Coordinates(needles=n, queries=r) for n, r in ((2, 2), (1, 1), (2, 1), (4, 1), (4, 2), (6, 2))]
    assert titles(cells) == [", 2 queried by needles"]
    assert titles([cells[1], cells[0], *cells[2:]]) == [", 1 queried by needles"]
    by_depth = [Coordinates(cell, depth=depth) for cell in (cells[0], cells[2]) for depth in (0.0, 0.5, 1.0)]
    assert titles(by_depth) == [", 2 needles, 2 queried by depth in the context"]


def test_what_is_the_same_everywhere_names_and_two_numbers_are_no_line() -> None:
    easy = [replace(record, value=1.0) for record in records(along("depth", 0.0, 0.5, 1.0, needles=1, queries=1))]
    hard = records(along("depth", 0.0, 0.5, 1.0, needles=2, queries=2))
    assert ["2 needles, 2 queried" in drawing.alt for drawing in drawn([*easy, *hard])] == [True]
    assert titles(along("noise", 0.1, 0.2)) == []
    assert titles(along("part", "held out", "xsum", "qasper")) == []


def test_lines_are_means_with_bands_over_seeds_or_with_one_seed_of_the_measurement() -> None:
    positions = along("needles", 1, 2, 3)
    (drawing,) = drawn(records(positions, (1.0, 3.0)))
    axes = drawing.figure.axes[0]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([2.0, 2.1, 2.2])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    low, _ = mean_interval([1.0, 3.0]) or (0, 0)
    assert heights.min() == pytest.approx(low)
    # Cut where the means end: two seeds tell next to nothing.
    assert axes.get_ylim() == pytest.approx((2.0 - 0.06 * 1.2, 3.2 + 0.06 * 1.2))
    assert "Mean of 2 seeds" in drawing.caption
    alone = [replace(one, interval=(one.value - 1, one.value + 1)) for one in records(positions, (5.0,))]
    (drawing,) = drawn(alone)
    heights = drawing.figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((4.0, 6.2))
    assert "95 % intervals of the measurement" in drawing.caption


def test_axes_are_logarithmic_where_numbers_span_much_and_shares_lie_evenly() -> None:
    scales = [along("bits", 1, 10, 100), along("bits", 1, 2, 4)]
    scales.append(along("depth", *((fifth / 5, (fifth + 1) / 5) for fifth in range(5))))
    axes = [drawn(records(positions))[0].figure.axes[0] for positions in scales]
    assert [one.get_xscale() for one in axes] == ["log", "linear", "linear"]
    assert [text.get_text() for text in axes[0].get_xticklabels()] == ["1", "10", "100"]
    assert [text.get_text() for text in axes[2].get_xticklabels()][-1] == "80–100 %"
    tops = [replace(one, value=300 / one.coordinates["rank"]) for one in records(along("rank", 1, 2, 10, 100))]
    assert [drawn(measured)[0].figure.axes[0].get_yscale() for measured in (tops, tops[:-4])] == ["log", "linear"]


def test_chance_and_floor_are_lines_where_they_are_known_everywhere() -> None:
    places = along("shots", 8, 16, 32)
    measured = [
        replace(one, value=0.3 + one.coordinates["shots"] / 100) for one in records(places, (0.0,), "a/accuracy")
    ]
    levels: dict[str, Any] = {"chance": 0.1, "floor": 0.2, "by_elimination": 0.2, "steps": 1}
    baselines = [Baseline(name="a/accuracy", coordinates=place, ceiling=0.9, **levels) for place in places]
    (drawing,) = drawn(measured, baselines)
    assert "ceiling goes from 0.900 to 0.900" in drawing.alt
    # What is equal to another level is drawn once.
    assert "chance goes from 0.100 to 0.100; by elimination goes from 0.200 to 0.200" in drawing.alt
    assert "floor" not in drawing.svg
    assert "chance</text>" in drawing.svg
    assert "chance" not in drawn(measured, baselines[:2])[0].alt


SIZES = "training/parameters_without_lambda_and_norms"


def test_losses_by_size_have_their_fits_and_the_arrow_of_equal_loss() -> None:
    """The first variant needs twice the parameters: its loss at N is the other's at N / 2."""
    sizes = (1e5, 4e5, 1.6e6)
    measured = [
        Result(name=name, variant=variant, value=value, seed=0, coordinates=Coordinates(parameters=size))
        for size in sizes
        for variant, share in (("diff", 2.0), ("softmax", 1.0))
        for name, value in (("language/validation_loss", 5 - 0.2 * math.log(size / share / 1e5)), (SIZES, 0.9 * size))
    ]
    curves = [
        Result(name="training/validation_loss", variant=variant, value=value, seed=0, coordinates=at)
        for variant, values in (("diff", (5.0, 4.5)), ("softmax", (4.8, 4.4)))
        for step, value in enumerate(values, 1)
        for at in [Coordinates(parameters=sizes[-1], step=step)]
    ]
    rows = [
        Comparison(
            name=name, variant="diff", against="softmax", ours=(2, 1), difference=1, better="lower", verdict="contrary"
        )
        for name in ("scaling/parameters_for_equal_loss",)
    ]
    trained = [{"name": name, "coordinates": {"parameters": sizes[-1]}} for name in ("diff", "softmax")]
    settings = {"variants": [{**one, "learning_rate": 0.1, "diverged": [], "tokens_per_step": 10} for one in trained]}
    file = capture_results("t", settings, [*measured, *curves], "cpu", comparisons=rows)
    results = ExperimentResults("fig3", "cpu", replace(file, headline=Headline(name=rows[0].name)))
    *_, by_size = experiment_figures(results, "Figure 3")
    axes = by_size.figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "→ 2.00 times the parameters" in texts(by_size)
    arrow = next(text for text in axes.texts if getattr(text, "arrow_patch", None))
    assert (arrow.xyann[0], arrow.xy[0]) == pytest.approx((0.9 * 4e5 / 2, 0.9 * 4e5))
    assert arrow.xy[1] == pytest.approx(5 - 0.2 * math.log(2))
    fewer = replace(file, records=tuple(one for one in measured if one.coordinates["parameters"] < 1e6))
    assert experiment_figures(replace(results, file=replace(fewer, headline=results.file.headline)), "Figure 3") == []
