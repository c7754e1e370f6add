"""What the benchmarks do on CUDA, told from a machine without it: the device is made believe."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diff_lab.bench import benchmark, operator_bench
from diff_lab.bench.bench_pages import page, page_part, ratio_table
from diff_lab.bench.benchmark import BACKWARD, DECODE, FORWARD, NO_MEMORY, TRAINING, try_run, wall_clock
from diff_lab.bench.operator_bench import OperatorSettings, measure_operator
from diff_lab.bench.operator_candidates import (
    AUTO,
    BASELINE,
    BASELINE_CUDNN,
    BASELINE_FLASH,
    Shape,
    candidates,
    draw,
    flops,
    timed_run,
)
from diff_lab.results_files import write_json
from diff_transformer.ops import flash
from diff_transformer.utils.files import read_json

CPU = torch.device("cpu")


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device whose tensors lie on the CPU."""
    monkeypatch.setattr(benchmark, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(operator_bench, "draw", lambda shape, device: draw(shape, CPU))
    monkeypatch.setattr(operator_bench, "kernel_clock", lambda device: wall_clock(CPU))


def tiny(**chosen: Any) -> OperatorSettings:
    sizes = {"heads": 4, "head_dims": (8,), "lengths": (24,)}
    return OperatorSettings.on("cuda", **sizes, tokens=48, rounds=5, **chosen)


def test_defaults_are_the_devices_and_what_is_given_goes_before_them(believed: None) -> None:
    assert OperatorSettings.on("cpu") == OperatorSettings()
    on_cuda = OperatorSettings.on("cuda")
    assert (on_cuda.dtypes, on_cuda.head_dims) == (("bfloat16",), (64, 128))
    shapes = [shape for shape, passes in on_cuda.cases() if passes != [DECODE]]
    assert [shape.keys for shape in shapes] == [2**power for power in range(9, 17)] * 2
    assert {shape.batch * shape.keys for shape in shapes if shape.keys <= 16384} == {16384}
    assert [shape.batch for shape in shapes if shape.keys > 16384] == [1] * 4
    assert on_cuda.causal_passes == [FORWARD, BACKWARD, TRAINING]
    chosen = OperatorSettings.on("cuda", batch=3, lengths=(512,), head_dims=(64,), passes=("forward", "decode"))
    assert [shape.batch for shape, _ in chosen.cases()] == [3] * 2
    assert chosen.square(16384, 64) == Shape(3, 16, 64, 16384, 16384)


def test_a_kernel_is_forced() -> None:
    problem = draw(Shape(2, 4, 8, 20, 20), CPU)
    on_cuda = candidates("cuda")
    plain, forced = (
        timed_run(on_cuda[name], problem, TRAINING)() for name in (BASELINE, BASELINE_FLASH)
    )  # the CPU has one, too
    torch.testing.assert_close(forced, plain)
    value, reason = try_run(CPU, timed_run(on_cuda[BASELINE_CUDNN], problem, FORWARD))
    assert value is None
    assert str(reason).startswith("RuntimeError: ")


@pytest.mark.parametrize("library", ["FA3", "FA4"])
def test_the_transformer_by_another_library_is_the_same(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch stands in for the libraries, which need a GPU, by what their functions take and return."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *settings: Any, causal: bool = False) -> Any:
        _, scale, causal, _ = settings or (None, None, causal, None)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2), None

    monkeypatch.setattr(flash, "attend", attend)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=attend))
    for queries, pass_ in ((20, TRAINING), (20, FORWARD), (1, DECODE)):
        problem = draw(Shape(2, 4, 8, queries, 20), CPU)
        named = (candidates("cuda")[name] for name in (f"{BASELINE} {library}", BASELINE))
        torch.testing.assert_close(*(timed_run(candidate, problem, pass_)() for candidate in named))


def test_operations_are_the_transformers() -> None:
    shape = Shape(batch=4, heads=16, width=64, queries=4096, keys=4096)
    forward = 4 * 4096 * 4096 * 64 * 16 * 4 // 2
    assert flops(shape, FORWARD) == forward
    assert flops(shape, BACKWARD) == forward * 5 // 2
    assert flops(shape, TRAINING) == forward * 7 // 2
    assert flops(shape, DECODE) is None


def test_memory_that_runs_out_is_a_reason() -> None:
    def too_large() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def refused() -> Tensor:
        raise LookupError("")

    assert try_run(CPU, too_large) == (None, NO_MEMORY)
    assert try_run(CPU, refused) == (None, "LookupError: ")
    assert try_run(CPU, lambda: 3) == (3, None)


def test_a_run(believed: None, notes: Any, tmp_path: Any) -> None:
    without_flex = tuple(name for name in candidates("cuda") if name not in ("flex", "reference"))
    document = measure_operator(tiny(candidates=without_flex), notes)
    rows = notes.rows
    assert {(row.pass_, row.shape["batch"]) for row in rows} == {
        (FORWARD, 2), (BACKWARD, 2), (TRAINING, 2), (DECODE, 1)
    }  # fmt: skip
    assert len({(row.candidate, row.pass_) for row in rows}) == len(rows)
    for row in rows:
        assert row.against == BASELINE_FLASH
        if row.candidate in (BASELINE, BASELINE_FLASH, AUTO, "sdpa_split_v flash"):
            assert row.ratio is not None
            assert (row.teraflops_per_second is None) == (row.pass_ == DECODE)
            assert (row.gigabytes_per_second is None) == (row.pass_ != DECODE)
    auto = next(row for row in rows if row.candidate == AUTO and row.pass_ == FORWARD)
    assert auto.milliseconds is not None
    count = flops(Shape(2, 4, 8, 24, 24), FORWARD)
    assert count is not None
    assert auto.teraflops_per_second == pytest.approx(count / auto.milliseconds / 1e9)
    assert " TFLOP/s" in str(auto)
    assert [row.ratio for row in rows if row.candidate == BASELINE_FLASH] == [1.0] * 4
    refused = [row.reason for row in rows if row.candidate == BASELINE_CUDNN]
    assert all(str(reason).startswith("RuntimeError: ") for reason in refused)
    missing = {row.candidate: str(row.reason) for row in rows if row.candidate.endswith(("FA3", "FA4"))}
    assert missing[f"{BASELINE} FA3"].startswith("ModuleNotFoundError: ")
    assert missing[f"{BASELINE} FA4"] == "it needs its tensors on a CUDA device, got cpu"
    written = read_json(write_json(tmp_path / "operator-cuda.json", document))
    text = page(written)
    assert "relative to `softmax flash`" in text
    assert "softmax flash, ms" in ratio_table(written)
    assert "softmax flash" in page_part("throughput", written)
    assert all(note in text for note in operator_bench.CUDA_NOTES)
    assert f"CUDA {torch.version.cuda}, cuDNN" in text


def test_widths_have_a_column_where_there_are_several() -> None:
    def part(width: int) -> dict[str, Any]:
        shape = {"batch": 1, "heads": 2, "width": width, "queries": 1, "keys": 16}
        base = {"candidate": "softmax", "pass": "decode", "dtype": "bfloat16", "shape": shape, "backend": None}
        return {**base, "gigabytes_per_second": 5.0, "total": 1.0, "own": 1.0, "ratio": 1.0}

    one, two = ({"rows": parts, "memory": parts} for parts in ([part(64)], [part(64), part(128)]))
    for table in ("bandwidth", "memory"):
        assert "width" not in page_part(table, one)
        assert "width" in page_part(table, two)
        assert "| 128 |" in page_part(table, two)
