import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_transformer.bench import memory
from diff_transformer.bench.memory import MEMORY_LIMIT, forget_peak, measure_memory, memory_bar, resident
from diff_transformer.bench.problem import Shape
from diff_transformer.bench.records import FORWARD, TRAINING

CPU = torch.device("cpu")
SHAPE = Shape(batch=1, heads=4, head_dim=16, queries=4096, keys=4096)
here = pytest.mark.skipif(memory.unavailable(CPU) is not None, reason="this system does not tell its peak memory")


@here
def test_the_peak_of_a_process_of_its_own() -> None:
    twin, auto = measure_memory(("twin", "blockwise"), SHAPE, "float32", TRAINING, CPU)
    mebi = 4 * 4096 * 16 * 4 / 2**20  # one of q, k, v, the gradient that arrives, the output and three gradients
    for part in (twin, auto):
        # Inputs are q, k, v and the gradient; the own part has at least the output and three gradients.
        assert part["inputs"] == pytest.approx(4 * mebi, abs=2)
        assert part["own"] > 3 * mebi
        assert part["total"] == pytest.approx(part["inputs"] + part["own"])
    assert twin["ratio"] == 1.0
    assert auto["ratio"] == pytest.approx(auto["total"] / twin["total"])
    assert auto["shape"]["keys"] == 4096


@here
def test_the_peak_is_seen_after_it_is_over() -> None:
    forget_peak()
    before = resident("VmHWM")
    held = bytearray(b"x") * (64 << 20)
    del held
    assert resident("VmHWM") - before > 60 << 20
    forget_peak()
    assert resident("VmHWM") - before < 32 << 20


def test_a_process_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "unavailable", lambda device: None)
    ended = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nMemoryError: too large\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **settings: ended)
    parts = measure_memory(("twin", "auto"), SHAPE, "float32", FORWARD, CPU)
    assert [part["reason"] for part in parts] == ["MemoryError: too large"] * 2
    assert memory_bar(parts).holds is None


def test_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_STATUS", Path("/nowhere/status"))
    (part,) = measure_memory(("twin",), SHAPE, "float32", FORWARD, CPU)
    assert "/nowhere/status" in part["reason"]
    assert memory_bar([part]).holds is None
    assert "not on cuda" in str(memory.unavailable(torch.device("cuda")))


def test_the_bar_takes_the_worst() -> None:
    def part(ratio: float) -> dict[str, Any]:
        return {"candidate": "auto", "pass": FORWARD, "dtype": "float32", "shape": {"keys": 16384}, "ratio": ratio}

    assert memory_bar([part(1.0), part(MEMORY_LIMIT)]).holds is True
    bar = memory_bar([part(1.0), part(1.6)])
    assert (bar.worst, bar.holds, bar.where) == (1.6, False, "forward, float32, length 16384")
