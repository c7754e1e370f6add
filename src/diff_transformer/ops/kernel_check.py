"""Compares the Triton kernels with Equation 1 before ``auto`` takes them on a device for the first time.

They were written without a GPU. So each class of requests that compiles kernels of its own is tried once on a small
case: output and all gradients. What does not compile, does not fit on the device, or is wrong there, is not taken, and
the user is told once. :mod:`diff_transformer.ops.device_findings` remembers the outcome.
"""

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request
from diff_transformer.ops.device_findings import VERDICTS, Findings, findings_of
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.triton.kernel_arguments import (
    LONG_CACHE,
    MOST_DECODED,
    are_wide,
    capability_of,
    precision_of,
    takes_one_pass,
)
from diff_transformer.ops.triton.triton_backend import triton_attention

SWITCH = "DIFF_TRANSFORMER_TRITON"
FORWARD, TRAINING = "forward", "training"
# What the widths of a query and of a value are at most in a class.
WIDTHS = (16, 32, 64, 128, 256)
# Passes that decode, each with the most rows of queries to a key head.
ONE_QUERY = "decoding one query"
DECODING = {f"decoding {rows} rows": rows for rows in (16, 32, 64)}
# The case: two sequences, two heads that share a key head and in groups a noise map, a length with all kinds of blocks.
BATCH, HEADS, LENGTH = 2, 2, 320
# Errors are compared in blocks of positions: the first rows of a causal sequence are far larger than the last ones.
POSITIONS = 32
# Allowed are so many times the plain formula's error in the same dtype, and so many roundings.
PLAIN_ERRORS, ROUNDINGS = 4, 8
RIGHT = "right"
_EPS_OF_TF32 = 2.0**-10
_LAMBDA_SCALE, _NORM_EPS = 1.5, 0.1  # an eps beside which the norm does not hide a wrong scale

_lock = threading.RLock()
_warned: set[int] = set()  # devices


class KernelClass(NamedTuple):
    """Requests that are checked together."""

    dtype: torch.dtype
    d: int
    dv: int
    mask: str  # "", "boolean" or "additive"
    pass_: str  # FORWARD, TRAINING, ONE_QUERY, or one of DECODING
    in_groups: bool = False  # several signal heads share a noise map
    in_one_pass: bool = False  # the backward adds up dQ with atomics

    @property
    def name(self) -> str:
        """As findings and messages name it."""
        dtype = str(self.dtype).removeprefix("torch.")
        precision = " as tf32" if precision_of(self.dtype) == "tf32" else ""
        mask = f", {self.mask} mask" if self.mask else ""
        groups = ", in groups" if self.in_groups else ""
        one_pass = ", backward in one pass" if self.in_one_pass else ""
        return f"{dtype}{precision}, d {self.d}, dv {self.dv}{mask}{groups}, {self.pass_}{one_pass}"


def kernels_are_right(request: Request) -> bool:
    """Whether ``auto`` may take the Triton kernels for a request on CUDA. Checks them where that is not known yet."""
    mask = request.attn_mask
    kind = "" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    widths = _class_of(request.q.shape[-1]), _class_of(request.v.shape[-1])
    index, in_groups = request.q.device.index, request.ratio > 1
    answers = [_is_right(index, request.q.dtype, *widths, kind, pass_, in_groups) for pass_ in _passes(request)]
    return all(answers)


def _class_of(width: int) -> int:
    """By comparisons, which torch.compile makes into no constant."""
    for most in WIDTHS:
        if width <= most:
            return most
    return WIDTHS[-1]


def _passes(request: Request) -> list[str]:
    """Which kernels would run; while torch.compile traces, all that could, as it may leave lengths open."""
    if request.needs_gradient:
        return [TRAINING]
    chunks = [name for name in DECODING if request.q.dtype.itemsize == 2 or DECODING[name] == MOST_DECODED]
    if torch.compiler.is_compiling():
        return [FORWARD, ONE_QUERY, *chunks]
    rows = request.heads_per_key * request.n
    if request.segment_bounds is None:
        for name in chunks:
            if rows <= DECODING[name] and (DECODING[name] == MOST_DECODED or request.s >= LONG_CACHE):
                return [ONE_QUERY if request.n == 1 and DECODING[name] == MOST_DECODED else name]
    return [FORWARD]


@torch.compiler.assume_constant_result
def _is_right(index: int | None, dtype: torch.dtype, d: int, dv: int, mask: str, pass_: str, in_groups: bool) -> bool:
    if os.environ.get(SWITCH) == "0":
        return False
    index = torch.cuda.current_device() if index is None else index
    in_one_pass = pass_ == TRAINING and takes_one_pass(
        capability_of(index), dtype, is_wide=are_wide(d, dv), has_mask=mask != "", in_groups=in_groups
    )
    found, kernels = findings_of(index), KernelClass(dtype, d, dv, mask, pass_, in_groups, in_one_pass)
    with _lock:
        verdict = found.of(VERDICTS).get(kernels.name)
        if verdict is None:
            verdict = _find_out(kernels, index, found)
    if verdict not in (RIGHT, None) and index not in _warned:
        _warned.add(index)
        warnings.warn(
            f"backend 'triton' failed its check on {found.about['device']}, and 'sdpa' is used where it fails: "
            f"{kernels.name}: {verdict}. {found.path} remembers it; remove that file to check again. "
            f"{SWITCH}=0 in the environment switches the kernels off without a warning.",
            stacklevel=2,
        )
    return verdict == RIGHT


