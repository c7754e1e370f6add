"""Times the backends that can be the fastest on a new GPU, once for each class of shapes, until tables of them exist.

On Hopper and newer devices torch's and cuDNN's own kernels use instructions that the Triton kernels may not, so two
calls of them may be faster than one fused kernel. Nobody has measured which.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Request, is_ordinary
from diff_transformer.ops.device_findings import TIMES, findings_of

SWITCH = "DIFF_TRANSFORMER_TUNE"
OLDEST = (9, 0)  # compute capability
# Rounds in which each candidate runs, and its runs in one of them.
ROUNDS, REPEATS = 5, 3
# The first candidate stays unless another takes less than this share of its time.
MARGIN = 0.97

Attend = Callable[[Request], Tensor]


def fastest(request: Request, candidates: Mapping[str, Attend]) -> str:
    """The name of the fastest candidate for requests of this shape on CUDA; without times that of the first."""
    first = next(iter(candidates))
    if not _may_be_timed(request):
        return first
    found, name = findings_of(request.q.device.index), shape_class(request)
    known = found.of(TIMES).get(name)
    if known is None:
        known = measure(request, candidates)
        if known is None:
            return first
        found.add(TIMES, name, known)
    return winner(known, candidates)


def _may_be_timed(request: Request) -> bool:
    """Whether there is time to lose: nothing traces the call or captures it, and no reproducible results are wanted."""
    return (
        is_ordinary(*request[:5], request.segment_bounds)
        and os.environ.get(SWITCH) != "0"
        and torch.cuda.get_device_capability(request.q.device) >= OLDEST
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def shape_class(request: Request) -> str:
    """What decides which candidate is faster; sizes as powers of 2."""
    r = request
    batch, d = r.q.shape[0], r.q.shape[-1]
    mask = "no mask" if r.attn_mask is None else "boolean mask" if r.attn_mask.dtype == torch.bool else "additive mask"
    sizes = {"rows": batch * r.heads, "queries": r.n, "keys": r.s}
    parts = [
        "training" if r.needs_gradient else "forward",
        str(r.q.dtype).removeprefix("torch."),
        f"d {d}, dv {r.v.shape[-1]}, {r.heads_per_key} to a key head, {r.k.shape[2]} maps of keys",
        *(f"{name} {1 << (size - 1).bit_length()}" for name, size in sizes.items()),
        mask,
        "causal" if r.is_causal else "not causal",
        *([f"{r.ratio} to a noise map"] if r.ratio > 1 else []),
        *(["window"] if r.window is not None and r.window < r.s else []),
        *(["documents"] if r.segment_bounds is not None else []),
    ]
    return ", ".join(parts)


def measure(request: Request, candidates: Mapping[str, Attend]) -> dict[str, Any] | None:
    """Milliseconds of one run by name, or why one has none; None where the device is full, which says nothing.

    Runs in a thread of its own, where nothing that watches the caller's tensors sees them: a checkpointed layer would
    count the tensors that are saved here as its own.
    """
    trains = request.needs_gradient
    wait(request.q.device)  # the thread has another stream, and may not read what the caller's has yet to write
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_measure, request, candidates, trains).result()


def _measure(request: Request, candidates: Mapping[str, Attend], trains: bool) -> dict[str, Any] | None:
    leaves = [x.detach().requires_grad_(trains) for x in request[:4]]
    q, k, v, lam = leaves
    detached = request._replace(q=q, k=k, v=v, lam=lam)

    def run(attend: Attend) -> None:
        with torch.set_grad_enabled(trains):
            out = attend(detached)
        if trains:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    results: dict[str, Any] = {}
    times: dict[str, list[float]] = {}
    try:
        for name, attend in candidates.items():
            try:
                run(attend)  # what compiles or plans
                wait(q.device)
                times[name] = []
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # triton, cuDNN and the driver each raise their own
                results[name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        for _ in range(ROUNDS):
            for name, samples in times.items():
                wait(q.device)
                start = time.perf_counter()
                for _ in range(REPEATS):
                    run(candidates[name])
                wait(q.device)
                samples.append((time.perf_counter() - start) / REPEATS)
    except torch.OutOfMemoryError:
        return None
    return results | {name: 1e3 * statistics.median(samples) for name, samples in times.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def winner(times: Mapping[str, Any], candidates: Mapping[str, Attend]) -> str:
    """The fastest; the first unless another is clearly faster, or it did not run."""
    first = next(iter(candidates))
    timed = {name: times[name] for name in candidates if isinstance(times.get(name), float)}
    best = min(timed, key=timed.__getitem__, default=first)
    if first in timed and timed[best] >= MARGIN * timed[first]:
        return first
    return best


def status(index: int) -> str:
    """What is known of a device, for people."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    if torch.cuda.get_device_capability(index) < OLDEST:
        return "not timed on devices before Hopper, where triton is taken"
    classes = findings_of(index).of(TIMES)
    if not classes:
        return "not timed yet: the first call of each shape times them"
    return "; ".join(f"{name}: {_in_words(times)}" for name, times in classes.items())


def _in_words(times: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {time:.3f} ms" if isinstance(time, float) else f"{name} {time}" for name, time in times.items()
    )
