from pathlib import Path

import pytest
import torch

from diff_lab.bench.benchmark import TRAINING
from diff_lab.bench.operator_bench import measure_memory
from diff_lab.bench.operator_problem import Shape

# Large tensors of little work: a process's own pages come and go by a few MiB, on a busy machine too.
SHAPE = Shape(batch=64, heads=4, width=64, queries=256, keys=256)
ONE = 64 * 4 * 256 * 64 * 4 / 2**20  # 16 MiB: one of q, k, v, the gradient that arrives, the output, three gradients
NOISE = 6


@pytest.mark.all
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell its memory")
def test_the_peak_of_a_process_of_its_own() -> None:
    names, device = ("softmax", "blockwise", "unknown"), torch.device("cpu")
    baseline, auto, unknown = measure_memory(names, SHAPE, "float32", TRAINING, device)
    assert unknown["reason"] == "KeyError: 'unknown'"
    for part in (baseline, auto):
        # Inputs are q, k, v and the gradient; the own part has at least the output and three gradients.
        assert part["inputs"] == pytest.approx(4 * ONE, abs=NOISE)
        assert part["own"] > 4 * ONE - NOISE
        assert part["total"] == pytest.approx(part["inputs"] + part["own"])
        assert part["shape"]["keys"] == 256
    assert baseline["ratio"] == 1.0
    assert auto["ratio"] == pytest.approx(auto["total"] / baseline["total"])
