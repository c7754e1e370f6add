"""Shows the demo on stderr: what to expect of it, and both validation curves in a terminal while the models train."""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from time import monotonic
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from diff_lab.cli.recipe_options import fill_text
from diff_lab.experiments.demo import DemoPart, DemoProgress
from diff_lab.record import Result
from diff_lab.report.run_watch import TerminalPanel, WatchedRun, picture
from diff_lab.report.summary import learning_sentences, loss_sentences
from diff_lab.report.wording import variant_label
from diff_lab.train import Progress

_TITLES = {"retrieval": "Finding needles", "language": "Language"}
_LINE_SECONDS = 30  # between two lines of a log
_DRAWING_SECONDS = 1.0  # between two drawings; one that takes long is waited for ten times as long
_MOST_WIDTH, _MOST_HEIGHT = 110, 20  # characters of the curves


class DemoDisplay(DemoProgress):
    """Draws the validation of both models as they go, with the time left; without a terminal, a line now and then.

    A context manager, which takes the drawing away however the demo ends.
    """

    def __init__(self, messages: Console) -> None:
        self._console = messages
        self._live: Live | None = None
        self._parts: list[DemoPart] = []
        self._part: DemoPart | None = None
        self._watched: list[WatchedRun] = []
        self._next = -math.inf

    def __enter__(self) -> "DemoDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_drawing()

    def expect(self, parts: Sequence[DemoPart], workers: int) -> None:
        self._parts = list(parts)
        described = [
            vars(part) | {"title": _TITLES[part.task], "time": _about(part.seconds), "text": part.text}
            for part in parts
        ]
        total = _about(sum(part.seconds for part in parts))
        text = fill_text("demo_expectations.txt", parts=described, workers=workers, total=total)
        self._console.print(f"{text}\n", markup=False, soft_wrap=True)

    def begin(self, part: DemoPart) -> None:
        self._parts = [later for later in self._parts if later is not part]
        self._part = part
        self._watched = [WatchedRun(folder, variant_label(variant)) for variant, folder in part.runs.items()]
        self._next = -math.inf
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
            self._draw()

    def run(self, name: str) -> Progress:
        return _RunOfDemo(self, name)

    def tell(self, message: str) -> None:
        self._console.print(message, markup=False, soft_wrap=True)

    def end(self, records: Sequence[Result]) -> None:
        """Leaves the curves as they are at the end, and says what they show."""
        part = self._part
        assert part is not None  # it has begun
        self._end_drawing()
        if self._console.is_terminal:
            self._console.print(self._picture())
        tokens = part.recipe.data.batch_size * part.recipe.data.length
        for sentence in (*learning_sentences(records, part.baselines), *loss_sentences(records, tokens)):
            self.tell(sentence)
        self.tell("")
        self._part = None

    def show(self) -> None:
        """Draw, or in a log say, how both models stand, if the last time is a while ago."""
        if self._part is None or monotonic() < self._next:
            return
        if self._live is not None:
            began = monotonic()
            self._draw()
            self._next = monotonic() + max(_DRAWING_SECONDS, 10 * (monotonic() - began))
        elif not self._console.is_terminal:
            self._read()
            self.tell(self._line())
            self._next = monotonic() + _LINE_SECONDS

    def _draw(self) -> None:
        if self._live is not None:
            time_left = Text(f"{self._title()}: {self._time_left()}", style="bold")
            self._live.update(Group(time_left, self._picture()), refresh=True)

    def _end_drawing(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _read(self) -> None:
        for run in self._watched:
            run.read()

    def _picture(self) -> Text:
        assert self._part is not None
        self._read()
        terminal = shutil.get_terminal_size()
        width, height = min(_MOST_WIDTH, terminal.columns), min(_MOST_HEIGHT, terminal.lines - 3)
        return picture(self._watched, width, height, time.time(), [_panel(self._part)], to_the_end=True)

    def _title(self) -> str:
        assert self._part is not None
        return _TITLES[self._part.task]

    def _time_left(self) -> str:
        """Of this part and of all: by the speed so far or, before there is one, by what was measured beforehand."""
        assert self._part is not None
        known = [seconds for run in self._watched if (seconds := run.time_left()) is not None]
        here = max(known, default=self._part.seconds)
        text = f"{_about(here)} left"
        later = sum(part.seconds for part in self._parts)
        return f"{text}, {_about(here + later)} in all" if self._parts else text

    def _line(self) -> str:
        """How both models stand, in a line."""
        assert self._part is not None
        key = _panel(self._part).key
        states = []
        for run in self._watched:
            values = [line[key] for line in run.lines if isinstance(line.get(key), int | float)]
            step = f"step {run.lines[-1]['step']:,} of {run.steps:,}" if run.lines and run.steps else "not begun"
            value = f", {key.replace('/', ' ')} {values[-1]:.3f}" if values else ""
            states.append(f"{run.label} {step}{value}")
        return f"{self._title()}: {'; '.join(states)}; {self._time_left()}"


class _RunOfDemo(Progress):
    """One of the models that train, whose steps move the display."""

    def __init__(self, display: DemoDisplay, name: str) -> None:
        self._display, self._name = display, name

    def start(self, total: int, description: str) -> None:
        self._display.show()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._display.show()

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self._display.show()

    def tell(self, message: str) -> None:
        self._display.tell(f"{self._name}: {message}")


def _panel(part: DemoPart) -> TerminalPanel:
    """What is drawn of a task."""
    if part.levels:
        levels = tuple(part.levels.items())
        return TerminalPanel("validation/accuracy", "validation accuracy", limits=(0.0, 1.0), levels=levels)
    return TerminalPanel("validation/loss", "validation loss (nats per token)")


def _about(seconds: float) -> str:
    """A time that is not known well: "about 40 s", "about 3 min"."""
    return f"about {max(10, 10 * round(seconds / 10))} s" if seconds < 85 else f"about {seconds / 60:.0f} min"
