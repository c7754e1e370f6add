"""Small trainings: their recipe, a progress that listens and interrupts, and what two runs have in common."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from diff_lab.train import Progress, Recipe, parse_recipe, read_metrics

# What a line of metrics has that is another one each time.
TIMES = {"tokens_per_second", "seconds", "mfu", "memory"}
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
DATA = {"kind": "retrieval", "num_pairs": 2, "length": 24, "batch_size": 8, "validation_sequences": 8}
DATA |= {"num_keys": 4, "num_values": 4, "num_noise": 8}
TRAIN = {"steps": 6, "learning_rate": 1e-2, "warmup_steps": 2, "log_every": 1, "device": "cpu"}


def small_recipe(*, model: Any = None, data: Any = None, **train: Any) -> Recipe:
    """Six steps on retrieval; other data has a kind of its own, and some settings alone replace those."""
    model, data = model or {}, data or {}
    data = data if "kind" in data else DATA | data
    return parse_recipe({"name": "test", "model": MODEL | model, "data": data, "train": TRAIN | train})


class Watcher(Progress):
    """A progress that keeps what it is told of one run or several, and can press Ctrl-C after so many steps."""

    def __init__(self, interrupt_after: int | None = None) -> None:
        self.interrupt_after = interrupt_after
        self.runs: list[str] = []
        self.steps: list[int] = []
        self.started: list[tuple[int, str]] = []
        self.messages: list[str] = []
        self.stopped = 0

    def run(self, name: str) -> "Watcher":
        self.runs.append(name)
        return self

    def start(self, total: int, description: str) -> None:
        self.started.append((total, description))

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        assert tokens_per_second > 0
        self.steps.append(step)
        if len(self.steps) == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def tell(self, message: str) -> None:
        self.messages.append(message)

    def stop(self) -> None:
        self.stopped += 1


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights of a model or a checkpoint in one file."""
    return load_file(folder / "model.safetensors")


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """The same names and numbers, to the last bit."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def timeless_metrics(run: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what is another number each time."""
    lines = read_metrics(run / "metrics.jsonl")
    assert all(line.keys() >= TIMES for line in lines)
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]
