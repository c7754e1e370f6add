"""What the benchmarks do on CUDA, told from a machine without it: the device is made believe."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_transformer.bench import candidates as room
from diff_transformer.bench import clock, memory, operator, operator_settings, settings
from diff_transformer.bench.attempt import NO_MEMORY, attempt
from diff_transformer.bench.bars import cuda_bars
from diff_transformer.bench.candidates import AUTO, COMPOSITIONS, TWIN, TWIN_CUDNN, TWIN_FLASH, candidates
from diff_transformer.bench.clock import BURST, CYCLES, EventClock, wall_clock
from diff_transformer.bench.operator import measure_operator
from diff_transformer.bench.operator_settings import OperatorSettings
from diff_transformer.bench.problem import Shape, draw
from diff_transformer.bench.records import BACKWARD, DECODE, FORWARD, TRAINING, Row
from diff_transformer.bench.running import prepare
from diff_transformer.bench.tables import bandwidth_table, memory_table, page, ratio_table, row_line, throughput_table
from diff_transformer.bench.work import flops, matrix_peak
from diff_transformer.ops.backends import BACKENDS
from diff_transformer.results import read_json, write_json

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PEAK = 800.0


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device whose tensors lie on the CPU."""
    for where in (settings, operator_settings):
        monkeypatch.setattr(where, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(operator, "draw", lambda shape, device: draw(shape, CPU))
    monkeypatch.setattr(operator, "kernel_clock", lambda device: wall_clock(CPU))
    monkeypatch.setattr(operator, "matrix_peak", lambda dtype, device: PEAK)
    monkeypatch.setattr(operator, "measure_memory", lambda *args: [])


def tiny(**given: Any) -> OperatorSettings:
    sizes = {"heads": 4, "head_dims": (8,), "lengths": (24,), "caches": (40,), "decode_batches": (1,)}
    return OperatorSettings.on("cuda", **sizes, tokens=48, rounds=5, **given)


def test_defaults_are_the_devices(believed: None) -> None:
    assert OperatorSettings.on("cpu") == OperatorSettings()
    on_cuda = OperatorSettings.on("cuda")
    assert (on_cuda.dtypes, on_cuda.head_dims) == (("bfloat16",), (64, 128))
    shapes = [shape for shape, passes in on_cuda.cases() if passes != ["decode"]]
    assert [shape.keys for shape in shapes] == [2**power for power in range(9, 17)] * 2
    assert {shape.batch * shape.keys for shape in shapes if shape.keys <= 16384} == {16384}
    assert [shape.batch for shape in shapes if shape.keys > 16384] == [1] * 4
    assert on_cuda.causal == ["forward", "backward", "forward+backward"]
    assert on_cuda.whole == ["forward", "forward+backward"]


def test_what_is_given_goes_before_the_devices(believed: None) -> None:
    chosen = OperatorSettings.on("cuda", batch=3, lengths=(512,), head_dims=(64,), passes=("forward", "decode"))
    assert [shape.batch for shape, _ in chosen.cases()] == [3] * (1 + len(chosen.caches))
    assert chosen.memory_shapes() == [Shape(3, 16, 64, 16384, 16384)]
    assert OperatorSettings.on("cuda", memory_length=0).memory_shapes() == []
    with pytest.raises(ValueError, match="tokens must be 1 or more, got 0"):
        OperatorSettings.on("cuda", tokens=0)


def test_candidates_of_cuda_have_names_of_their_own() -> None:
    on_cuda = candidates("cuda")
    assert next(iter(on_cuda)) == TWIN
    groups = (room._CUDA_TWINS, room._CUDA_OTHERS)
    given = [candidate.name for group in groups for candidate in group] + [AUTO, *BACKENDS]
    assert sorted(given) == sorted(on_cuda)
    assert {name for name, candidate in on_cuda.items() if candidate.twin} == {TWIN, TWIN_FLASH, TWIN_CUDNN}
    assert {"wide efficient", "wide cuDNN", "pieces flash", "pieces cuDNN", "sdpa"} == set(COMPOSITIONS) & set(on_cuda)
    assert not {TWIN_FLASH, TWIN_CUDNN, "pieces flash"} & set(candidates("cpu"))


def test_a_kernel_is_forced() -> None:
    problem = draw(Shape(2, 4, 8, 20, 20), CPU)
    twins = candidates("cuda")
    plain, flash = (prepare(twins[name], problem, TRAINING)() for name in (TWIN, TWIN_FLASH))  # the CPU has one, too
    torch.testing.assert_close(flash, plain)
    refused = twins[TWIN_CUDNN]
    assert refused.answers(CUDA) == (Exception,)
    value, reason = attempt(prepare(refused, problem, FORWARD), CPU, refused.answers(CUDA))
    assert value is None
    assert str(reason).startswith("RuntimeError: ")


def test_lengths_are_not_limited_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        total_memory = 16 * (4 * 2 * 4096 * 4096)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    problem = draw(Shape(1, 2, 8, 2, 2), CPU)

    class Elsewhere:
        device, dtype, shape = CUDA, problem.q.dtype, problem.q.shape

    far = dataclasses.replace(problem, q=Elsewhere())  # type: ignore[arg-type]
    long, longer = (Shape(1, 2, 64, length, length) for length in (4096, 8192))
    for name in ("wide efficient", "pieces flash", "one call", "DiffLlama"):
        assert candidates("cuda")[name].reason(far, longer, TRAINING) is None
    assert room._too_long("flex", far, longer, FORWARD) is None
    assert room._scores_reason(far, long) is None
    assert "holds all scores, 0 GiB" in str(room._scores_reason(far, longer))


def test_operations_are_the_twins() -> None:
    shape = Shape(batch=4, heads=16, head_dim=64, queries=4096, keys=4096)
    forward = 4 * 4096 * 4096 * 64 * 16 * 4 // 2
    assert flops(shape, FORWARD) == forward
    assert flops(shape, BACKWARD) == forward * 5 // 2
    assert flops(shape, TRAINING) == forward * 7 // 2
    assert flops(shape, DECODE) is None
    assert matrix_peak(torch.float32, CPU, size=32) > 0


def test_memory_that_runs_out_is_a_reason() -> None:
    def too_large() -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def refused() -> Tensor:
        raise LookupError("")

    assert attempt(too_large, CPU) == (None, NO_MEMORY)
    assert attempt(refused, CPU, (Exception,)) == (None, "LookupError: ")
    assert attempt(lambda: 3, CPU) == (3, None)
    with pytest.raises(LookupError):
        attempt(refused, CPU)


def test_a_run(believed: None, notes: Any, tmp_path: Any) -> None:
    without_flex = tuple(name for name in candidates("cuda") if name not in ("flex", "reference"))
    document, rows = measure_operator(tiny(candidates=without_flex), notes)
    assert {(row.pass_, row.shape["batch"]) for row in rows} == {
        (FORWARD, 2), (BACKWARD, 2), (TRAINING, 2), (DECODE, 1)
    }  # fmt: skip
    assert len({(row.candidate, row.pass_) for row in rows}) == len(rows)
    for row in rows:
        assert row.against == TWIN_FLASH
        if row.candidate in (TWIN, TWIN_FLASH, AUTO, "pieces flash"):
            assert row.ratio is not None
            assert (row.teraflops_per_second is None) == (row.pass_ == DECODE)
            assert (row.gigabytes_per_second is None) == (row.pass_ != DECODE)
    auto = next(row for row in rows if row.candidate == AUTO and row.pass_ == FORWARD)
    assert auto.milliseconds is not None
    count = flops(Shape(2, 4, 8, 24, 24), FORWARD)
    assert count is not None
    assert auto.teraflops_per_second == pytest.approx(count / auto.milliseconds / 1e9)
    assert " TFLOP/s" in row_line(auto)
    assert [row.ratio for row in rows if row.candidate == TWIN_FLASH] == [1.0] * 4
    refused = [row.reason for row in rows if row.candidate == TWIN_CUDNN]
    assert all(str(reason).startswith("RuntimeError: ") for reason in refused)
    written = read_json(write_json(tmp_path / "operator-cuda.json", document))
    assert written["peak_teraflops_per_second"] == {"bfloat16": PEAK}
    text = page(written)
    assert "relative to the twin flash" in text
    assert "twin flash, ms" in ratio_table(written)
    assert f"Peak of a matrix product: bfloat16 {PEAK:.0f} TFLOP/s." in throughput_table(written)
    assert all(note in text for note in (*operator.CUDA_NOTES, settings.cuda_versions()))
    assert [done for _, done, _ in notes.stages] == list(range(notes.stages[0][2]))


def test_a_candidate_that_does_not_fit_has_a_reason(
    believed: None, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, runs = room.diff_attention, []

    def attention(*args: Any, backend: str, **options: Any) -> Tensor:
        runs.append(backend)
        # "sdpa" passes the check and does not fit beside the others any more.
        if backend == "reference" or (backend == "sdpa" and runs.count("sdpa") > 1):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return right(*args, backend=backend, **options)

    monkeypatch.setattr(room, "diff_attention", attention)
    chosen = tiny(passes=("forward",), candidates=("reference", "sdpa"))
    _, rows = measure_operator(chosen, notes)
    found = {row.candidate: row.reason for row in rows}
    assert found == {TWIN: None, TWIN_FLASH: None, AUTO: None, "reference": NO_MEMORY, "sdpa": NO_MEMORY}


def test_a_case_that_does_not_fit_at_all(believed: None, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(shape: Shape, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(operator, "draw", too_large)
    document, rows = measure_operator(tiny(passes=("forward",)), notes)
    assert [(row.candidate, row.reason) for row in rows] == [(TWIN, NO_MEMORY)]
    assert {bar.holds for bar in document["bars"]} == {None}


def test_without_the_twin_nothing_is_timed(believed: None, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", too_large)
    _, rows = measure_operator(tiny(passes=("forward",), candidates=()), notes)
    assert {row.candidate: row.reason for row in rows}[AUTO] == f"the twin has no time: {NO_MEMORY}"
    assert all(row.ratio is None for row in rows)


def row(name: str, ratio: float | None, pass_: str = TRAINING, width: int = 64, keys: int = 4096) -> Row:
    shape = {"batch": 4, "heads": 16, "width": width, "queries": 1 if pass_ == DECODE else keys, "keys": keys}
    reason = None if ratio is not None else "refused"
    return Row(candidate=name, pass_=pass_, dtype="bfloat16", shape=shape, ratio=ratio, reason=reason)


def test_the_bars_of_cuda_are_those_of_the_issue() -> None:
    rows = [row(TWIN_FLASH, 1.0), row(AUTO, 1.2), row("wide cuDNN", 1.8), row("pieces flash", 2.0)]
    rows += [row(AUTO, 9.0, keys=2048), row(TWIN_FLASH, 1.0, keys=2048), row("one call", 0.1)]
    rows += [row(TWIN_FLASH, 1.0, width=128), row(AUTO, 1.3, width=128), row("sdpa", 1.3, width=128)]
    rows += [row(TWIN, 0.9, DECODE), row(AUTO, 0.98, DECODE), row(TWIN_FLASH, 1.0, DECODE)]
    found = [(bar.text, bar.limit, bar.worst, bar.holds) for bar in cuda_bars(rows)]
    narrow, wide = (f"forward + backward, d {width}, N 4096 to 16384" for width in (64, 128))
    assert found == [
        (f"{narrow}, relative to the twin's flash", 1.25, 1.2, True),
        (f"{narrow}, times faster than the best composition, at least", 1.4, pytest.approx(1.5), True),
        ("decode, d 64, relative to the twin", 1.1, pytest.approx(0.98 / 0.9), True),
        (f"{wide}, relative to the twin's flash", 1.25, 1.3, False),
        (f"{wide}, times faster than the best composition, at least", 1.4, 1.0, False),
        ("decode, d 128, relative to the twin", 1.1, None, None),
    ]


def test_a_bar_of_cuda_breaks_where_auto_has_no_time() -> None:
    flash, gain, decoding, *_ = cuda_bars([row(TWIN_FLASH, 1.0), row(AUTO, None), row("sdpa", 2.0)])
    assert (flash.holds, gain.holds, decoding.holds) == (False, False, None)
    assert str(flash.where).endswith("keys 4096: refused")


class _Cuda:
    """In the place of torch.cuda: writes down what is launched, and lets time pass in events."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.slept: list[int] = []
        self.now = 0.0

    def __call__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                cuda.calls.append("event")
                self.at = cuda.now

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        class Properties:
            L2_cache_size = 1024

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: self.calls.append("wait"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
        ones = torch.ones
        monkeypatch.setattr(clock.torch, "ones", lambda size, device: ones(size))


def test_runs_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda()
    cuda(monkeypatch)
    measure = EventClock(CUDA)
    assert measure._other.nbytes == clock.FLUSH * 1024

    def run() -> None:
        cuda.calls.append("run")
        cuda.now += 2.0  # milliseconds

    assert measure(run, 1) == pytest.approx(2e-3)
    assert cuda.slept == []  # how long the host takes is not known yet
    assert cuda.calls == ["wait", "event", "run", "event", "wait"]
    assert measure(run, BURST + 1) == pytest.approx(2e-3)
    assert len(cuda.slept) == 2
    assert 0 <= cuda.slept[1] < cuda.slept[0] <= clock.LONGEST_START * CYCLES


def test_the_clock_is_the_devices() -> None:
    assert not isinstance(clock.kernel_clock(CPU), EventClock)


def test_widths_have_a_column_where_there_are_several() -> None:
    def part(width: int) -> dict[str, Any]:
        shape = {"batch": 1, "heads": 2, "width": width, "queries": 1, "keys": 16}
        base = {"candidate": "twin", "pass": "decode", "dtype": "bfloat16", "shape": shape, "backend": None}
        return {**base, "gigabytes_per_second": 5.0, "total": 1.0, "own": 1.0, "ratio": 1.0}

    one, two = ({"rows": parts, "memory": parts} for parts in ([part(64)], [part(64), part(128)]))
    for table in (bandwidth_table, memory_table):
        assert "width" not in table(one)
        assert "width" in table(two)
        assert "| 128 |" in table(two)


def test_a_process_is_asked_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def answer(command: list[str], **options: Any) -> Any:
        asked.append(command[-1])
        raise KeyboardInterrupt

    monkeypatch.setattr(memory.subprocess, "run", answer)
    with pytest.raises(KeyboardInterrupt):
        memory.measure_memory(("twin",), Shape(1, 2, 8, 4, 4), "bfloat16", FORWARD, CUDA)
    assert '"device": "cuda"' in asked[0]
