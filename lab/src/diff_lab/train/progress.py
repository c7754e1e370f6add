"""Tells how training goes: on a console while it runs, and as metrics in lines of JSON and for TensorBoard."""

import copy
import importlib.util
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

from rich import progress as bars
from rich.console import Console

from diff_lab.files import finite, parse_metrics_line

# Names that TensorBoard's curves have otherwise than the lines.
_TAGS = {"lambdas": "lambda"}
LOG_SECONDS = 30  # between two lines of a log, so that a run shows every minute that it is alive
# The time left follows from the speed in the last so many seconds; steps of large models take minutes each.
_SPEED_SECONDS = 24 * 60 * 60


class Progress:
    """Shows how far a run is: a subclass by the methods it overrides, this one nothing. Training never prints."""

    def start(self, total: int, description: str) -> None:
        """Take note that a run of `total` steps begins or resumes."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Take note that `step` steps are done; `loss` is that of the last one."""

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        """Show the results of the evaluation after `step` steps, by their names in the log."""

    def tell(self, message: str) -> None:
        """Show a message about the run, such as its backend, or the steps it skips."""

    def stop(self) -> None:
        """Take note that the run is over, whichever way it ended."""

    def run(self, name: str) -> "Progress":
        """Make the progress of one of several runs, called `name`, which may go at the same time; by default this."""
        return self


class RunProgress(Progress):
    """Shows runs on a console: a bar each if it is a terminal, else lines. A run that has ended leaves a line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[remarks]}", markup=False),
            bars.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            get_time=monotonic,
            speed_estimate_period=_SPEED_SECONDS,
        )
        self._name = ""  # of one of several runs
        self._told: set[str] = set()  # the messages of several runs: what all of them use is told once
        self._task: bars.Task | None = None

    def run(self, name: str) -> "RunProgress":
        one = copy.copy(self)  # with the same bars and messages
        one._name = name
        return one

    def start(self, total: int, description: str) -> None:
        number = self._bars.add_task(self._name or description, total=total, remarks="")
        self._task = next(task for task in self._bars.tasks if task.id == number)
        self._next_line, self._validation = -math.inf, ""
        self._bars.start()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        if self._task is None:
            return
        self._remarks = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._task.id, completed=step, remarks=self._remarks)
        if self._bars.disable and (monotonic() >= self._next_line or step == self._task.total):
            self._next_line = monotonic() + LOG_SECONDS
            self._print(self._line(self._task))

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        for name, value in list(results.items())[:1]:
            self._validation = f", {name.replace('/', ' ')} {value:.3f}"

    def tell(self, message: str) -> None:
        if not self._name or message not in self._told:
            self._told.add(message)
            self._print(message)

    def stop(self) -> None:
        if self._task is None:
            return
        if self._task.completed and not self._bars.disable:
            self._print(self._line(self._task))
        self._bars.remove_task(self._task.id)
        self._task = None
        if not self._bars.tasks:
            self._bars.stop()

    def _line(self, task: bars.Task) -> str:
        time_left = f", {timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
        return f"step {task.completed:.0f} of {task.total:.0f}, {self._remarks}{self._validation}{time_left}"

    def _print(self, message: str) -> None:
        """Print a message, above the bars if there are any."""
        name = self._task.description if self._task is not None else self._name
        self._console.print(f"{name}: {message}" if name else message, markup=False, soft_wrap=True)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker whose library is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"train.trackers names {name!r}, which is not installed: pip install {name}")


class Tracker:
    """A run at Weights & Biases, or in trackio, whose library has the same interface.

    Its project is "diff-transformer" unless the environment names one (WANDB_PROJECT, TRACKIO_PROJECT). A run of the
    same name is continued.
    """

    def __init__(self, library: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        project = os.environ.get(f"{library.upper()}_PROJECT", "diff-transformer")
        place = {"id": name, "dir": str(folder)} if library == "wandb" else {}
        try:
            begin = importlib.import_module(library).init
            run = begin(project=project, name=name, config=dict(settings), resume="allow", **place)
        except Exception as error:  # of the account or the network; the libraries have no class in common
            raise ValueError(f"train.trackers: {library} begins no run: {' '.join(str(error).split())}") from error
        self.log, self.close = run.log, run.finish  # numbers by name, and their step


class Metrics:
    """Writes the metrics of a run into a file, as lines of JSON, into the folder of TensorBoard, and to trackers.

    Those of steps after `step`, the last one that is done, are removed first from the files. The recipe is for the
    trackers. A context manager, which closes all.
    """

    def __init__(self, lines: Path, tensorboard: Path, step: int, trackers: Sequence[str] = (), **recipe: Any) -> None:
        # Not torch's SummaryWriter, whose thread would keep the errors of a full disk to itself.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        if lines.exists():
            end = 0  # of the complete lines up to the step
            with lines.open("rb") as file, suppress(ValueError):  # a power cut may leave anything in the file's place
                for line in file:
                    if not line.endswith(b"\n") or parse_metrics_line(line, str(lines))["step"] > step:
                        break
                    end += len(line)
            os.truncate(lines, end)
        tensorboard.mkdir(exist_ok=True)
        self._folder = lines.parent
        self._file = lines.open("ab", buffering=0)  # a full disk would refuse what was buffered a second time
        # TensorBoard reads the files of a folder in the order of their names.
        self._events = (tensorboard / f"events.out.tfevents.{time.time_ns()}").open("xb", buffering=0)
        self._board, self._event, self._summary = RecordWriter(self._events), event_pb2.Event, summary_pb2.Summary
        self._record(file_version="brain.Event:2")
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # forgets the steps from this one on
        self._record(step=step + 1, session_log=start)
        begun = min(path.suffix for path in tensorboard.iterdir())  # by which resumed runs know theirs again
        self._trackers = [Tracker(each, f"{lines.parent.name}{begun}", lines.parent, recipe) for each in trackers]

    def log(self, line: dict[str, Any]) -> None:
        """Write numbers and remarks by name, with the step under "step". Raises OSError, as on a full disk.

        A list holds a number for each layer, and TensorBoard draws a curve of each; it gets no remarks, and nothing for
        None. A number that is not finite is null in the lines, as JSON has no other way.
        """
        text = json.dumps(finite(line), allow_nan=False) + "\n"
        curves: dict[str, float] = {}
        for name, value in line.items():
            tag = _TAGS.get(name, name)
            if isinstance(value, list):
                curves |= {f"{tag}/layer_{layer:02d}": number for layer, number in enumerate(value, start=1)}
            elif isinstance(value, int | float) and name != "step":
                curves[tag] = value
        values = [self._summary.Value(tag=tag, simple_value=number) for tag, number in curves.items()]
        unwritten = text.encode()
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
            self._record(step=line["step"], summary=self._summary(value=values))
        except OSError as error:
            raise OSError(
                f"The metrics in {str(self._folder)!r} cannot be written ({error.strerror}); the run resumes from its "
                "newest checkpoint, with --resume."
            ) from error
        for tracker in self._trackers:
            tracker.log(curves, line["step"])

    def _record(self, **event: Any) -> None:
        self._board.write(self._event(wall_time=time.time(), **event).SerializeToString())

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()
        for tracker in self._trackers:
            tracker.close()
