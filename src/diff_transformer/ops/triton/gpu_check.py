"""Compares compiled kernels with Equation 1 before ``auto`` takes them, once a process for each family of requests.

Whether those of ``triton`` and FlashAttention are right depends on the device, its driver and the package's version. So
each family that compiles kernels of its own is tried on a small case: the output and all gradients. One that does not
compile, does not fit on the device or is wrong there is answered by another backend, and a warning says so.
"""

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import Norm, Request, constant_when_compiled
from diff_transformer.ops.flash import fa4_log_sums, flash_attention
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.packed import pack, packed_views, unpacked
from diff_transformer.ops.reference import (
    ROUNDINGS,
    log_sums,
    reference_attention,
    rms_by_position,
    rounding_band,
    share_of_allowed,
)
from diff_transformer.ops.triton.kernel_arguments import LONG_CACHE, MOST_DECODED, precision_of
from diff_transformer.ops.triton.triton_backend import triton_attention, triton_log_sums

SWITCH = "DIFF_TRANSFORMER_TRITON"
FORWARD, TRAINING = "forward", "training"
# The case: two sequences, two heads that share a key head and in groups a noise map, a length with all kinds of blocks.
BATCH, HEADS, LENGTH = 2, 2, 320
# Passes that decode, each with its queries in the case; a tile has a row for each head of each.
DECODING = {"decoding one query": 1, "decoding 16 rows": 8, "decoding 32 rows": 16, "decoding 64 rows": 32}
WIDTHS = (16, 32, 64, 128, 256)  # of a query and of a value, at most, in a family
POSITIONS = 32  # in a block of the comparison
_EPS_OF_TF32 = 2.0**-10
_LAMBDA_SCALE, _NORM_EPS = 1.5, 0.1  # an eps beside which the norm does not hide a wrong scale
_ROUNDINGS = {**ROUNDINGS, "norm_weight": 6, "signal_weight": 6}

_lock = threading.Lock()
_reasons: dict[tuple[int, str], str | None] = {}  # by device and family: why it is not taken, or None


class Family(NamedTuple):
    """Requests that are checked together."""

    dtype: torch.dtype
    d: int
    dv: int
    mask: str  # "", "boolean" or "additive"
    pass_: str  # FORWARD, TRAINING, or one of DECODING
    in_groups: bool = False  # several signal heads share a noise map
    backend: str = "triton"
    has_signal: bool = False  # a weight of the first map: the log-sums are checked, too
    in_eight_bits: bool = False  # keys and values are rows of int8

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.") + (" as tf32" if precision_of(self.dtype) == "tf32" else "")
        parts = [dtype, f"d {self.d}", f"dv {self.dv}", f"{self.mask} mask" * bool(self.mask)]
        parts += [
            "in groups" * self.in_groups,
            "two weights" * self.has_signal,
            "in eight bits" * self.in_eight_bits,
            self.pass_,
            f"by {self.backend}" * (self.backend != "triton"),
        ]
        return ", ".join(filter(None, parts))


def kernels_are_right(request: Request, backend: str = "triton") -> bool:
    """Return whether ``auto`` may take the kernels for a request on CUDA, after a check in this process."""
    mask = request.attn_mask
    kind = "" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    # By comparisons, which torch.compile makes into no constant.
    d, dv = (next((most for most in WIDTHS if x.shape[-1] <= most), WIDTHS[-1]) for x in (request.q, request.v))
    index, in_groups, has_signal = request.q.device.index, request.ratio > 1, request.signal_weight is not None
    passes = _passes(request) if backend == "triton" else [TRAINING if request.needs_gradient else FORWARD]
    of_request = index, request.q.dtype, d, dv, kind
    others = in_groups, backend, has_signal, request.k.dtype == torch.int8
    answers = [_is_right(*of_request, pass_, *others) for pass_ in passes]
    return all(answers)


