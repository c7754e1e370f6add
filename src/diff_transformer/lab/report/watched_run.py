"""Reads from its files how a training run stands while it goes on: its steps, its speed and whether it still writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from diff_transformer.lab.report.run_pages import names_of, runs_in
from diff_transformer.storage.files import parse_metrics_line

# A run that has written nothing for so long, in seconds and in the usual time between two lines, has probably ended.
_SILENCE = 60.0
_LINES_OF_SILENCE = 5
_RECENT = 20  # lines from which the speed is told


class WatchedRun:
    """What a run has logged so far, and how it stands.

    Attributes:
        folder: its folder.
        label: what it is called among the runs that are watched.
        lines: its `metrics.jsonl` as far as `read` has seen it, a dict for each logged step.
        steps: how many steps it is to have; None where its recipe does not say so.
    """

    def __init__(self, folder: Path, label: str) -> None:
        self.folder, self.label = folder, label
        self.lines: list[dict[str, Any]] = []
        self.steps: int | None = None
        self._end = 0  # of what has been read, in bytes
        self._last = b""  # the line before it

    def read(self) -> None:
        """Look for what is new. A file that is not what it was, as after a resumption, is read from its beginning.

        Raises:
            ValueError: a line, other than one that is being written, is none of a `metrics.jsonl`.
        """
        self.steps = _steps(self.folder / "recipe.yaml")
        path = self.folder / "metrics.jsonl"
        try:
            file = path.open("rb")
        except FileNotFoundError:
            self._forget()
            return
        with file:
            if not self._goes_on(file):
                self._forget()
            file.seek(self._end)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written
                    break
                where = f"{path}, line {len(self.lines) + 1}"
                self.lines.append(parse_metrics_line(text.decode(errors="replace"), where))
                self._end, self._last = self._end + len(text), text

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def is_finished(self) -> bool:
        """Whether the trained model is there: it is written when all is done, and whole."""
        return (self.folder / "model").is_dir()

    def state(self, now: float) -> str:
        """How the run stands at `now`, in seconds since 1970. Only a finished one says so: others fall silent."""
        if self.is_finished:
            return "finished"
        written = [_written(self.folder / name) for name in ("recipe.yaml", "metrics.jsonl", "checkpoints")]
        silence = now - max((moment for moment in written if moment is not None), default=now)
        between = self._seconds(self.lines[-2:]) or 0.0
        if silence <= max(_SILENCE, _LINES_OF_SILENCE * between):
            return "running"
        return f"no news for {duration(silence)}, stopped?"

    def time_left(self) -> float | None:
        """Seconds of training that are left at the recent speed, if that is known."""
        recent = self.lines[-_RECENT:]
        seconds = self._seconds(recent)
        if self.steps is None or seconds is None:
            return None
        return (self.steps - self.step) * seconds / (recent[-1]["step"] - recent[0]["step"])

    def latest(self, key: str) -> float | None:
        """The newest number of that name, if there is one."""
        return next((line[key] for line in reversed(self.lines) if isinstance(line.get(key), int | float)), None)

    def _seconds(self, lines: Sequence[dict[str, Any]]) -> float | None:
        """Seconds of training between the first and the last of some lines."""
        ends = [line["seconds"] for line in (lines[0], lines[-1]) if "seconds" in line] if len(lines) > 1 else []
        return ends[1] - ends[0] if len(ends) == 2 else None

    def _goes_on(self, file: BinaryIO) -> bool:
        file.seek(self._end - len(self._last))
        return file.read(len(self._last)) == self._last

    def _forget(self) -> None:
        self.lines, self._end, self._last = [], 0, b""


def watched(folders: Sequence[Path]) -> list[WatchedRun]:
    """The runs in `folders`, not read yet: a run's own folder, which may have logged nothing so far, or a demo's.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a folder holds no run, or a run is named twice.
    """
    runs = [run for folder in folders for run in ([folder] if _begun(folder) else runs_in(folder))]
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


def _begun(folder: Path) -> bool:
    return (folder / "recipe.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _steps(recipe: Path) -> int | None:
    try:
        steps = yaml.safe_load(recipe.read_text(encoding="utf-8", errors="replace"))["train"]["steps"]
    except (FileNotFoundError, TypeError, KeyError, yaml.YAMLError):  # none, or only the half of one as yet
        return None
    return steps if isinstance(steps, int) else None
