"""Reads how training runs stand while they go on, and draws their curves in a terminal, in panels of braille dots."""

import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.text import Text

from diff_lab.report.pages import names_of, runs_in
from diff_transformer.storage.files import parse_metrics_line

# A run that has written nothing for so long, in seconds and in the usual time between two lines, has probably ended.
_SILENCE = 60.0
_LINES_OF_SILENCE = 5
_RECENT = 20  # lines that the speed is computed from
# Okabe and Ito's colours, told apart by every kind of colour vision, those that show on black as on white.
_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442")
# Layers are ordered: a ramp from blue to orange.
_FIRST_LAYER, _LAST_LAYER = ColorTriplet(86, 180, 233), ColorTriplet(230, 159, 0)
# Number of a line → what it is multiplied with in a run's heading, and the words around it.
_HEADED = {"tokens_per_second": (1.0, "{} tokens/s"), "mfu": (100.0, "MFU {} %"), "memory": (2.0**-30, "{} GiB")}
_AXIS = 8  # characters left of a panel's curves
_LEAST_WIDTH, _LEAST_HEIGHT = 30, 4  # of a panel, in characters
_SHAPE = 4.0  # a panel's width over its height, in characters, that is wanted
_NAMED = 3  # newest numbers in a panel's title
_LAYERED = 400  # lines from which the curves of layers are drawn; there may be many layers
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a braille character, by row and column
_BRAILLE = 0x2800


class WatchedRun:
    """What a run has logged so far, and how it stands: the `lines` of its metrics that `read` has seen.

    `steps` is how many steps it is to have; None where its recipe does not say so.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self.lines: list[dict[str, Any]] = []
        self.steps: int | None = None
        self._end = 0  # of what has been read, in bytes
        self._last = b""  # the line before it

    def read(self) -> None:
        """Look for what is new. A file that is not what it was, as after a resumption, is read from its beginning.

        Raises ValueError where a line, other than one that is being written, is none of a `metrics.jsonl`.
        """
        recipe, path = self.folder / "recipe.yaml", self.folder / "metrics.jsonl"
        steps = None
        # There may be no recipe, or only the half of one as yet.
        with contextlib.suppress(FileNotFoundError, TypeError, KeyError, yaml.YAMLError):
            steps = yaml.safe_load(recipe.read_text(encoding="utf-8", errors="replace"))["train"]["steps"]
        self.steps = steps if isinstance(steps, int) else None
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self.lines, self._end, self._last = [], 0, b""
            file.seek(self._end)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written
                    break
                origin = f"{path}, line {len(self.lines) + 1}"
                self.lines.append(parse_metrics_line(text.decode(errors="replace"), origin))
                self._end, self._last = self._end + len(text), text

    @property
    def is_finished(self) -> bool:
        """Whether the trained model is there: it is written when all is done, and whole."""
        return (self.folder / "model").is_dir()

    def state(self, now: float) -> str:
        """How the run stands at `now`, in seconds since 1970. Only a finished one says so: others fall silent."""
        if self.is_finished:
            return "finished"
        paths = [self.folder / name for name in ("recipe.yaml", "metrics.jsonl", "checkpoints")]
        silence = now - max((path.stat().st_mtime for path in paths if path.exists()), default=now)
        between = self._seconds(self.lines[-2:]) or 0.0
        is_usual = silence <= max(_SILENCE, _LINES_OF_SILENCE * between)
        return "running" if is_usual else f"no news for {duration(silence)}, stopped?"

    def time_left(self) -> float | None:
        """Seconds of training that are left at the recent speed, if that is known."""
        recent = self.lines[-_RECENT:]
        seconds = self._seconds(recent)
        if self.steps is None or seconds is None:
            return None
        first, last = (line["step"] for line in (recent[0], recent[-1]))
        return (self.steps - last) * seconds / (last - first)

    def _seconds(self, lines: Sequence[dict[str, Any]]) -> float | None:
        """Seconds of training between the first and the last of some lines."""
        ends = [line["seconds"] for line in (lines[0], lines[-1]) if "seconds" in line] if len(lines) > 1 else []
        return ends[1] - ends[0] if len(ends) == 2 else None


def watched(folders: Sequence[Path]) -> list[WatchedRun]:
    """The runs in `folders`, not read yet: a run's own folder, which may have logged nothing so far, or a demo's."""
    runs: list[Path] = []
    for folder in folders:
        has_begun = any((folder / name).is_file() for name in ("recipe.yaml", "metrics.jsonl"))
        runs += [folder] if has_begun else runs_in(folder)
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"Each run can be watched once, got {', '.join(map(str, runs))}.")
    return [WatchedRun(run, name) for run, name in zip(runs, names_of(runs), strict=True)]


def duration(seconds: float) -> str:
    """Seconds in words of at most two units."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


