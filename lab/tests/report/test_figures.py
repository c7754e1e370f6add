import itertools
import math
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from diff_lab.record import AttentionExample
from diff_lab.report import figures
from diff_lab.report.figures import Series

# Inside a page an <svg> needs none.
NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def texts(drawing: str) -> list[str]:
    return [
        "".join(node.itertext()).strip() for node in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")
    ]


def contrast(first: str, second: str) -> float:
    """WCAG 2's contrast ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.fixture
def drawing() -> Figure:
    lines = [
        Series("DIFF", [1, 2], [3.0, 2.0], **figures.variant_style("diff")),
        Series("Other <b>", [1, 2], [3.0, 1.0]),
    ]
    return figures.curves(lines, title="Loss & more", ylabel="nats")


def test_an_svg_keeps_its_text_takes_its_colours_from_the_page_and_loads_nothing(drawing: Figure) -> None:
    text = figures.svg(drawing)
    assert {"Loss & more", "nats", "training step", "DIFF", "Other <b>"} <= set(
        texts(text.replace("<svg ", f"<svg {NAMESPACE} ", 1))
    )
    assert "var(--diff)" in text
    assert "var(--ink)" in text
    for light, _ in figures.THEME.values():
        assert light not in text
    assert "http" not in text
    assert "<metadata" not in text


def test_labels_of_any_kind_are_drawn_as_they_are() -> None:
    labels = ["$\\frac", "模型", "x" * 500]
    lines = [Series(label, [1], [1.0]) for label in labels]
    drawn = texts(figures.svg(figures.curves(lines, title="$", ylabel="y")).replace("<svg ", f"<svg {NAMESPACE} ", 1))
    assert {"$\\frac", "模型", "…" + "x" * 31, "$"} <= set(drawn)


def test_a_busy_machine_is_no_warning(drawing: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib warns where it took more than a second to place a legend."""
    seconds = itertools.count(step=2)
    monkeypatch.setattr("matplotlib.legend.time.perf_counter", lambda: next(seconds))
    assert "DIFF" in figures.svg(drawing)


def test_the_same_figure_gives_the_same_svg(drawing: Figure) -> None:
    again = figures.curves(
        [
            Series("DIFF", [1, 2], [3.0, 2.0], **figures.variant_style("diff")),
            Series("Other <b>", [1, 2], [3.0, 1.0]),
        ],
        title="Loss & more",
        ylabel="nats",
    )
    assert figures.svg(drawing) == figures.svg(again)


def test_drawing_leaves_the_users_matplotlib_alone(drawing: Figure) -> None:
    before = dict(mpl.rcParams)
    figures.svg(figures.curves([Series("a", [1], [1.0])], title="t", ylabel="y"))
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", [name for name in figures.THEME if name not in ("rule", "page")])
def test_colours_stand_out_from_both_pages(name: str) -> None:
    light, dark = figures.THEME[name]
    assert contrast(light, "#ffffff") >= 3
    assert contrast(dark, "#14171c") >= 3


def test_running_mean_is_a_mean_and_keeps_the_length() -> None:
    values = [float(step % 2) for step in range(400)]
    smooth = figures.running_mean(values)
    assert len(smooth) == 400
    assert all(abs(value - 0.5) < 0.06 for value in smooth)
    assert figures.running_mean([3.0]) == [3.0]
    assert math.isnan(figures.running_mean([1.0, math.nan, 1.0])[1])


def test_a_map_blanks_what_is_hidden_and_centres_its_colours_on_zero() -> None:
    rows = [[1.0, 0.0, 0.0, 0.0], [0.3, 0.7, 0.0, 0.0], [-0.2, 0.7, 0.5, 0.0], [0.1, 0.3, 0.1, 0.5]]
    positions = {"query_position": 2, "answer_positions": (1,), "needle_positions": (0, 1)}
    tokens = ("k0", "v1", "k0", "k2")
    example = AttentionExample(tokens=tokens, layers={}, heads={}, maps={}, lambda_=0.5, **positions)
    figure = figures.attention_map(rows, example, title="A", largest=1.0)
    axes = figure.axes[0]
    image = axes.images[0]
    shown = image.get_array()
    assert shown.shape == (2, 4), "the rows of the keys that are asked for"
    assert math.isnan(shown.filled(math.nan)[0, 3])
    assert shown[0, 0] == -0.2
    assert image.norm(0.0) == pytest.approx(0.5)
    # Where the weight is 0 the page shows through; the largest of either sign covers it.
    assert [image.cmap(image.norm(value))[3] for value in (-1.0, 0.0, 1.0)] == pytest.approx([1.0, 0.0, 1.0], abs=0.01)
    negative, positive = (image.cmap(image.norm(value)) for value in (-1.0, 1.0))
    assert positive[2] > positive[0], "blue, as in the explorer"
    assert negative[0] > negative[2], "orange"
    assert image.norm(-0.25) + image.norm(0.25) == pytest.approx(1.0)
    assert image.norm(0.25) == pytest.approx(0.75)
    assert [tuple(line.get_xdata()) for line in axes.lines] == [(1,)], "the answer is marked"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["k0 v1"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["▸ k0?", "k2?"]


def test_a_long_title_is_wrapped_and_lies_within_the_figure() -> None:
    title = "Language on Python code, preset evening: difference in validation loss, 0.26M over training"
    figure = figures.curves([Series("DIFF", [1, 2], [-0.02, 3.0])], title=title, ylabel="first − second (nats/token)")
    assert figure.axes[0].get_title(loc="left").replace("\n", " ") == title
    figure.draw_without_rendering()
    assert figure.get_tightbbox().x1 <= figure.get_figwidth()


def test_lambdas_label_their_layers_without_covering_each_other() -> None:
    layers = [[0.5, 0.5 + 0.001 * layer] for layer in range(4)]
    figure = figures.lambdas([1, 100], layers, [0.4] * 4, title="λ")
    heights = [text.get_position()[1] for text in figure.axes[0].texts]
    assert [text.get_text() for text in figure.axes[0].texts] == [f"layer {number}" for number in range(1, 5)]
    assert all(upper - lower > 0.0001 for lower, upper in itertools.pairwise(heights))
    many = figures.lambdas([1], [[0.1 * layer] for layer in range(28)], [], title="λ")
    assert 4 <= len(many.axes[0].texts) <= 8
