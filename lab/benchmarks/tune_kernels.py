"""Find the fastest block sizes of the Triton kernels on this GPU, from a short list for each kernel.

    python lab/benchmarks/tune_kernels.py  # what is fastest into ops/triton/measured_blocks.json; on a GPU alone

The candidates are compiled ahead, in parallel, and those that spill registers or do not fit are left out. The others
are timed, the results of the fastest are compared with Equation 1 in float64, and only then are they kept, beside what
that file has of other kernels. Kernels that it does not have yet come first.
The record of a GPU (gpu_record.py) does all this as one of its stages.
"""

import functools
import itertools
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from diff_lab.bench.benchmark import DECODE, FORWARD, TRAINING, BenchRow
from diff_lab.bench.operator_bench import check_candidate
from diff_lab.bench.operator_candidates import AnswerCheck, Shape, candidates, draw
from diff_lab.results_files import write_json
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.triton import kernel_arguments, triton_backend
from diff_transformer.ops.triton.kernel_arguments import (
    Blocks,
    Problem,
    are_wide,
    capability_of,
    measured_name,
    problem_of,
    program_count,
)
from diff_transformer.ops.triton.launch import Launch, plan_backward, plan_decode, plan_forward
from diff_transformer.utils.files import read_json

# Rows, columns, warps, stages. The first fits twice on a multiprocessor of Hopper, so that one program's softmax runs
# beside another's products.
_SQUARE = (Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 2), Blocks(128, 32, 8, 2))
_OTHERS = (Blocks(64, 32, 4, 3), Blocks(64, 64, 8, 2), Blocks(128, 128, 8, 2), Blocks(64, 32, 8, 3))
_TWO_PASSES = tuple(blocks._replace(two_passes=True) for blocks in (*_SQUARE[:1], *_SQUARE[2:], *_OTHERS[1:2]))
_DECODING = ((64, 4, 3), (128, 4, 2), (128, 4, 3), (64, 4, 4), (32, 4, 3), (64, 2, 3), (128, 8, 2), (256, 8, 2))
_CHUNKS = ((32, 8, 2), (64, 4, 2), (64, 8, 2), (32, 4, 2), (64, 8, 3), (32, 8, 3))
CANDIDATES: dict[str, tuple[Blocks, ...]] = {
    "forward": (*_SQUARE[:3], *_TWO_PASSES),
    "save": (*_SQUARE, *_OTHERS),
    "keys": (*_SQUARE, *_OTHERS),
    "values": (*_SQUARE, *_OTHERS),
    "queries": (*_SQUARE, *_OTHERS),
    "decode": tuple(Blocks(16, *sizes) for sizes in _DECODING),
    "chunk": tuple(Blocks(64, *sizes) for sizes in _CHUNKS),
}
REPEAT_MILLISECONDS = 40  # of each candidate, about


