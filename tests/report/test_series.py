"""Groups whose names hold numbers are drawn over them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from diff_transformer.report.bands import bands
from diff_transformer.report.figures import axes_of
from diff_transformer.report.forest import ForestRow, forest
from diff_transformer.report.series import Panel, panels
from diff_transformer.results import Comparison, Result


def records(groups: Sequence[str], values: Sequence[float] = (1.0, 2.0), name: str = "a/b") -> list[Result]:
    """A measure of the twins with a seed for each value, larger by 0.1 in each group after the first."""
    return [
        Result(name=name, arm=arm, value=value + 0.1 * number + (arm == "softmax"), seed=seed, group=group)
        for number, group in enumerate(groups)
        for arm in ("diff", "softmax")
        for seed, value in enumerate(values)
    ]


def found(groups: Sequence[str], **rates: float) -> list[Panel]:
    return list(panels(records(groups), (), rates))


@pytest.mark.parametrize(
    ("groups", "label", "numbers"),
    [
        (("step 0", "step 30", "step 300"), "step of training", (0, 30, 300)),
        (("first 64", "first 1024", "first 128"), "tokens from the start of the document", (64, 128, 1024)),
        (("context × 1", "context × 2", "context × 4"), "length of the context, in lengths of training", (1, 2, 4)),
        (("0.06M", "830M", "1.4B"), "parameters", (6e4, 8.3e8, 1.4e9)),
        (("16 bits per row", "8 bits per row", "4 bits per row"), "bits per row", (4, 8, 16)),
        (("top-1", "top-10", "top-100", "median"), "rank by size", (1, 10, 100)),
        (("0–20 %", "20–40 %", "40–60 %"), "depth in the context", (10, 30, 50)),
        (("depth 0 %", "depth 50 %", "depth 100 %"), "depth in the context", (0, 50, 100)),
        (("1 tokens", "2 tokens", "12,345 tokens"), "tokens", (1, 2, 12345)),
    ],
)
def test_the_number_of_a_group(groups: tuple[str, ...], label: str, numbers: tuple[float, ...]) -> None:
    (panel,) = found(groups)
    assert (panel.places.label, panel.places.numbers, panel.part) == (label, numbers, "")
    assert all(list(line.x) == list(numbers) for line in panel.lines)


def test_bare_numbers_are_learning_rates_where_the_arms_say_so() -> None:
    groups = ("0.001", "1e-05", "0.1")
    (panel,) = found(groups, **{group: float(group) for group in groups})
    assert (panel.places.label, panel.places.numbers) == ("learning rate", (1e-5, 1e-3, 0.1))
    assert panel.places.texts == ("1e-05", "0.001", "0.1")
    (panel,) = found(groups)
    assert panel.places.label == ""


def test_what_else_a_group_says_is_a_figure_of_its_own() -> None:
    sizes, tokens = ("0.06M", "0.5M"), ("100", "2,000", "30,000")
    drawn = found([f"{size}, {count} tokens" for size in sizes for count in tokens])
    assert [(panel.part, panel.places.label) for panel in drawn] == [("0.06M", "tokens"), ("0.5M", "tokens")]
    noisy = found([f"noise {noise}, {count} shots" for noise in (0, 0.4) for count in (2, 8, 32)])
    assert [(panel.part, panel.places.label) for panel in noisy] == [("noise 0", "shots"), ("noise 0.4", "shots")]


def test_needles_are_drawn_for_each_number_asked_for() -> None:
    cells = ("N1 R1", "N2 R1", "N2 R2", "N4 R1", "N4 R2", "N6 R2")
    drawn = found(cells)
    assert [(panel.part, panel.places.label, panel.places.numbers) for panel in drawn] == [
        ("R1", "needles", (1, 2, 4)),
        ("R2", "needles", (2, 4, 6)),
    ]
    by_depth = found([f"{cell}, depth {depth} %" for cell in ("N1 R1", "N2 R2") for depth in (0, 50, 100)])
    assert [(panel.part, panel.places.label) for panel in by_depth] == [
        ("N1 R1", "depth in the context"),
        ("N2 R2", "depth in the context"),
    ]


def test_what_is_the_same_everywhere_is_no_line() -> None:
    """Of each figure by itself: one needle is found at every depth, of two it depends."""
    depths = ("depth 0 %", "depth 50 %", "depth 100 %")
    easy = [replace(record, value=1.0) for record in records([f"N1 R1, {depth}" for depth in depths])]
    hard = records([f"N2 R2, {depth}" for depth in depths])
    assert [panel.part for panel in panels([*easy, *hard], (), {})] == ["N2 R2"]


def test_names_and_two_numbers_are_no_line() -> None:
    assert found(("0.1", "0.2")) == []
    assert found(("held out", "xsum", "qasper")) == []
    assert list(panels(records(("1", "2", "3"), name="training/seconds"), (), {})) == []
    same = [Result(name="a", arm="diff", value=1.0, seed=0, group=str(number)) for number in range(4)]
    assert list(panels(same, (), {})) == []


def test_lines_are_means_with_bands_over_seeds_and_the_papers_beside_them() -> None:
    groups = ("1 needle", "2 needle", "3 needle")
    paper = [
        Comparison(name="a/b", arm="diff", against="softmax", ours=(0, 0), difference=0, group=group, paper=values)
        for group, values in zip(groups, ((9.0, math.nan), (8.0, 7.0), (7.0, 6.0)), strict=True)
    ]
    (panel,) = panels(records(groups, (1.0, 3.0)), paper, {})
    assert [line.label for line in panel.lines] == ["DIFF", "Transformer"]
    assert list(panel.lines[0].y) == pytest.approx([2.0, 2.1, 2.2])
    assert panel.lines[0].intervals[0] == (1.0, 3.0)
    assert [(line.label, list(line.y)) for line in panel.paper] == [("DIFF", [9.0, 8.0, 7.0])]
    lost = [*records(groups), Result(name="a/b", arm="diff", value=math.nan, seed=2, group=groups[2])]
    (panel,) = panels(lost, (), {})
    assert math.isnan(panel.lines[0].y[2])
    assert panel.lines[0].intervals[2] is None
    axes = bands(panel.lines, panel.places, title="t", ylabel="y").axes[0]
    crosses = [line for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert [list(line.get_xdata()) for line in crosses] == [[3.0]]


def test_one_seed_has_the_intervals_of_its_measurement() -> None:
    own = [
        Result(name="a", arm="diff", value=number, seed=0, group=f"{number} shots", interval=(number - 1, number + 1))
        for number in (1, 2, 3)
    ]
    (panel,) = panels(own, (), {})
    assert (panel.seeds, panel.own_intervals) == (1, True)
    assert panel.lines[0].intervals[1] == (1, 3)


def test_axes_are_logarithmic_where_numbers_span_much() -> None:
    (wide,) = found(("1 bit", "10 bit", "100 bit"))
    (narrow,) = found(("1 bit", "2 bit", "4 bit"))
    drawn = [bands(panel.lines, panel.places, title="t", ylabel="y").axes[0] for panel in (wide, narrow)]
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
    said = {text.get_text().strip() for text in axes.texts}
    assert {"diverged", "not known", "× −400"} <= said
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
    (depths,) = found(("0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %"))
    axes = bands(depths.lines, depths.places, title="t", ylabel="y").axes[0]
    assert axes.get_xscale() == "linear"
    assert [text.get_text() for text in axes.get_xticklabels()][-1] == "80–100 %"
