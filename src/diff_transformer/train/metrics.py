"""What is written down while a model trains: a line of JSON for each logged step, and the same for TensorBoard."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """The two records of a run. A run that resumes after `step` forgets what was written about later steps.

    Use it as a context manager; leaving it closes both.
    """

    def __init__(self, lines: Path, tensorboard: Path, step: int) -> None:
        kept = [line for line in read_metrics(lines) if line["step"] <= step] if lines.exists() else []
        self._file = lines.open("w", encoding="utf-8")
        self._board = SummaryWriter(str(tensorboard), purge_step=step + 1 if step else None)
        for line in kept:
            self._write(line)

    def log(self, line: dict[str, Any]) -> None:
        """Record numbers by name. "step" is the step; "lambdas", a list, is one curve for each layer."""
        self._write(line)
        step = line["step"]
        for name, value in line.items():
            if name == "lambdas":
                for layer, number in enumerate(value or [], start=1):
                    self._board.add_scalar(f"lambda/layer_{layer:02d}", number, step)
            elif name != "step":
                self._board.add_scalar(name, value, step)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()


def read_metrics(lines: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line that was cut off while it was written is left out."""
    metrics = []
    for line in lines.read_text(encoding="utf-8").splitlines():
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return metrics
