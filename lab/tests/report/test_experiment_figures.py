"""Measures that were taken along a coordinate are drawn over it; comparisons are rows of forest plots."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diff_lab.coordinates import Coordinates
from diff_lab.record import Baseline, Comparison, Result
from diff_lab.report.coordinate_figures import Panel, bands, panel_along, panels
from diff_lab.report.figures import axes_of
from diff_lab.report.forest_figures import ForestRow, forest


def records(positions: Sequence[Coordinates], values: Sequence[float] = (1.0, 2.0), name: str = "a/b") -> list[Result]:
    """A measure of the twins with a seed for each value, larger by 0.1 at each place after the first."""
    return [
        Result(
            name=name,
            variant=variant,
            value=value + 0.1 * number + (variant == "softmax"),
            seed=seed,
            coordinates=position,
        )
        for number, position in enumerate(positions)
        for variant in ("diff", "softmax")
        for seed, value in enumerate(values)
    ]


def along(name: str, *values: Any, **others: Any) -> list[Coordinates]:
    return [Coordinates(others, **{name: value}) for value in values]


def drawn_panels(positions: Sequence[Coordinates]) -> list[Panel]:
    return list(panels(records(positions), ()))


@pytest.mark.parametrize(
    ("name", "values", "label", "numbers", "texts"),
    [
        ("step", (0, 30, 300), "step of training", (0, 30, 300), ("0", "30", "300")),
        ("first_tokens", (64, 1024, 128), "tokens from the start of the document", (64, 128, 1024), None),
        ("context_factor", (1, 2, 4), "length of the context, in lengths of training", (1, 2, 4), None),
        ("parameters", (6e4, 830e6, 1.4e9), "parameters", (6e4, 8.3e8, 1.4e9), ("0.06M", "0.83B", "1.4B")),
        ("bits", (16, 8, 4, "whole"), "bits of a logit", (4, 8, 16), None),
        ("rank", (1, 10, 100, "median"), "rank by size", (1, 10, 100), None),
        ("depth", ((0, 0.2), (0.2, 0.4), (0.4, 0.6)), "depth in the context", (0.1, 0.3, 0.5), None),
        ("depth", (0.0, 0.5, 1.0), "depth in the context", (0, 0.5, 1), ("0 %", "50 %", "100 %")),
        ("position", ((1, 63), (64, 127), (128, 255)), "position in the document", (32, 95.5, 191.5), None),
        ("tokens", (1, 2, 12345), "tokens of training", (1, 2, 12345), ("1", "2", "12,345")),
        ("learning_rate", (1e-3, 1e-5, 0.1), "learning rate", (1e-5, 1e-3, 0.1), ("1e-05", "0.001", "0.1")),
        ("made_up", (1, 2, 3), "made up", (1, 2, 3), ("1", "2", "3")),
    ],
)
def test_a_measure_is_drawn_along_a_coordinate(
    name: str, values: tuple[Any, ...], label: str, numbers: tuple[float, ...], texts: tuple[str, ...] | None
) -> None:
    (panel,) = drawn_panels(along(name, *values))
    assert (panel.axis, panel.part) == (label, "")
    assert panel.numbers == pytest.approx(numbers)
    assert texts is None or panel.texts == texts
    assert all(list(line.x) == list(panel.numbers) for line in panel.lines)


def test_what_else_coordinates_say_is_a_figure_of_its_own() -> None:
    drawn = drawn_panels(
        [Coordinates(parameters=size, tokens=count) for size in (6e4, 5e5) for count in (100, 2000, 30_000)]
    )
    axis = "tokens of training"
    assert [(panel.part, panel.axis) for panel in drawn] == [("0.06M", axis), ("0.5M", axis)]
    noisy = drawn_panels([Coordinates(noise=noise, shots=count) for noise in (0, 0.4) for count in (2, 8, 32)])
    assert [(panel.part, panel.axis) for panel in noisy] == [("noise 0", "shots"), ("noise 0.4", "shots")]


def test_needles_are_drawn_for_each_number_asked_for() -> None:
    cells = [Coordinates(needles=n, queries=r) for n, r in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (6, 2))]
    drawn = drawn_panels(cells)
    assert [(panel.part, panel.axis, panel.numbers) for panel in drawn] == [
        ("1 queried", "needles", (1, 2, 4)),
        ("2 queried", "needles", (2, 4, 6)),
    ]
    by_depth = drawn_panels(
        [Coordinates(cell, depth=depth) for cell in (cells[0], cells[2]) for depth in (0.0, 0.5, 1.0)]
    )
    assert [(panel.part, panel.axis) for panel in by_depth] == [
        ("1 needle, 1 queried", "depth in the context"),
        ("2 needles, 2 queried", "depth in the context"),
    ]


def test_what_is_the_same_everywhere_is_no_line() -> None:
    """Of each figure by itself: one needle is found at every depth, of two it depends."""
    depths = (0.0, 0.5, 1.0)
    easy = [replace(record, value=1.0) for record in records(along("depth", *depths, needles=1, queries=1))]
    hard = records(along("depth", *depths, needles=2, queries=2))
    assert [panel.part for panel in panels([*easy, *hard], ())] == ["2 needles, 2 queried"]


def test_names_and_two_numbers_are_no_line() -> None:
    assert drawn_panels(along("noise", 0.1, 0.2)) == []
    assert drawn_panels(along("part", "held out", "xsum", "qasper")) == []
    numbers = along("shots", 1, 2, 3, 4)
    assert list(panels(records(numbers, name="training/seconds"), ())) == []
    same = [Result(name="a", variant="diff", value=1.0, seed=0, coordinates=position) for position in numbers]
    assert list(panels(same, ())) == []


def test_lines_are_means_with_bands_over_seeds_and_the_papers_beside_them() -> None:
    positions = along("needles", 1, 2, 3)
    paper = [
        Comparison(
            name="a/b", variant="diff", against="softmax", ours=(0, 0), difference=0, coordinates=position, paper=values
        )
        for position, values in zip(positions, ((9.0, math.nan), (8.0, 7.0), (7.0, 6.0)), strict=True)
    ]
    (panel,) = panels(records(positions, (1.0, 3.0)), paper)
    assert [line.label for line in panel.lines] == ["DIFF", "Transformer"]
    assert list(panel.lines[0].y) == pytest.approx([2.0, 2.1, 2.2])
    assert panel.lines[0].intervals[0] == (1.0, 3.0)
    assert [(line.label, list(line.y)) for line in panel.paper] == [("DIFF", [9.0, 8.0, 7.0])]
    lost = [*records(positions), Result(name="a/b", variant="diff", value=math.nan, seed=2, coordinates=positions[2])]
    (panel,) = panels(lost, ())
    assert math.isnan(panel.lines[0].y[2])
    assert panel.lines[0].intervals[2] is None
    axes = bands(panel, title="t").axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[3.0]]


def test_one_seed_has_the_intervals_of_its_measurement() -> None:
    results = [
        Result(
            name="a",
            variant="diff",
            value=number,
            seed=0,
            coordinates=Coordinates(shots=number),
            interval=(number - 1, number + 1),
        )
        for number in (1, 2, 3)
    ]
    (panel,) = panels(results, ())
    assert (panel.seeds, panel.measured_intervals) == (1, True)
    assert panel.lines[0].intervals[1] == (1, 3)


def test_axes_are_logarithmic_where_numbers_span_much() -> None:
    (wide,) = drawn_panels(along("bits", 1, 10, 100))
    (narrow,) = drawn_panels(along("bits", 1, 2, 4))
    drawn = [bands(panel, title="t").axes[0] for panel in (wide, narrow)]
    assert [axes.get_xscale() for axes in drawn] == ["log", "linear"]
    assert [text.get_text() for text in drawn[0].get_xticklabels()] == ["1", "10", "100"]


def test_a_forest_shows_every_row_and_cuts_only_what_lies_far_away() -> None:
    rows = [
        ForestRow("heading"),
        ForestRow("won", -1.0, (-1.5, -0.5), "reproduced", paper=-400.0),
        ForestRow("lost", 1.0, (0.5, 1.5), "contrary", paper=-0.5),
        ForestRow("open", 0.1, (-50.0, 50.0), "inconclusive"),
        ForestRow("alone", 0.2, None, "inconclusive"),
        ForestRow("diverged", math.nan, None, "inconclusive", missing="diverged"),
        ForestRow("not known", math.nan, None, "inconclusive"),
        ForestRow("void", 0.3, (0.2, 0.4), "not comparable"),
        ForestRow("unclaimed", 0.0, (-0.1, 0.1), None),
    ]
    axes = forest(rows, title="t", xlabel="x", better="lower").axes[0]
    low, high = axes.get_xlim()
    assert -5 < low < -1.5
    assert 1.5 < high < 5
    labels = [row.label for row in rows]
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts if text.get_text() in labels}
    assert list(heights) == labels
    assert list(heights.values()) == sorted(heights.values())
    # The interval of a row lies on the line below its label.
    below = {row.label: heights[row.label] + 1 for row in rows}
    dots = {
        line.get_ydata()[0]: line.get_marker()
        for line in axes.lines
        if line.get_marker() in ("o", "s", "D", "X") and len(line.get_ydata())
    }
    marks = {"won": "o", "lost": "s", "open": "o", "alone": "o", "void": "X", "unclaimed": "D"}
    assert dots == {below[label]: mark for label, mark in marks.items()}
    texts = {text.get_text().strip() for text in axes.texts}
    assert {"diverged", "not known", "× −400"} <= texts
    (away,) = [text for text in axes.texts if "×" in text.get_text()]
    assert away.get_bbox_patch() is not None  # an interval that lies there is not drawn through it
    assert {
        line.get_marker() for line in axes.lines if len(line.get_ydata()) and line.get_ydata()[0] == below["open"]
    } >= {
        "<",
        ">",
    }
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(-0.5, below["lost"])]
    words = [text.get_text() for text in axes.texts if text.get_ha() == "right" and text.get_position()[0] == 1.0]
    assert words == ["reproduced", "contrary", *["inconclusive"] * 4, "not comparable", "no claim"]


def test_a_long_label_has_lines_of_its_own_and_none_covers_its_verdict() -> None:
    rows = [
        ForestRow("needles " * 12, 1.0, (0.5, 1.5), "reproduced", remark="Transformer at floor"),
        ForestRow("N2 R2", 1.0, (0.5, 1.5), "reproduced"),
    ]
    figure = forest(rows, title="t", xlabel="x", better="higher")
    axes = figure.axes[0]
    by_height: dict[float, list[str]] = {}
    for text in axes.texts:
        by_height.setdefault(text.get_position()[1], []).append(text.get_text())
    assert all(sum(map(len, line)) <= 66 for line in by_height.values())
    assert ["N2 R2", "reproduced"] in by_height.values()
    assert any("reproduced; Transformer at floor" in line for line in by_height.values())
    # As wide as other figures: a phone shows it whole, and its text is not smaller than theirs.
    assert figure.get_figwidth() == axes_of("t", "x", "y")[0].get_figwidth()


def test_shares_of_a_whole_lie_evenly() -> None:
    (depths,) = drawn_panels(along("depth", *((fifth / 5, (fifth + 1) / 5) for fifth in range(5))))
    axes = bands(depths, title="t").axes[0]
    assert axes.get_xscale() == "linear"
    assert [text.get_text() for text in axes.get_xticklabels()][-1] == "80–100 %"


def test_shares_are_drawn_from_zero_with_chance_and_intervals_beside_them() -> None:
    shares = [
        Result(name="a", variant=variant, value=value, interval=(value - 0.1, value + 0.1), coordinates=position)
        for variant, value in (("diff", 0.6), ("softmax", 0.2))
        for position in along("depth", (0.0, 0.5), (0.5, 1.0))
    ]
    panel = panel_along("depth", shares[:3], baselines=[Baseline(name="a", chance=0.1, floor=0.1, steps=1)])
    axes = bands(panel, title="t", from_zero=True).axes[0]
    assert axes.get_ylim()[0] == 0
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0–50 %", "50–100 %"]
    (chance,) = [line for line in axes.lines if list(line.get_ydata()) == [0.1, 0.1]]
    assert chance.get_label() == "floor"
    low, high = axes.collections[0].get_paths()[0].get_extents().get_points()[:, 1]
    assert (low, high) == pytest.approx((0.5, 0.7))
    assert list(axes.lines[2].get_xdata()) == [0.25]
    one = bands(panel_along("depth", shares[:1]), title="t", from_zero=True).axes[0]
    assert [label.get_text() for label in one.get_xticklabels()] == ["0–50 %"]
