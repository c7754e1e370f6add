"""`bench operator`: cases, the correctness check, alternated times, and the bars."""

import functools
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import torch

from diff_transformer.bench.attempt import attempt, give_back_memory
from diff_transformer.bench.bars import cpu_bars, cuda_bars
from diff_transformer.bench.candidates import AUTO, TWIN, TWIN_FLASH, backend_of_auto, candidates
from diff_transformer.bench.clock import kernel_clock
from diff_transformer.bench.memory import measure_memory, memory_bar
from diff_transformer.bench.one_head import measure_one_head, one_head_bar
from diff_transformer.bench.operator_settings import PASSES, OperatorSettings
from diff_transformer.bench.problem import Judge, Problem, Shape, draw
from diff_transformer.bench.records import DECODE, Bar, Row, Watcher, timed_fields
from diff_transformer.bench.running import check, prepare
from diff_transformer.bench.settings import DTYPES, cuda_versions
from diff_transformer.bench.timing import alternate, spread
from diff_transformer.bench.work import flops, matrix_peak
from diff_transformer.results import capture_environment

# What has to be said about numbers from CUDA besides what the tables say.
CUDA_NOTES = (
    "Times are the device's: between two CUDA events around a run, with other memory read before each run so that its "
    "inputs are not in the second-level cache, and launches enqueued ahead.",
    "Checked against Equation 1 in float64 on the first and the last head of the first and the last sequence, all "
    "their positions.",
    "TFLOP/s count the twin's operations for all candidates: 4·N²·d/2 for a head and sequence forward (half of the "
    "pairs are visible), 2.5 times as many backward. The peak is a matrix product of the same dtype, 8192 × 8192 × "
    "8192, measured in the same process.",
)


def measure_operator(settings: OperatorSettings, watch: Watcher) -> tuple[dict[str, Any], list[Row]]:
    """The document to write, and its rows. The last parts are one head on all threads (on the CPU), and memory."""
    device = torch.device(settings.device)
    on_cuda = device.type == "cuda"
    cases = list(settings.cases())
    alone = [] if on_cuda else [(dtype, name) for dtype in settings.dtypes for name in settings.whole]
    held = [
        (dtype, name, shape)
        for dtype in settings.dtypes
        for name in settings.whole
        for shape in settings.memory_shapes()
    ]
    total, done = sum(len(passes) for _, passes in cases) * len(settings.dtypes) + len(alone) + len(held), 0
    peak = {dtype: matrix_peak(DTYPES[dtype], device) for dtype in settings.dtypes} if on_cuda else {}
    rows: list[Row] = []
    for shape, passes in cases:
        parts = _measure_shape(shape, passes, settings)
        for dtype in settings.dtypes:
            for name in passes:
                watch.stage(f"{PASSES[name]}, {dtype}, {_where(shape, settings)}", done, total)
                for row in next(parts):
                    rows.append(row)
                    watch.row(row)
                done += 1
        parts.close()  # it waits behind its last rows, with the problem
        give_back_memory(device)
    one_head, memory = [], []
    for dtype, name in alone:
        watch.stage(f"one head on all threads, {PASSES[name]}, {dtype}", done, total)
        row, found = measure_one_head(settings, dtype, PASSES[name])
        one_head += found
        if row.wrong:
            rows.append(row)
            watch.row(row)
        done += 1
    for dtype, name, shape in held:
        watch.stage(f"memory, {PASSES[name]}, {dtype}, {_where(shape, settings)}", done, total)
        memory += measure_memory((TWIN, AUTO), shape, dtype, PASSES[name], device)
        done += 1
    bars = cuda_bars(rows) if on_cuda else [*cpu_bars(rows), one_head_bar(one_head), memory_bar(memory)]
    return _document(settings, bars, rows, one_head, memory, peak), rows


def _document(
    settings: OperatorSettings,
    bars: list[Bar],
    rows: list[Row],
    one_head: list[dict[str, Any]],
    memory: list[dict[str, Any]],
    peak: dict[str, float],
) -> dict[str, Any]:
    return {
        **vars(capture_environment(settings.device)),
        "title": "bench operator",
        "settings": {**vars(settings), "threads": torch.get_num_threads()},
        "candidates": {name: candidate.about for name, candidate in candidates(settings.device).items()},
        "notes": (*CUDA_NOTES, cuda_versions()) if peak else (),
        "peak_teraflops_per_second": peak,
        "bars": bars,
        "rows": rows,
        "one_head": one_head,
        "memory": memory,
    }