@dataclass(frozen=True)
class Sizes:
    """What is tuned; the defaults are a GPU's. `capability` is what candidates are compiled for; None: the device's."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    widths: tuple[int, ...] = (64, 128)
    channels: int = 1024  # of all heads' queries together
    tokens: int = 16384
    length: int = 4096
    capability: int | None = None
    workers: int = 16
    most: int = 8  # candidates of a kernel
    kernels: tuple[str, ...] = tuple(CANDIDATES)


REHEARSAL = Sizes(
    device="cpu",
    dtype=torch.float16,
    widths=(16,),
    channels=16,
    tokens=40,
    length=40,
    capability=90,
    workers=1,
    most=2,
    kernels=("forward", "keys", "decode"),
)

Job = tuple[str, int, Blocks]  # kernel, width, block sizes


def problems(sizes: Sizes, d: int, device: str) -> Callable[..., Problem]:
    """What makes the problem of so many queries, against `length` keys, on a device."""
    batch, heads = max(1, sizes.tokens // sizes.length), sizes.channels // d

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=sizes.dtype)

    def problem(queries: int) -> Problem:
        q = normal(batch, queries, heads, 2, d).permute(0, 2, 3, 1, 4)
        k = normal(batch, sizes.length, heads, 2, d).permute(0, 2, 3, 1, 4)
        v = normal(batch, sizes.length, heads, 2 * d).transpose(1, 2)
        lam = torch.rand(batch, heads, queries, device=device)
        return problem_of(Request(q, k, v, lam, None, True, d**-0.5, None, None), sizes.capability)

    return problem


def plans(sizes: Sizes, d: int, device: str, *, run: bool) -> dict[str, Callable[[], Launch]]:
    """For each kernel, what plans its launch with the block sizes that hold then. `run`: what comes before it runs."""
    problem = problems(sizes, d, device)
    sequence, token, chunk = problem(sizes.length), problem(1), problem(min(64, sizes.length))
    (forward,), out, saved = plan_forward(sequence, None, save=True)
    assert saved is not None
    if run:
        forward.run()
        plan_backward(out, sequence, None, saved)[0][0].run()
    programs = program_count(torch.device(device))

    def backward(index: int) -> Callable[[], Launch]:
        return lambda: plan_backward(out, sequence, None, saved)[0][index]

    launches = {
        "forward": lambda: plan_forward(sequence, None, save=False)[0][0],
        "save": lambda: plan_forward(sequence, None, save=True)[0][0],
        "keys": backward(1),
        **({"values": backward(2)} if are_wide(d, 2 * d) else {}),
        "queries": backward(-1),
        "decode": lambda: plan_decode(token, None, programs)[0][-2],
        "chunk": lambda: plan_decode(chunk, None, programs)[0][-2],
    }
    return {kernel: plan for kernel, plan in launches.items() if kernel in sizes.kernels}


def with_blocks(plan: Callable[[], Launch], kernel: str, blocks: Blocks) -> Launch:
    """The launch of a kernel with given block sizes."""
    blocks_of = Problem.blocks

    def chosen(problem: Problem, name: str) -> Blocks:
        return blocks if name == kernel else blocks_of(problem, name)

    with mock.patch.object(Problem, "blocks", chosen):
        return plan()


def compile_ahead(sizes: Sizes, job: Job) -> str | None:
    """Why a candidate is not to be timed, or None. Runs in a process of its own, without the interpreter."""
    import kernel_resources

    kernel, d, blocks = job
    launch = with_blocks(plans(sizes, d, "meta", run=False)[kernel], kernel, blocks)
    assert sizes.capability is not None
    try:
        needed = kernel_resources.resources(launch, sizes.capability)
    except Exception as error:  # triton and ptxas each raise their own
        return said(error)
    if needed.spilled:
        return f"it spills {needed.spilled} bytes"
    limit = kernel_resources.SHARED_MEMORY.get(sizes.capability)
    if limit is not None and needed.shared > limit:
        return f"it takes {needed.shared} bytes of shared memory, {limit} are there"
    return None


def said(error: Exception) -> str:
    """An error as a reason: its kind, and the first line that it says."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def _without_interpreter() -> Iterator[None]:
    """For processes that are started inside: they compile."""
    value = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if value is not None:
            os.environ["TRITON_INTERPRET"] = value


