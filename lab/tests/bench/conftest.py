"""Benchmarks of sizes that take no time: what they say of speed does not matter here."""

import gc

import pytest

from diff_lab.bench.benchmark import BenchRow
from diff_lab.bench.operator_bench import OperatorSettings


class Notes:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.rows: list[BenchRow] = []

    def stage(self, text: str, done: int, total: int) -> None:
        self.stages.append((text, done, total))

    def row(self, row: BenchRow) -> None:
        self.rows.append(row)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no look through all of torch for garbage before each of them, which takes longer than the rest."""
    monkeypatch.setattr("diff_lab.bench.timing.SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(gc, "collect", lambda: 0)


@pytest.fixture
def tiny() -> OperatorSettings:
    return OperatorSettings(
        heads=4,
        head_dims=(8,),
        lengths=(12, 40),
        caches=(24,),
        decode_batches=(1, 2),
        candidates=("blockwise", "sdpa_split_v"),
        rounds=5,
        grouped_length=20,
        one_head_length=16,
        memory_length=0,
    )