@dataclass(frozen=True)
class TerminalPanel:
    """What is drawn together: a number of `metrics.jsonl`, or a list with one for each layer.

    The numbers of the same name in validation are drawn as points over the curve. Of numbers that fall together the
    largest is drawn (`peaks`), or their mean. With `ratios` equal distances are equal ratios. `limits` are the ends of
    the axis, by default those of the numbers. `levels`, each with its name, are lines across the panel.
    """

    key: str
    title: str
    peaks: bool = False
    ratios: bool = False
    limits: tuple[float, float] | None = None
    levels: tuple[tuple[str, float], ...] = ()


PANELS = (
    TerminalPanel("loss", "loss (o: validation)"),
    TerminalPanel("grad_norm", "gradient norm", peaks=True, ratios=True),
    TerminalPanel("norm_input_rms", "norm input RMS", peaks=True),
    TerminalPanel("logit_max", "largest logit", peaks=True),
    TerminalPanel("lambdas", "λ"),
    TerminalPanel("lambda_mean", "mean λ"),
    TerminalPanel("learning_rate", "learning rate"),
    TerminalPanel("tokens_per_second", "tokens/s"),
    TerminalPanel("hidden_rms", "residual RMS", peaks=True),
)


@dataclass(frozen=True)
class Curve:
    """Numbers over steps, None where there was none that is finite; `mark` stands at its end."""

    steps: Sequence[int]
    values: Sequence[float | None]
    colour: str
    mark: str
    of_run: bool  # the mark is a run's number, not a layer's
    as_points: bool