def _passes(request: Request) -> list[str]:
    """Return which kernels would run; while torch.compile traces, all that could, as it may leave lengths open."""
    if request.needs_gradient:
        return [TRAINING]
    rows = {name: HEADS * queries for name, queries in DECODING.items()}
    known = [name for name in rows if request.q.dtype.itemsize == 2 or rows[name] <= MOST_DECODED]
    if torch.compiler.is_compiling():
        return [FORWARD, *known]
    needed = request.heads_per_key * request.n
    if request.segment_bounds is None:
        if request.n == 1 and needed <= MOST_DECODED:
            return known[:1]
        for name in known[1:]:
            if needed <= rows[name] and (rows[name] <= MOST_DECODED or request.s >= LONG_CACHE):
                return [name]
    return [FORWARD]


@constant_when_compiled
def _is_right(index: int | None, *of_family: Any) -> bool:
    family = Family(*of_family)
    if os.environ.get(SWITCH) == "0":
        return False
    index = torch.cuda.current_device() if index is None else index
    key = index, str(family)  # which names what multiplies float32, too
    with _lock:
        if key in _reasons:
            return _reasons[key] is None
        if torch.cuda.is_current_stream_capturing():  # which neither compiles nor waits
            return False
        try:
            reason = _reasons[key] = reason_against_family(family, torch.device("cuda", index))
        except torch.OutOfMemoryError:  # says nothing of the kernels
            return False
    if reason is not None:
        others = "'sdpa'" if family.backend == "triton" else "'triton' or 'sdpa'"
        warnings.warn(
            f"backend {family.backend!r} failed its check on {torch.cuda.get_device_name(index)}, and {others} is used"
            f" in its place for {family}: {reason}. {SWITCH}=0 in the environment switches the kernels off without a "
            "warning.",
            stacklevel=2,
        )
    return reason is None


def reason_against_family(family: Family, device: torch.device) -> str | None:
    """Return the error of a family's kernels on a device, or None.

    Runs in a thread of its own, which knows no trace or transform of the caller: autocast, inference mode, torch.func,
    fake tensors.

    Raises:
        torch.OutOfMemoryError: the device is full.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_compare, family, device).result()


def _compare(family: Family, device: torch.device) -> str | None:
    with torch.set_grad_enabled(family.pass_ == TRAINING):
        given = case = _case(family, device)
        exact = _in_float64(case)
        if family.in_eight_bits:
            given, case, exact = _in_eight_bits(case, exact)
        truth, plain = _solve("reference", exact), _solve("reference", case)
        try:
            answer = _solve(family.backend, given)
            if device.type == "cuda":  # a kernel's failure shows here, and not in a later call
                torch.cuda.current_stream(device).synchronize()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # triton, ptxas, the driver and FlashAttention each raise their own
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            return f"they do not run ({type(error).__name__}: {reason})"
    eps = _EPS_OF_TF32 if precision_of(family.dtype) == "tf32" else torch.finfo(family.dtype).eps
    for name, value in answer.items():
        of_value, of_plain = (rms_by_position(x.double() - truth[name], POSITIONS) for x in (value, plain[name]))
        roundings = _ROUNDINGS.get(name, ROUNDINGS["out"])
        band = rounding_band(rms_by_position(truth[name], POSITIONS), eps, roundings, case.request.s)
        share = share_of_allowed(of_value, of_plain, band)
        if not share <= 1:
            what = f"gradient of {name}" if name in _ROUNDINGS else name
            return f"the {what} is wrong, {share:.3g} times the error that rounding explains"
    return None


class _Case(NamedTuple):
    request: Request
    weight: Tensor
    grad_out: Tensor


def _case(family: Family, device: torch.device) -> _Case:
    """Draw the same numbers every time, without touching the program's own random numbers."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = family.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    n = DECODING.get(family.pass_, LENGTH)
    s = LONG_CACHE if family.pass_ in DECODING and HEADS * n > MOST_DECODED else LENGTH
    d, dv, mask = family.d, family.dv, None
    queries = (BATCH, 1, HEADS + 1, n, d) if family.in_groups else (BATCH, HEADS, 2, n, d)
    q, k, v = normal(*queries), normal(BATCH, 1, 2, s, d), normal(BATCH, 1, s, dv)
    lam = torch.rand(BATCH, HEADS, n, generator=generator).mul(_LAMBDA_SCALE).to(device)
    if family.mask:
        mask = torch.rand(BATCH, 1, n, s, generator=generator).to(device) < 0.7
        mask[..., 0] = True  # every query sees a key: no row of the plain formula is NaN
        if family.mask == "additive":
            mask = torch.where(mask, normal(BATCH, 1, n, s, dtype=torch.float32), -torch.inf).to(family.dtype)
    signal = torch.rand(BATCH, HEADS, n, generator=generator).to(device) if family.has_signal else None
    request = Request(q, k, v, lam, mask, True, d**-0.5, None, None, signal)
    # A model that learns has weights in float32, and one in half precision its norm's, too.
    weight = normal(dv, dtype=torch.float32 if family.pass_ == TRAINING else family.dtype)
    return _Case(request, weight, normal(BATCH, HEADS, n, dv))


