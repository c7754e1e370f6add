"""Measures the peak memory of one run, in a process of its own, so that no candidate inherits memory of another."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from diff_lab.bench.benchmark import DTYPES
from diff_lab.bench.operator_candidates import candidates, timed_run
from diff_lab.bench.operator_problem import OperatorProblem, Shape, arrange

# Linux's own account of this process. getrusage's maximum would not do: a new process starts with that of its parent.
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 1 << 20
TINY = 16  # the length of a first run


def measure_memory(
    names: Sequence[str], shape: Shape, dtype: str, pass_: str, device: torch.device
) -> list[dict[str, Any]]:
    """Measure peak memory of the named candidates in MiB; the ratios are to the first one.

    `total` is the peak above a process that has imported torch and run the candidate once on a tiny shape: inputs, λ,
    the gradient that arrives, output, gradients, and tensors held between. `own` is the peak above the inputs.
    """
    parts: list[dict[str, Any]] = []
    for name in names:
        part: dict[str, Any] = {"pass": pass_, "dtype": dtype, "shape": vars(shape), "candidate": name}
        parts.append(part)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            threads = torch.get_num_threads()
            try:
                part |= process.submit(peak_of_run, name, shape, dtype, pass_, device, threads).result()
            except Exception as error:  # of a device, or of a system that does not tell its memory
                part["reason"] = " ".join(f"{type(error).__name__}: {error}".split())
                continue
        first = parts[0].get("total")
        part["ratio"] = part["total"] / first if first else None
    return parts


def peak_of_run(
    name: str, shape: Shape, dtype: str, pass_: str, device: torch.device, threads: int
) -> dict[str, float]:
    """Run a candidate in this process, and return what it took in MiB."""
    torch.set_num_threads(threads)
    candidate = candidates(device)[name]

    def problem(shape: Shape) -> OperatorProblem:
        return arrange(shape, lambda *size: torch.randn(*size, dtype=DTYPES[dtype], device=device))

    # What a first run loads and starts is not the attention's memory.
    timed_run(candidate, problem(Shape(1, 2, shape.width, TINY, TINY)), pass_)()
    base = _bytes_in_use(device)
    run = timed_run(candidate, problem(shape), pass_)
    if device.type == "cuda":
        run()  # a kernel tuned at this very size tries its variants with memory that is not the attention's
    arranged = _bytes_in_use(device)
    # Bringing the inputs into the candidate's layout took more than they do.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _RESET.write_text("5", encoding="ascii")
    results = run()
    peak = _bytes_in_use(device, peak=True)
    del results
    return {"total": (peak - base) / MIB, "inputs": (arranged - base) / MIB, "own": (peak - arranged) / MIB}


def _bytes_in_use(device: torch.device, *, peak: bool = False) -> int:
    """Count the tensors on a CUDA device, without the allocator's cache; on the CPU the pages of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