def milliseconds(run: Callable[[], Any], device: str) -> float:
    """The median time that it takes."""
    run()
    if device == "cuda":
        import triton.testing

        return float(triton.testing.do_bench(run, warmup=5, rep=REPEAT_MILLISECONDS, return_mode="median"))
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def tune(
    sizes: Sizes,
    path: Path,
    write: Callable[[Mapping[str, Any]], None],
    has_time_for: Callable[[Callable[[], Any]], bool] = lambda part: part() is None,
) -> None:
    """Time the candidates, check the fastest, and write them to `path`; `write` is told what is found on the way."""
    if sizes.capability is None:
        sizes = replace(sizes, capability=capability_of(torch.cuda.current_device()))
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"capability": sizes.capability, "rows": rows, "fastest": {}, "kept": False}
    launches = {d: plans(sizes, d, sizes.device, run=True) for d in sizes.widths}
    jobs: list[Job] = [
        (kernel, d, blocks)
        for d in sizes.widths
        for kernel in launches[d]
        for blocks in CANDIDATES[kernel][: sizes.most]
    ]
    known = _known(path).get(str(sizes.capability), {})
    jobs.sort(key=lambda job: measured_name(job[0], are_wide(job[1], 2 * job[1])) in known)
    pool = ProcessPoolExecutor(sizes.workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        with _without_interpreter():
            compiled: dict[Job, Future[str | None]] = {
                job: pool.submit(functools.partial(compile_ahead, sizes), job) for job in jobs
            }
        for (kernel, d), group in itertools.groupby(jobs, key=lambda job: job[:2]):
            part = functools.partial(_time_kernel, launches[d][kernel], list(group), compiled, sizes.device, rows)
            if not has_time_for(part):
                break
            timed = [
                row for row in rows if (row["kernel"], row["d"]) == (kernel, d) and row["milliseconds"] is not None
            ]
            if timed:
                best = min(timed, key=lambda row: row["milliseconds"])
                found["fastest"][measured_name(kernel, are_wide(d, 2 * d))] = best["blocks"]
            write(found)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    found |= keep(sizes, path, found["fastest"])
    write(found)


def _time_kernel(
    plan: Callable[[], Launch],
    jobs: list[Job],
    compiled: Mapping[Job, "Future[str | None]"],
    device: str,
    rows: list[dict[str, Any]],
) -> None:
    """A row of each candidate of a kernel."""
    for kernel, d, blocks in jobs:
        reason, taken = compiled[kernel, d, blocks].result(), None
        if reason is None:
            try:
                taken = milliseconds(with_blocks(plan, kernel, blocks).run, device)
            except Exception as error:  # as compile_ahead
                reason = said(error)
        rows.append({"kernel": kernel, "d": d, "blocks": list(blocks), "milliseconds": taken, "reason": reason})
        print(rows[-1], flush=True)


def _known(path: Path) -> dict[str, dict[str, Any]]:
    return read_json(path) if path.is_file() else {}


def keep(sizes: Sizes, path: Path, fastest: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Write the fastest for the device, and take them back where results are wrong with them."""
    before = path.read_bytes() if path.is_file() else None
    known, capability = _known(path), str(sizes.capability)
    write_json(path, {**known, capability: {**known.get(capability, {}), **fastest}}, indent=1)
    with _blocks_of(path):
        wrong = [reason for d in sizes.widths for reason in reasons(sizes, d)]
    if not wrong:
        return {"kept": True, "file": path.name}
    path.unlink()
    if before is not None:
        path.write_bytes(before)
    return {"kept": False, "wrong": wrong}


def reasons(sizes: Sizes, d: int) -> Iterator[str]:
    """What is wrong with the kernels' results at a width."""
    device, length = torch.device(sizes.device), min(sizes.length, 1024)
    # In a rehearsal no device says its capability.
    on_device = functools.partial(problem_of, capability=sizes.capability)
    with mock.patch.object(triton_backend, "problem_of", on_device):
        for queries, passes in ((length, (FORWARD, TRAINING)), (1, (DECODE,))):
            shape = Shape(1, 4, d, queries, length)
            drawn = draw(shape, device)
            check = AnswerCheck(drawn)
            for pass_ in passes:
                row = BenchRow(candidate="triton", pass_=pass_, dtype=str(sizes.dtype), shape=vars(shape))
                row = check_candidate(candidates(device)["triton"], row, drawn.to(sizes.dtype), check, device)
                if row.reason is not None:
                    yield f"{pass_}, {row.sizes}: {row.reason}, {row.error} times the allowed error"


@contextmanager
def _blocks_of(path: Path) -> Iterator[None]:
    """The kernels take the block sizes of that file."""
    with mock.patch.object(kernel_arguments, "MEASURED_BLOCKS", path):
        kernel_arguments.measured_blocks.cache_clear()
        try:
            yield
        finally:
            kernel_arguments.measured_blocks.cache_clear()


def main() -> None:
    """Tune on this GPU, and print each candidate."""
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device.")
    tune(Sizes(), kernel_arguments.MEASURED_BLOCKS, lambda found: None)


if __name__ == "__main__":
    main()