def _find_out(kernels: KernelClass, index: int, found: Findings) -> str | None:
    """The verdict, which is remembered; None where this is no moment to find it out."""
    if torch.cuda.is_current_stream_capturing():  # which neither compiles nor waits
        return None
    try:
        verdict = outcome(kernels, torch.device("cuda", index)) or RIGHT
    except torch.OutOfMemoryError:  # says nothing of the kernels
        return None
    found.add(VERDICTS, kernels.name, verdict)
    return verdict


def outcome(kernels: KernelClass, device: torch.device) -> str | None:
    """What is wrong with the kernels of a class on a device, or None.

    Raises torch.OutOfMemoryError where the device is full. Runs in a thread of its own, which knows nothing of what
    traces or transforms the caller: autocast, inference mode, torch.func, fake tensors.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_outcome, kernels, device).result()


def _outcome(kernels: KernelClass, device: torch.device) -> str | None:
    with torch.set_grad_enabled(kernels.pass_ == TRAINING):
        case = _case(kernels, device)
        truth = _solve(_by_formula, _in_dtype(case, torch.float64))
        plain = _solve(_by_formula, case)
        try:
            answer = _solve(_by_kernels, case)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a kernel's failure shows here, and not in a later call
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # triton, ptxas and the driver each raise their own
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            return f"they do not run ({type(error).__name__}: {reason})"
    eps = _EPS_OF_TF32 if precision_of(kernels.dtype) == "tf32" else torch.finfo(kernels.dtype).eps
    for name, value in answer.items():
        share = _share_of_allowed(value, plain[name], truth[name], eps)
        if not share <= 1:
            what = "the output" if name == "out" else f"the gradient of {name}"
            return f"{what} is wrong, {share:.3g} times the error that rounding explains"
    return None


class _Case(NamedTuple):
    request: Request
    weight: Tensor
    grad_out: Tensor


def _case(kernels: KernelClass, device: torch.device) -> _Case:
    """The same numbers every time, without touching the program's own random numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = kernels.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    rows = DECODING.get(kernels.pass_)
    n = 1 if kernels.pass_ == ONE_QUERY else LENGTH if rows is None else rows // HEADS
    s = LENGTH if rows is None or rows == MOST_DECODED else LONG_CACHE
    d, dv, mask = kernels.d, kernels.dv, None
    queries = (BATCH, 1, HEADS + 1, n, d) if kernels.in_groups else (BATCH, HEADS, 2, n, d)
    q, k, v = normal(*queries), normal(BATCH, 1, 2, s, d), normal(BATCH, 1, s, dv)
    lam = torch.rand(BATCH, HEADS, n, generator=generator).mul(_LAMBDA_SCALE).to(device)
    if kernels.mask:
        mask = torch.rand(BATCH, 1, n, s, generator=generator).to(device) < 0.7
        mask[..., 0] = True  # every query sees a key: no row of the plain formula is NaN
        if kernels.mask == "additive":
            mask = torch.where(mask, normal(BATCH, 1, n, s, dtype=torch.float32), -torch.inf).to(kernels.dtype)
    request = Request(q, k, v, lam, mask, True, d**-0.5, None, None)
    return _Case(request, normal(dv, dtype=torch.float32), normal(BATCH, HEADS, n, dv))


def _in_dtype(case: _Case, dtype: torch.dtype) -> _Case:
    r = case.request
    mask = r.attn_mask if r.attn_mask is None or r.attn_mask.dtype == torch.bool else r.attn_mask.to(dtype)
    request = r._replace(q=r.q.to(dtype), k=r.k.to(dtype), v=r.v.to(dtype), lam=r.lam.to(dtype), attn_mask=mask)
    return _Case(request, case.weight.to(dtype), case.grad_out.to(dtype))


def _by_formula(request: Request, weight: Tensor) -> Tensor:
    return rms_norm(reference_attention(request), weight, _NORM_EPS)


def _by_kernels(request: Request, weight: Tensor) -> Tensor:
    return triton_attention(request, Norm(weight, _NORM_EPS, 1.0))


def _solve(attend: Callable[[Request, Tensor], Tensor], case: _Case) -> dict[str, Tensor]:
    """The output and, where gradients are on, those of all inputs: each (…, positions, channels)."""
    r = case.request
    leaves = [x.detach().requires_grad_(torch.is_grad_enabled()) for x in (r.q, r.k, r.v, r.lam, case.weight)]
    q, k, v, lam, weight = leaves
    out = attend(r._replace(q=q, k=k, v=v, lam=lam), weight)
    if not torch.is_grad_enabled():
        return {"out": out}
    *of_tensors, of_lam, of_weight = torch.autograd.grad(out, leaves, case.grad_out)
    gradients = (*of_tensors, of_lam.unsqueeze(-1), of_weight.unsqueeze(-1))
    return {"out": out.detach(), **dict(zip(("q", "k", "v", "λ", "the norm's weight"), gradients, strict=True))}


def _share_of_allowed(value: Tensor, plain: Tensor, truth: Tensor, eps: float) -> float:
    """The largest error of a block of positions as a share of what is allowed in it; infinite for a NaN."""

    def largest(x: Tensor) -> Tensor:
        return torch.stack([block.abs().max() for block in x.double().split(POSITIONS, dim=-2)])

    allowed = PLAIN_ERRORS * largest(plain - truth) + ROUNDINGS * eps * largest(truth)
    return float((largest(value - truth) / allowed).nan_to_num(nan=torch.inf).max())


def status(index: int) -> str:
    """What is known of a device, for people."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    verdicts = findings_of(index).of(VERDICTS)
    if not verdicts:
        return "not checked yet: the first call that needs them checks them"
    right = [name for name, verdict in verdicts.items() if verdict == RIGHT]
    wrong = [f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict != RIGHT]
    parts = [f"right: {'; '.join(right)}"] if right else []
    return ". ".join([*parts, *([f"not used: {'; '.join(wrong)}"] if wrong else [])])
