import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import fresh
from diff_lab.bench.benchmark import TRAINING
from diff_lab.bench.operator_problem import Shape
from diff_lab.bench.peak_memory import measure_memory

CPU = torch.device("cpu")
# Large tensors of little work: a process's own pages come and go by a few MiB, on a busy machine too.
SHAPE = Shape(batch=64, heads=4, width=64, queries=256, keys=256)
ONE = 64 * 4 * 256 * 64 * 4 / 2**20  # 16 MiB: one of q, k, v, the gradient that arrives, the output, three gradients
NOISE = 6
here = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="this system does not tell its memory")


def check(part: dict[str, Any]) -> None:
    # Inputs are q, k, v and the gradient; the own part has at least the output and three gradients.
    assert part["inputs"] == pytest.approx(4 * ONE, abs=NOISE)
    assert part["own"] > 4 * ONE - NOISE
    assert part["total"] == pytest.approx(part["inputs"] + part["own"])


@here
def test_the_peak_of_a_run() -> None:
    code = """
        import json, torch
        from diff_lab.bench.operator_problem import Shape
        from diff_lab.bench.peak_memory import peak_of_run
        shape = Shape(batch=64, heads=4, width=64, queries=256, keys=256)
        print(json.dumps(peak_of_run("blockwise", shape, "float32", "forward + backward", torch.device("cpu"), 1)))
    """
    done = fresh.run(textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))


@here
@pytest.mark.all
def test_the_peak_of_a_process_of_its_own() -> None:
    baseline, auto, unknown = measure_memory(("softmax", "blockwise", "unknown"), SHAPE, "float32", TRAINING, CPU)
    assert unknown["reason"] == "KeyError: 'unknown'"
    for part in (baseline, auto):
        check(part)
        assert part["shape"]["keys"] == 256
    assert baseline["ratio"] == 1.0
    assert auto["ratio"] == pytest.approx(auto["total"] / baseline["total"])
