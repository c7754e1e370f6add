"""Panels of few rows: each on its own scale, with levels, intervals, and the better side shaded."""

import math

from matplotlib.colors import to_hex

from diff_transformer.lab.report.figures import PAGE, THEME, svg
from panel_figure import Dot, Panel, PanelRow, panels

NAMES = {"diff": "DIFF", "softmax": "Transformer"}
BOTH = (Dot("diff", 0.9, (0.88, 0.92)), Dot("softmax", 0.8, None, is_open=True))
ACCURACY = Panel("found", (PanelRow("2 needles", BOTH, {"chance": 0.06, "floor": 0.5}, "yes"),), limits=(0, 1))
RATIO = Panel("steps", (PanelRow("to .9", (Dot("diff", 0.5, (0.4, 2.5)),)),), is_ratio=True, neutral=1.0, better="left")
LOSS = Panel("loss", (PanelRow("a", (Dot("diff", 0.2, (0.1, math.nan)),)), PanelRow("b", ())), neutral=0.0, better="")


def test_every_panel_has_its_scale() -> None:
    first, second, third = panels([ACCURACY, RATIO, LOSS], NAMES).axes
    assert first.get_xlim() == (0, 1)
    assert second.get_xscale() == "log"
    low, high = second.get_xlim()
    assert low < 0.4 < 2.5 < high
    low, high = third.get_xlim()
    assert low < 0.0 < 0.2 < high


def test_dots_intervals_and_levels_stand_where_they_are() -> None:
    axes = panels([ACCURACY], NAMES).axes[0]
    lines = [[float(x) for x in line.get_xdata()] for line in axes.lines]
    assert [0.06, 0.06] in lines
    assert [0.5, 0.5] in lines
    assert [0.88, 0.92] in lines
    dots = [line for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata()) == 1]
    assert [line.get_xdata()[0] for line in dots] == [0.9, 0.8]
    assert [to_hex(line.get_markeredgecolor()) for line in dots] == [THEME["diff"][0], THEME["softmax"][0]]
    assert [to_hex(line.get_markerfacecolor()) for line in dots] == [THEME["diff"][0], PAGE]
    assert {"2 needles", "yes", "chance", "floor"} <= {text.get_text() for text in axes.texts}


def test_the_better_side_of_the_neutral_line_is_shaded() -> None:
    axes = panels([RATIO], NAMES).axes[0]
    assert [1.0, 1.0] in [list(line.get_xdata()) for line in axes.lines]
    (shade,) = axes.collections
    xs = [float(x) for x, _ in shade.get_paths()[0].vertices]
    assert max(xs) == 1.0
    assert min(xs) == axes.get_xlim()[0]
    assert panels([ACCURACY], NAMES).axes[0].collections[:] == []


def test_a_bound_is_an_arrow_to_its_side() -> None:
    row = PanelRow("to .5", (Dot("diff", 0.5, bound="below"),))
    axes = panels([Panel("steps", (row,), is_ratio=True, neutral=1.0, better="left")], NAMES).axes[0]
    low = axes.get_xlim()[0]
    arrows = [line for line in axes.lines if line.get_marker() == "<"]
    assert [float(line.get_xdata()[0]) for line in arrows] == [low]
    assert [0.5, low] in [[float(x) for x in line.get_xdata()] for line in axes.lines]
    assert not [line for line in axes.lines if line.get_marker() == "o" and len(line.get_xdata())]


def test_names_of_levels_stand_where_there_is_space() -> None:
    row = PanelRow("6 needles", BOTH, {"chance": 0.06, "floor": 0.28, "by elimination": 0.3})
    axes = panels([Panel("found", (row,), limits=(0, 1))], NAMES).axes[0]
    sides = {text.get_text(): text.get_ha() for text in axes.texts if text.get_text() in row.levels}
    assert sides == {"chance": "left", "floor": "right", "by elimination": "left"}
    crowded = PanelRow("6 needles", BOTH, {"chance": 0.8, "floor": 0.88, "by elimination": 0.9})
    axes = panels([Panel("found", (crowded,), limits=(0, 1))], NAMES).axes[0]
    assert "floor" not in {text.get_text() for text in axes.texts}
    assert [0.88, 0.88] in [list(line.get_xdata()) for line in axes.lines], "its line is there"


def test_an_interval_that_is_not_known_is_not_drawn() -> None:
    lines = [list(line.get_xdata()) for line in panels([LOSS], NAMES).axes[0].lines]
    assert not any(math.isnan(x) for line in lines for x in line)


def test_the_legend_names_the_variants() -> None:
    text = svg(panels([ACCURACY, RATIO], NAMES))
    assert "DIFF" in text
    assert "Transformer" in text
    assert "var(--diff)" in text
