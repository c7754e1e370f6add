import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
from diff_lab.bench import peak_memory
from diff_lab.bench.benchmark import FORWARD, TRAINING
from diff_lab.bench.operator_problem import Shape
from diff_lab.bench.peak_memory import MEMORY_LIMIT, Meter, measure_memory, memory_threshold

CPU = torch.device("cpu")
# Large tensors of little work: a process's own pages come and go by a few MiB, on a busy machine too.
SHAPE = Shape(batch=64, heads=4, width=64, queries=256, keys=256)
NOISE = 6
here = pytest.mark.skipif(
    peak_memory.unavailable_reason(CPU) is not None, reason="this system does not tell its peak memory"
)


def run_forked(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` gives for ``python -m MODULE ARGUMENTS``, without the seconds that imports take."""
    assert command[:2] == [sys.executable, "-m"]
    return fresh.run(f"import runpy; runpy.run_module({command[2]!r}, run_name='__main__')", *command[3:])


@here
@pytest.mark.parametrize("command", ["in a forked process", pytest.param("as it is", marks=pytest.mark.all)])
def test_the_peak_of_a_process_of_its_own(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "in a forked process":
        monkeypatch.setattr(subprocess, "run", run_forked)
    baseline, auto = measure_memory(("softmax", "blockwise"), SHAPE, "float32", TRAINING, CPU)
    mebi = (
        64 * 4 * 256 * 64 * 4 / 2**20
    )  # 16, one of q, k, v, the gradient that arrives, the output and three gradients
    for part in (baseline, auto):
        # Inputs are q, k, v and the gradient; the own part has at least the output and three gradients.
        assert part["inputs"] == pytest.approx(4 * mebi, abs=NOISE)
        assert part["own"] > 4 * mebi - NOISE
        assert part["total"] == pytest.approx(part["inputs"] + part["own"])
    assert baseline["ratio"] == 1.0
    assert auto["ratio"] == pytest.approx(auto["total"] / baseline["total"])
    assert auto["shape"]["keys"] == 256


@here
def test_the_peak_is_seen_after_it_is_over() -> None:
    used = Meter(CPU)
    used.reset()
    before = used.peak()
    held = bytearray(b"x") * (64 << 20)
    del held
    assert used.peak() - before > 60 << 20
    assert used.now() - before < 32 << 20
    used.reset()
    assert used.peak() - before < 32 << 20


def test_on_cuda_what_tensors_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[Any] = []
    for name, value in {"synchronize": None, "memory_allocated": 3, "max_memory_allocated": 5}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    used = Meter(torch.device("cuda"))
    used.reset()
    assert (used.now(), used.peak(), forgotten) == (3, 5, [torch.device("cuda")])


def test_a_process_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        asked.append(json.loads(command[-1])["device"])
        return subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nMemoryError: too large\n")

    monkeypatch.setattr(subprocess, "run", run)
    parts = measure_memory(("softmax", "auto"), SHAPE, "float32", FORWARD, torch.device("cuda"))
    assert asked == ["cuda"] * 2
    assert [part["reason"] for part in parts] == ["MemoryError: too large"] * 2
    assert memory_threshold(parts).holds is None


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "_STATUS", Path("/nowhere/status"))
    (part,) = measure_memory(("softmax",), SHAPE, "float32", FORWARD, CPU)
    assert "/nowhere/status" in part["reason"]
    assert memory_threshold([part]).holds is None


def test_the_threshold_takes_the_worst() -> None:
    def part(ratio: float) -> dict[str, Any]:
        return {"candidate": "auto", "pass": FORWARD, "dtype": "float32", "shape": {"keys": 16384}, "ratio": ratio}

    assert memory_threshold([part(1.0), part(MEMORY_LIMIT)]).holds is True
    worst = memory_threshold([part(1.0), part(1.6)])
    assert (worst.worst, worst.holds, worst.where) == (1.6, False, "forward, float32, length 16384")