def picture(
    runs: Sequence[WatchedRun],
    width: int,
    height: int,
    now: float,
    panels: Sequence[TerminalPanel] = PANELS,
    *,
    to_the_end: bool = False,
) -> Text:
    """Runs in `width` × `height` characters: a line or two for each, and below them as many of the panels as fit.

    The steps are those that were logged, or with `to_the_end` all that the runs are to have.
    """
    lines = [line for number, run in enumerate(runs, 1) for line in _heading(number, run, len(runs), width, now)]
    drawn = [(panel, curves) for panel in panels if (curves := list(_curves(panel, runs)))]
    steps = [step for _, curves in drawn for curve in curves for step in curve.steps]
    rows = height - len(lines) - 1  # the last line is that of the steps
    if drawn and rows >= _LEAST_HEIGHT:
        columns, each = _grid(len(drawn), width, rows)
        first, last = min(steps), max(steps)
        if to_the_end:
            first, last = 0, max([last, *(run.steps or 0 for run in runs)])
        across = (width - 2 * (columns - 1)) // columns
        shown = [_panel(*panel, across, each, first, last) for panel in drawn[: columns * (rows // each)]]
        for start in range(0, len(shown), columns):
            lines += [Text("  ").join(parts) for parts in zip(*shown[start : start + columns], strict=True)]
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
    steps = f" of {run.steps:,}" if run.steps else ""
    parts = [run.state(now), f"step {run.lines[-1]['step']:,}{steps}" if run.lines else "nothing has been logged yet"]
    seconds = run.time_left()
    if seconds is not None and not run.is_finished:
        parts.append(f"{duration(seconds)} left")
    for key, (factor, words) in _HEADED.items():
        numbers = [line[key] for line in run.lines if isinstance(line.get(key), int | float)]
        parts += [words.format(compact(factor * number)) for number in numbers[-1:]]
    name = f"{number} {run.label}" if runs > 1 else run.label
    line = Text.assemble((name, f"bold {_COLOURS[(number - 1) % len(_COLOURS)]}"), ": ", parts[0])
    for part in parts[1:]:
        if len(line) + len(part) + 3 > width:
            yield line
            line = Text(" ")
        line.append(f" · {part}")
    yield line


def _curves(panel: TerminalPanel, runs: Sequence[WatchedRun]) -> Iterator[Curve]:
    """The curves of a panel; of those that have no number at all, none."""
    for number, run in enumerate(runs):
        mark = str(number + 1) if len(runs) > 1 else ""
        for key in (panel.key, f"validation/{panel.key}"):
            # A key with null is a number that was not finite: the curve has a gap there.
            logged = [line for line in run.lines if key in line]
            if layered := [line for line in logged if isinstance(line[key], list)]:
                logged = layered[:: -max(1, len(layered) // _LAYERED)][::-1]
            curves = list(zip_longest(*(line[key] if layered else [line[key]] for line in logged)))
            if all(value is None for values in curves for value in values):
                continue
            for layer, values in enumerate(curves):
                of_layer = blend_rgb(_FIRST_LAYER, _LAST_LAYER, layer / max(1, len(curves) - 1))
                of_run = _COLOURS[number % len(_COLOURS)]
                colour = Color.from_triplet(of_layer).name if layered and not mark else of_run
                end = mark or (str(layer + 1) if layered else "")
                yield Curve([line["step"] for line in logged], values, colour, end, bool(mark), key != panel.key)


def _grid(panels: int, width: int, rows: int) -> tuple[int, int]:
    """How many panels stand side by side, and how many lines each has."""
    most = width // _LEAST_WIDTH
    grids = [(columns, rows // math.ceil(panels / columns)) for columns in range(1, min(panels, most) + 1)]
    fitting = [grid for grid in grids if grid[1] >= _LEAST_HEIGHT] or [(max(1, most), _LEAST_HEIGHT)]
    return min(fitting, key=lambda grid: abs(math.log(width / grid[0] / grid[1] / _SHAPE)))


def _panel(panel: TerminalPanel, curves: Sequence[Curve], width: int, height: int, first: int, last: int) -> list[Text]:
    """A panel as lines of the same width: its title with the newest numbers, and the curves."""
    runs = {curve.mark for curve in curves if curve.of_run}
    marks = min(len(runs), _NAMED) if runs else max(len(curve.mark) for curve in curves)
    across, down = max(1, width - _AXIS - 1 - marks), height - 1
    numbers = [value for curve in curves for value in curve.values if value is not None]
    low, high = panel.limits or (min(numbers), max(numbers))
    scale: Callable[[float], float] = math.log if panel.ratios and low > 0 else float
    least, most = scale(low), scale(high)
    if most - least <= 1e-9 * max(abs(most), 1e-30):  # a flat curve stands in the middle
        least, most = least - 0.5, most + 0.5

    def dots(curve: Curve) -> Iterator[tuple[int, int] | None]:
        """The dots (column, row from the top) of a curve, one a column; None at a gap."""
        by_column: defaultdict[int, list[float]] = defaultdict(list)
        for step, value in zip(curve.steps, curve.values, strict=True):
            column = round((step - first) / max(1, last - first) * (2 * across - 1))
            by_column[column] += [] if value is None else [(scale(value) - least) / (most - least)]
        for column, heights in sorted(by_column.items()):
            height = (max(heights) if panel.peaks else fmean(heights)) if heights else None
            yield None if height is None else (column, round((1 - height) * (4 * down - 1)))

    levels = {round((1 - (scale(value) - least) / (most - least)) * (down - 1)): name for name, value in panel.levels}
    labels = {row: name[:_AXIS] for row, name in levels.items()} | {0: compact(high), down - 1: compact(low)}
    lines = [_title(panel, curves, width)]
    paths = [(curve, list(dots(curve))) for curve in curves]
    for row, cells in enumerate(_braille(paths, across, down, marks, levels)):
        label = labels.get(row, "")
        lines.append(Text.assemble((f"{label:>{_AXIS}}│", "dim"), cells))
    return lines


def _title(panel: TerminalPanel, curves: Sequence[Curve], width: int) -> Text:
    """The title and the newest numbers: each run's, or the smallest and the largest where there are many."""
    newest = [curve.values[-1] for curve in curves if not curve.as_points]
    finite = [value for value in newest if value is not None]
    if len(newest) <= _NAMED:
        numbers = " | ".join("not finite" if value is None else compact(value) for value in newest)
    else:
        numbers = f"{compact(min(finite))} … {compact(max(finite))}" if finite else ""
        numbers += f" ({len(newest) - len(finite)} not finite)" if len(finite) < len(newest) else ""
    text = Text.assemble((panel.title, "bold"), f" {numbers}")
    text.truncate(width, overflow="ellipsis", pad=True)
    return text


def _braille(
    curves: Sequence[tuple[Curve, Sequence[tuple[int, int] | None]]],
    across: int,
    down: int,
    marks: int,
    levels: Collection[int] = (),
) -> Iterator[Text]:
    """Lines of braille characters, 2 by 4 dots and a colour each, which join a curve's dots; right of them marks.

    The lines with a level are dashed where there is no curve.
    """
    dots: defaultdict[tuple[int, int], int] = defaultdict(int)  # of each character (row, column)
    points: set[tuple[int, int]] = set()
    colours: dict[tuple[int, int], str] = {}
    ends: defaultdict[int, dict[str, str]] = defaultdict(dict)  # of each line: mark → colour
    for curve, path in curves:
        for before, dot in pairwise([None, *path]):
            if dot is None:
                continue
            if curve.as_points:
                points.add((dot[1] // 4, dot[0] // 2))
            for x, y in [dot] if curve.as_points else _between(before or dot, dot):
                dots[y // 4, x // 2] |= _DOTS[y % 4][x % 2]
                colours[y // 4, x // 2] = curve.colour
        if path and path[-1] is not None and not curve.as_points:
            in_line = ends[path[-1][1] // 4]
            if curve.of_run or not in_line:  # two layers' numbers side by side would read as one
                in_line[curve.mark] = curve.colour
    for row in range(down):
        line = Text()
        for cell in ((row, column) for column in range(across)):
            letter = chr(_BRAILLE + dots[cell]) if cell in dots else "╌" if row in levels else " "
            line.append("o" if cell in points else letter, colours.get(cell, "dim" if row in levels else None))
        for mark, colour in ends[row].items():
            line.append(mark, colour)
        line.truncate(across + marks, pad=True)
        yield line


def _between(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The dots of the straight line from `start` to `end`."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    for step in range(steps + 1):
        x, y = (a + round((b - a) * step / steps) for a, b in zip(start, end, strict=True))
        yield x, y