def _where(shape: Shape, settings: OperatorSettings) -> str:
    width = f", width {shape.head_dim}" if len(settings.head_dims) > 1 else ""
    return f"length {shape.keys}, batch {shape.batch}{width}"


def _measure_shape(shape: Shape, passes: list[str], settings: OperatorSettings) -> Generator[list[Row], None, None]:
    """The rows of a shape, for each dtype and pass in turn; all of them get the same numbers and one truth."""
    device = torch.device(settings.device)
    drawn, reason = attempt(functools.partial(draw, shape, device), device)
    judge = Judge(drawn) if drawn is not None else None
    for dtype in settings.dtypes:
        for name in passes:
            problem = None
            if drawn is not None:
                problem, reason = attempt(functools.partial(drawn.to, DTYPES[dtype]), device)
            if problem is None or judge is None:
                yield [Row(candidate=TWIN, pass_=PASSES[name], dtype=dtype, shape=shape.named(), reason=reason)]
            else:
                yield _measure_case(problem, shape, PASSES[name], judge, settings)


def _measure_case(problem: Problem, shape: Shape, pass_: str, judge: Judge, settings: OperatorSettings) -> list[Row]:
    device, dtype = torch.device(settings.device), str(problem.q.dtype).removeprefix("torch.")
    rows: dict[str, Row] = {}
    # The check runs each of them once: no first run is timed.
    runs: dict[str, Callable[[], object]] = {}
    backend = backend_of_auto(problem, pass_)
    for name, candidate in candidates(device).items():
        left_out = settings.candidates is not None and name not in (TWIN, TWIN_FLASH, AUTO, *settings.candidates)
        # What "auto" stands for need not be measured twice.
        if left_out or name == backend:
            continue
        row = Row(candidate=name, pass_=pass_, dtype=dtype, shape=shape.named())
        row = replace(row, backend=backend if name == AUTO else None)
        rows[name] = check(candidate, row, problem, shape, judge, device)
        if rows[name].reason is None:
            work = functools.partial(prepare, candidate, problem, pass_)
            run, reason = attempt(work, device, candidate.answers(device))
            rows[name] = replace(rows[name], reason=reason)
            if run is not None:
                runs[name] = run
    if device.type == "cuda":
        _warm_up(runs, rows, device)
    # On CUDA the bars are to the twin's flash, where there is one.
    base = TWIN_FLASH if TWIN_FLASH in runs else TWIN
    if base not in runs:
        lacking = f"the twin has no time: {rows[TWIN].reason}"
        return [replace(row, against=base, reason=row.reason or lacking) for row in rows.values()]
    times, reason = attempt(lambda: alternate(runs, kernel_clock(device), settings.rounds), device)
    if times is None:
        return [replace(row, against=base, reason=row.reason or reason) for row in rows.values()]
    read, operations = problem.k.nbytes + problem.v.nbytes, flops(shape, pass_) if device.type == "cuda" else None
    for name, row in rows.items():
        rows[name] = replace(row, against=base)
        if name in times:
            median = spread(times[name]).median
            fields: dict[str, Any] = timed_fields(times[name], times[base])
            fields["gigabytes_per_second"] = read / median / 1e9 if pass_ == DECODE else None
            fields["teraflops_per_second"] = operations / median / 1e12 if operations else None
            rows[name] = replace(rows[name], **fields)
    return list(rows.values())


def _warm_up(runs: dict[str, Callable[[], object]], rows: dict[str, Row], device: torch.device) -> None:
    """Run each once as it will be timed, with the inputs of all of them held: what compiles, tunes or does not fit."""
    for name in list(runs):
        _, reason = attempt(functools.partial(_run, runs[name]), device, candidates(device)[name].answers(device))
        if reason is not None:
            rows[name] = replace(rows[name], reason=reason)
            del runs[name]
            give_back_memory(device)


def _run(run: Callable[[], object]) -> None:
    """Run, and let go of what comes out."""
    run()
