"""Both benchmarks on a GPU, at sizes that take no time."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from diff_lab.bench.bench_pages import results_path, write_document
from diff_lab.bench.benchmark import (
    BACKWARD,
    DECODE,
    FORWARD,
    NO_MEMORY,
    STEP,
    TRAINING,
    EventClock,
    alternate,
    free_memory,
    refuse_wrong,
    try_run,
    wall_clock,
)
from diff_lab.bench.model_bench import ModelSettings, measure_model
from diff_lab.bench.operator_bench import OperatorSettings, measure_operator
from diff_lab.bench.operator_candidates import AUTO, BASELINE, BASELINE_FLASH

pytestmark = [
    pytest.mark.gpu,
    # torch says why it does not take a kernel that it was held to.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
CUDA = torch.device("cuda")


def test_the_operator(notes: Any, tmp_path: Path) -> None:
    settings = OperatorSettings.on(
        "cuda", heads=4, head_dims=(64, 128), tokens=512, lengths=(256, 512), rounds=5,
    )  # fmt: skip
    document = measure_operator(settings, notes)
    rows = notes.rows
    refuse_wrong(rows)
    assert {row.pass_ for row in rows} == {FORWARD, BACKWARD, TRAINING, DECODE}
    for row in rows:
        assert row.against == BASELINE_FLASH
        if row.candidate in (BASELINE, BASELINE_FLASH, AUTO, "sdpa_split_v flash", "DiffLlama"):
            assert row.ratio is not None, row.reason
    path = results_path(tmp_path, "operator", "cuda")
    write_document(path, document)
    assert path.name == "operator-cuda.json"
    assert "TFLOP/s" in path.with_suffix(".md").read_text(encoding="utf-8")


def test_whole_models(notes: Any) -> None:
    settings = ModelSettings.on(
        "cuda", tokens=256, lengths=(128, 256), hidden_size=256, intermediate_size=512, layers=2,
        head_dim=64, vocabulary=500, rounds=5,
    )  # fmt: skip
    document = measure_model(settings, notes)
    rows = notes.rows
    refuse_wrong(rows)
    assert {row.pass_ for row in rows} == {FORWARD, STEP, DECODE}
    assert all(row.tokens_per_second for row in rows), [row.reason for row in rows]
    assert "1 of the layers" in document["notes"][0]


def test_memory_that_runs_out_is_given_back() -> None:
    free_memory(CUDA)
    before = torch.cuda.memory_allocated()

    def too_large() -> list[torch.Tensor]:
        held = []
        while True:
            held.append(torch.empty(1 << 32, dtype=torch.uint8, device=CUDA))

    assert try_run(CUDA, too_large) == (None, NO_MEMORY)
    assert torch.cuda.memory_allocated() == before


def _product(size: int) -> Callable[[], object]:
    left, right = (torch.randn(size, size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    return lambda: left @ right


def test_both_clocks_agree_on_long_runs() -> None:
    run = _product(8192)
    by_events, by_wall = (median(alternate({"": run}, clock)[""]) for clock in (EventClock(CUDA), wall_clock(CUDA)))
    assert by_events == pytest.approx(by_wall, rel=0.2)


def test_launches_are_not_in_the_time() -> None:
    run = _product(64)
    by_events, by_wall = (median(alternate({"": run}, clock)[""]) for clock in (EventClock(CUDA), wall_clock(CUDA)))
    assert by_events < 2 * by_wall
    assert by_events < 50e-6
