"""Peak memory of one run, each in a process of its own, so that no candidate inherits what another left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from diff_transformer.bench.problem import Shape
from diff_transformer.bench.records import Bar

# Linux's own account of this process. getrusage's maximum would not do: a new process starts with that of its parent.
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMORY_LIMIT = 1.5
_MEBI = 1 << 20


def unavailable(device: torch.device) -> str | None:
    """Why peak memory cannot be measured here, or None."""
    if device.type == "cuda":
        return None
    if not (_STATUS.is_file() and os.access(_RESET, os.W_OK)):
        return f"peak memory needs {_STATUS} and {_RESET}, which this system does not have"
    return None


def measure_memory(
    names: Sequence[str], shape: Shape, dtype: str, pass_: str, device: torch.device
) -> list[dict[str, Any]]:
    """Peak memory of the named candidates in MiB, the first one being what the others are compared with.

    `total` is the peak above a process that has imported torch and run the candidate once on a tiny shape: inputs,
    λ, the gradient that arrives, output, gradients, and what is held between. `own` is the peak above the inputs.
    """
    part = {"pass": pass_, "dtype": dtype, "shape": shape.named()}
    reason = unavailable(device)
    if reason is not None:
        return [{**part, "candidate": name, "reason": reason} for name in names]
    parts: list[dict[str, Any]] = []
    for name in names:
        request = {"candidate": name, "dtype": dtype, "pass": pass_, "threads": torch.get_num_threads()}
        request |= {"device": str(device)}
        command = [
            sys.executable,
            "-m",
            "diff_transformer.bench.memory_worker",
            json.dumps({**request, "shape": vars(shape)}),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            parts.append({**part, "candidate": name, "reason": last})
            continue
        found = {key: value / _MEBI for key, value in json.loads(done.stdout).items()}
        first = parts[0].get("total") if parts else found["total"]
        parts.append({**part, "candidate": name, **found, "ratio": found["total"] / first if first else None})
    return parts


class Meter(Protocol):
    """Bytes in use by this process: now, and at most since `forget`."""

    def now(self) -> int: ...

    def peak(self) -> int: ...

    def forget(self) -> None: ...


def meter(device: torch.device) -> Meter:
    """What tells how much of a device's memory is in use."""
    return _Allocated(device) if device.type == "cuda" else _Resident()


class _Resident:
    """Pages that the system counts for this process."""

    def now(self) -> int:
        return self._field("VmRSS")

    def peak(self) -> int:
        return self._field("VmHWM")

    def forget(self) -> None:
        _RESET.write_text("5", encoding="ascii")

    def _field(self, name: str) -> int:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        kibi = next(line for line in lines if line.startswith(f"{name}:")).split()[1]
        return int(kibi) * 1024


class _Allocated:
    """What tensors on a CUDA device take; what torch keeps beyond them for later is not theirs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def forget(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def memory_bar(parts: Sequence[dict[str, Any]]) -> Bar:
    """Whether every candidate stays within the limit, as a ratio to the first one's total."""
    text = "peak memory, inputs and results included"
    picked = [part for part in parts if part.get("ratio") is not None]
    if not picked:
        return Bar(text=text, limit=MEMORY_LIMIT, worst=None, where=None, holds=None)
    worst = max(picked, key=lambda part: part["ratio"])
    where = f"{worst['pass']}, {worst['dtype']}, length {worst['shape']['keys']}"
    return Bar(text=text, limit=MEMORY_LIMIT, worst=worst["ratio"], where=where, holds=worst["ratio"] <= MEMORY_LIMIT)
