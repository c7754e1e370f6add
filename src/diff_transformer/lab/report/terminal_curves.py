"""Draws the curves of training runs in a terminal, side by side in small panels of braille dots."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean

from rich.color import Color
from rich.text import Text

from diff_transformer.lab.report.watched_run import WatchedRun, duration

# Okabe and Ito's colours, told apart by every kind of colour vision, those that show on black as on white.
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442")
_FIRST_LAYER, _LAST_LAYER = (86, 180, 233), (230, 159, 0)  # layers are ordered: a ramp from blue to orange
_AXIS = 8  # characters left of a panel's curves
_LEAST_WIDTH, _LEAST_HEIGHT = 30, 4  # of a panel, in characters
_SHAPE = 4.0  # a panel's width over its height, in characters, that is wanted
_NAMED = 3  # newest numbers in a panel's title
_LAYERED = 400  # lines from which the curves of layers are drawn; there may be many layers
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
_BRAILLE = 0x2800


@dataclass(frozen=True)
class Panel:
    """What is drawn in one place.

    Attributes:
        key: its name in `metrics.jsonl`: a number, or a list with one for each layer.
        title: what is written above.
        points: another name, whose numbers are drawn as points over the curve.
        peaks: whether the largest of the numbers that fall together is drawn, and not their mean.
        ratios: whether equal distances are equal ratios.
    """

    key: str
    title: str
    points: str | None = None
    peaks: bool = False
    ratios: bool = False


PANELS = (
    Panel("loss", "loss (o: validation)", points="validation/loss"),
    Panel("grad_norm", "gradient norm", peaks=True, ratios=True),
    Panel("norm_input_rms", "norm input RMS", peaks=True),
    Panel("logit_max", "largest logit", peaks=True),
    Panel("lambdas", "λ"),
    Panel("lambda_mean", "mean λ"),
    Panel("learning_rate", "learning rate"),
    Panel("tokens_per_second", "tokens/s"),
    Panel("hidden_rms", "residual RMS", peaks=True),
)


@dataclass(frozen=True)
class Curve:
    """Numbers over steps, None where there was none that is finite; `mark` stands at its end."""

    steps: Sequence[int]
    values: Sequence[float | None]
    colour: str
    mark: str
    of_run: bool = False  # the mark is a run's number, not a layer's
    as_points: bool = False


def picture(runs: Sequence[WatchedRun], width: int, height: int, now: float) -> Text:
    """Draw runs, a line or two for each, and below them as many panels as fit.

    Args:
        runs: they are overlaid; with several, each has a number and a colour.
        width: characters in a line.
        height: lines.
        now: the time, in seconds since 1970.
    """
    lines = [line for number, run in enumerate(runs, 1) for line in _heading(number, run, len(runs), width, now)]
    drawn = [(panel, curves) for panel in PANELS if (curves := list(_curves(panel, runs)))]
    steps = [step for _, curves in drawn for curve in curves for step in curve.steps]
    rows = height - len(lines) - 1  # the last line is that of the steps
    if drawn and rows >= _LEAST_HEIGHT:
        columns, each = _grid(len(drawn), width, rows)
        first, last = min(steps), max(steps)
        across = (width - 2 * (columns - 1)) // columns
        panels = [_panel(*one, across, each, first, last) for one in drawn[: columns * (rows // each)]]
        for start in range(0, len(panels), columns):
            lines += [Text("  ").join(parts) for parts in zip(*panels[start : start + columns], strict=True)]
        lines.append(Text(f"{'':{_AXIS}} steps {first:,} … {last:,}", style="dim"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines[:height])


def compact(value: float) -> str:
    """A number in at most eight characters: 0.0123, 1234, 12.3k, 1.2e-05."""
    rounded = float(f"{value:.3g}")
    if rounded and not 1e-3 <= abs(rounded) < 1e12:
        return f"{value:.1e}"
    for least, size, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(rounded) >= least:
            return f"{rounded / size:.3g}{letter}"
    return f"{value:.0f}" if abs(rounded) >= 1e3 else f"{rounded:.3g}"


def _heading(number: int, run: WatchedRun, runs: int, width: int, now: float) -> Iterator[Text]:
    """How a run stands, in as many lines as that takes."""
    parts = [run.state(now)]
    if run.lines:
        parts.append(f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else ""))
    else:
        parts.append("nothing has been logged yet")
    left = run.time_left()
    if left is not None and not run.is_finished:
        parts.append(f"{duration(left)} left")
    if (speed := run.latest("tokens_per_second")) is not None:
        parts.append(f"{compact(speed)} tokens/s")
    if (share := run.latest("mfu")) is not None:
        parts.append(f"MFU {100 * share:.3g} %")
    if (memory := run.latest("memory")) is not None:
        parts.append(f"{memory / 2**30:.3g} GiB")
    name = f"{number} {run.label}" if runs > 1 else run.label
    line = Text.assemble((name, f"bold {_colour(number - 1)}"), ": ", parts[0])
    for part in parts[1:]:
        if len(line) + len(part) + 3 > width:
            yield line
            line = Text(" ")
        line.append(f" · {part}")
    yield line


def _curves(panel: Panel, runs: Sequence[WatchedRun]) -> Iterator[Curve]:
    """The curves of a panel; of those that have no number at all, none."""
    for number, run in enumerate(runs):
        mark = str(number + 1) if len(runs) > 1 else ""
        logged = [line for line in run.lines if line.get(panel.key) is not None]
        if logged and isinstance(logged[-1][panel.key], list):
            kept = logged[:: -max(1, len(logged) // _LAYERED)][::-1]
            layers = list(zip_longest(*(line[panel.key] for line in kept)))
            for layer, values in enumerate(layers):
                colour = _colour(number) if mark else _ramp(layer / max(1, len(layers) - 1))
                yield Curve([line["step"] for line in kept], values, colour, mark or str(layer + 1), bool(mark))
            continue
        for key, as_points in ((panel.key, False), (panel.points or "", True)):
            # A key with null is a number that was not finite: the curve has a gap there.
            found = [line for line in run.lines if key in line]
            if any(line[key] is not None for line in found):
                numbers = [line[key] for line in found]
                yield Curve([line["step"] for line in found], numbers, _colour(number), mark, bool(mark), as_points)


def _grid(panels: int, width: int, rows: int) -> tuple[int, int]:
    """How many panels stand side by side, and how many lines each has."""
    best = 1, max(_LEAST_HEIGHT, rows // panels)
    distance = math.inf
    for columns in range(1, min(panels, width // _LEAST_WIDTH) + 1):
        each = rows // math.ceil(panels / columns)
        off = abs(math.log(width / columns / max(each, 1) / _SHAPE))
        if each >= _LEAST_HEIGHT and off < distance:
            best, distance = (columns, each), off
    if distance == math.inf:  # not all fit
        best = max(1, width // _LEAST_WIDTH), _LEAST_HEIGHT
    return best


def _panel(panel: Panel, curves: Sequence[Curve], width: int, height: int, first: int, last: int) -> list[Text]:
    """A panel as lines of the same width: its title with the newest numbers, and the curves."""
    runs = {curve.mark for curve in curves if curve.of_run}
    marks = min(len(runs), _NAMED) if runs else max(len(curve.mark) for curve in curves)
    across, down = width - _AXIS - 1 - marks, height - 1
    numbers = [value for curve in curves for value in curve.values if value is not None]
    ratios = panel.ratios and min(numbers) > 0
    low, high = min(numbers), max(numbers)
    least, most = (math.log(low), math.log(high)) if ratios else (low, high)
    if most - least <= 1e-9 * max(abs(most), 1e-30):  # a flat curve stands in the middle
        least, most = least - 0.5, most + 0.5
    canvas = _Canvas(across, down)
    for curve in curves:
        places = [
            (
                (step - first) / max(1, last - first),
                None if value is None else ((math.log(value) if ratios else value) - least) / (most - least),
            )
            for step, value in zip(curve.steps, curve.values, strict=True)
        ]
        canvas.draw(places, curve, panel.peaks)
    lines = [_title(panel, curves, width)]
    for row, cells in enumerate(canvas.lines(marks)):
        label = compact(high) if row == 0 else compact(low) if row == down - 1 else ""
        lines.append(Text.assemble((f"{label:>{_AXIS}}│", "dim"), cells))
    return lines


def _title(panel: Panel, curves: Sequence[Curve], width: int) -> Text:
    """The title and the newest numbers: each run's, or the smallest and the largest where there are many."""
    newest = [curve.values[-1] for curve in curves if not curve.as_points]
    finite = [value for value in newest if value is not None]
    if len(newest) <= _NAMED:
        said = " | ".join("not finite" if value is None else compact(value) for value in newest)
    else:
        said = f"{compact(min(finite))} … {compact(max(finite))}" if finite else ""
        said += f" ({len(newest) - len(finite)} not finite)" if len(finite) < len(newest) else ""
    text = Text.assemble((panel.title, "bold"), f" {said}")
    text.truncate(width, overflow="ellipsis", pad=True)
    return text