def _in_float64(case: _Case) -> _Case:
    fields: dict[str, Any] = case.request._asdict()
    fields = {name: x.double() for name, x in fields.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return _Case(case.request._replace(**fields), case.weight.double(), case.grad_out.double())


def _in_eight_bits(case: _Case, exact: _Case) -> list[_Case]:
    """Return the case with packed keys and values, and both with the numbers that these stand for."""
    k, v = case.request[1:3]
    rows = pack(k.transpose(2, 3).flatten(-2)), pack(v), k.shape[-1]
    stored = packed_views(*rows), unpacked(*rows, v.dtype), unpacked(*rows, torch.float64)
    cases = zip((case, case, exact), stored, strict=True)
    return [each._replace(request=each.request._replace(k=k, v=v)) for each, (k, v) in cases]


def _attend(backend: str, request: Request, weight: Tensor | None) -> Tensor:
    norm = None if weight is None else Norm(weight, _NORM_EPS, 1.0)
    if backend == "reference":
        out = reference_attention(request)
        return out if weight is None else rms_norm(out, weight, _NORM_EPS)
    if backend == "triton":
        return triton_attention(request, norm)
    # Uncompiled: torch.compile, which may wait for this check, holds the lock that a compilation here would wait for.
    return flash_attention(backend, request, norm, compiles=False)


def _with_log_sums(backend: str, request: Request) -> tuple[Tensor, Tensor]:
    if backend == "triton":
        return triton_log_sums(request)
    if backend == "fa4":
        return fa4_log_sums(request, compiles=False)
    return _attend(backend, request, None), log_sums(request)


def _solve(backend: str, case: _Case) -> dict[str, Tensor]:
    """Return the output and, if gradients are on, those of all inputs: each (…, positions, channels)."""
    inputs = {**case.request._asdict(), "norm_weight": case.weight}
    names = [name for name in ("norm_weight", "q", "k", "v", "lam", "signal_weight") if inputs[name] is not None]
    leaves = {name: inputs[name].detach().requires_grad_(torch.is_grad_enabled()) for name in names}
    request = case.request._replace(**{name: leaves[name] for name in names[1:]})
    outputs, gradients = {"output": _attend(backend, request, leaves["norm_weight"])}, [case.grad_out]
    if request.signal_weight is not None:
        plain, of_maps = _with_log_sums(backend, request)
        outputs |= {"output without a norm": plain, "log-sum": of_maps.unsqueeze(-1)}
        gradients += [case.grad_out, torch.ones_like(outputs["log-sum"])]
    if not torch.is_grad_enabled():
        return outputs
    of_leaves = torch.autograd.grad(list(outputs.values()), list(leaves.values()), gradients)
    results = {**outputs, **dict(zip(leaves, of_leaves, strict=True))}
    return {name: x.detach() if x.dim() > 3 else x.unsqueeze(-1) for name, x in results.items()}


def status() -> str:
    """Say whether ``auto`` takes the kernels."""
    if os.environ.get(SWITCH) == "0":
        return f"switched off by {SWITCH}=0"
    return "taken once they have given the results of Equation 1, which each process checks at its first calls"
