"""Benchmarks of sizes that take no time: what they say of speed does not matter here."""

import gc

import pytest

from diff_lab.bench.benchmark import Recorder
from diff_lab.bench.operator_bench import OperatorSettings


class Notes(Recorder):
    """A recorder that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.shown: list[str] = []
        super().__init__(self.lines.append, self.shown.append)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no look through all of torch for garbage before each of them, which takes longer than the rest."""
    monkeypatch.setattr("diff_lab.bench.benchmark.SAMPLE_SECONDS", 0.0)
    for name in ("model_anchors.WARM", "model_bench.WARM", "model_bench.TOKENS"):
        monkeypatch.setattr(f"diff_lab.bench.{name}", 1)
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


@pytest.fixture
def tiny() -> OperatorSettings:
    return OperatorSettings(
        heads=4, head_dims=(8,), lengths=(12, 40), candidates=("blockwise", "sdpa_split_v"), rounds=5
    )