class _Canvas:
    """Braille dots, 2 by 4 to a character, with a colour for each character."""

    def __init__(self, across: int, down: int) -> None:
        self.across, self.down = max(1, across), max(1, down)
        self._dots = [[0] * self.across for _ in range(self.down)]
        self._letters: dict[tuple[int, int], str] = {}
        self._colours: dict[tuple[int, int], str] = {}
        self._marks: dict[int, dict[str, str]] = {}  # of each line: mark → colour

    def draw(self, places: Iterable[tuple[float, float | None]], curve: Curve, peaks: bool) -> None:
        """A curve through places (x, y) of 0 … 1, y upwards; y is None at a gap."""
        gathered: dict[int, list[float | None]] = {}
        for x, y in places:
            gathered.setdefault(round(x * (2 * self.across - 1)), []).append(y)
        dots: list[tuple[int, int] | None] = []
        for column, values in sorted(gathered.items()):
            known = [value for value in values if value is not None]
            height = (max(known) if peaks else fmean(known)) if known else None
            dots.append(None if height is None else (column, round((1 - height) * (4 * self.down - 1))))
        if curve.as_points:
            for dot in dots:
                if dot is not None:
                    self._letters[dot[1] // 4, dot[0] // 2] = "o"
                    self._colours[dot[1] // 4, dot[0] // 2] = curve.colour
            return
        for one, other in pairwise([None, *dots]):
            if other is not None:
                for dot in _between(one or other, other):
                    self._set(*dot, curve.colour)
        if dots and dots[-1] is not None:
            marks = self._marks.setdefault(dots[-1][1] // 4, {})
            if curve.of_run or not marks:  # two layers' numbers side by side would read as one
                marks[curve.mark] = curve.colour

    def lines(self, marks: int) -> Iterator[Text]:
        """The lines from the top, and right of them the marks, `marks` characters wide."""
        for row, cells in enumerate(self._dots):
            line = Text()
            for column, dots in enumerate(cells):
                letter = self._letters.get((row, column), chr(_BRAILLE + dots) if dots else " ")
                line.append(letter, self._colours.get((row, column)))
            for mark, colour in self._marks.get(row, {}).items():
                line.append(mark, colour)
            line.truncate(self.across + marks, pad=True)
            yield line

    def _set(self, x: int, y: int, colour: str) -> None:
        self._dots[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
        self._colours[y // 4, x // 2] = colour


def _between(one: tuple[int, int], other: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of the straight line from `one` to `other`."""
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
    for step in range(steps + 1):
        x, y = (a + round((b - a) * step / steps) for a, b in zip(one, other, strict=True))
        yield x, y


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _ramp(share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(_FIRST_LAYER, _LAST_LAYER, strict=True))
    return Color.from_rgb(*mixed).name
