"""Measures the peak memory of one run, in a process of its own, so that no candidate inherits memory of another.

That process runs this module with a request as JSON, and answers with bytes as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from diff_lab.bench.benchmark import DTYPES, Threshold, threshold
from diff_lab.bench.operator_candidates import candidates, timed_run
from diff_lab.bench.operator_problem import OperatorProblem, Shape, arrange

# Linux's own account of this process. getrusage's maximum would not do: a new process starts with that of its parent.
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMORY_LIMIT = 1.5
MIB = 1 << 20
TINY = 16  # the length of a first run


class Meter:
    """Bytes in use by this process: now, and the peak since `reset`.

    On the CPU these are the pages that the system counts for the process; on CUDA the tensors on the device, without
    the allocator's cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return self._in_use("VmRSS", torch.cuda.memory_allocated)

    def peak(self) -> int:
        return self._in_use("VmHWM", torch.cuda.max_memory_allocated)

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _RESET.write_text("5", encoding="ascii")

    def _in_use(self, field: str, on_cuda: Callable[[torch.device], int]) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return on_cuda(self._device)
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        kib = next(line for line in lines if line.startswith(f"{field}:")).split()[1]
        return int(kib) * 1024


def unavailable_reason(device: torch.device) -> str | None:
    """Return why peak memory cannot be measured here, or None."""
    if device.type == "cuda" or (_STATUS.is_file() and os.access(_RESET, os.W_OK)):
        return None
    return f"peak memory needs {_STATUS} and {_RESET}, which this system does not have"


def measure_memory(
    names: Sequence[str], shape: Shape, dtype: str, pass_: str, device: torch.device
) -> list[dict[str, Any]]:
    """Measure peak memory of the named candidates in MiB; the ratios are to the first one.

    `total` is the peak above a process that has imported torch and run the candidate once on a tiny shape: inputs, λ,
    the gradient that arrives, output, gradients, and tensors held between. `own` is the peak above the inputs.
    """
    missing, case = unavailable_reason(device), {"pass": pass_, "dtype": dtype, "shape": vars(shape)}
    parts: list[dict[str, Any]] = []
    for name in names:
        part: dict[str, Any] = {**case, "candidate": name}
        parts.append(part)
        if missing:
            part["reason"] = missing
            continue
        request = {**part, "device": str(device), "threads": torch.get_num_threads()}
        command = [sys.executable, "-m", "diff_lab.bench.peak_memory", json.dumps(request)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            part["reason"] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            continue
        part |= {name: size / MIB for name, size in json.loads(done.stdout).items()}
        first = parts[0].get("total")
        part["ratio"] = part["total"] / first if first else None
    return parts


def memory_threshold(parts: Sequence[dict[str, Any]]) -> Threshold:
    """Return whether every candidate stays within the limit, as a ratio to the first one's total."""
    ratios = [
        (part["ratio"], f"{part['pass']}, {part['dtype']}, length {part['shape']['keys']}")
        for part in parts
        if part.get("ratio") is not None
    ]
    return threshold("peak memory, inputs and results included", MEMORY_LIMIT, ratios)


def main(text: str) -> str:
    """Measure the case of a request, in bytes."""
    request = json.loads(text)
    torch.set_num_threads(request["threads"])
    device, dtype, shape = torch.device(request["device"]), DTYPES[request["dtype"]], Shape(**request["shape"])
    candidate, pass_ = candidates(device)[request["candidate"]], request["pass"]

    def problem(shape: Shape) -> OperatorProblem:
        return arrange(shape, lambda *size: torch.randn(*size, dtype=dtype, device=device))

    used = Meter(device)
    # What a first run loads and starts is not the attention's memory.
    timed_run(candidate, problem(Shape(1, 2, shape.width, TINY, TINY)), pass_)()
    base = used.now()
    run = timed_run(candidate, problem(shape), pass_)
    if device.type == "cuda":
        run()  # a kernel tuned at this very size tries its variants with memory that is not the attention's
    arranged = used.now()
    # Bringing the inputs into the candidate's layout took more than they do.
    used.reset()
    results = run()
    peak = used.peak()
    del results
    return json.dumps({"total": peak - base, "inputs": arranged - base, "own": peak - arranged})


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1]))
