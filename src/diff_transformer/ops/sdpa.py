"""Composes the operator of torch's ``scaled_dot_product_attention``, in the ways of Appendix A.

There is one call for each map, if the kernel that torch would use takes values wider than the keys. If not, V is split
into parts of width d, and there is one call for each map and part.
"""

import contextlib
import functools
import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.attention_request import Request, constant_when_compiled

# Older ones can be wrong for lengths that 128 does not divide; torch itself prefers cuDNN from here on.
_TRUSTED_CUDNN = 91501


class SdpaCase(NamedTuple):
    """The properties of a call that decide which of torch's kernels can run."""

    device: str
    dtype: torch.dtype
    d: int
    dv: int
    masked: bool
    gradient: bool = False
    heads: int = 1  # query heads that share a key head, 2 for any number
    queries: int = 2  # 2 for any number


class SdpaPlan(NamedTuple):
    """How each map is computed: ``full_v`` in one call, or else V is split."""

    full_v: bool
    cudnn: bool = False  # cuDNN comes first, where torch itself might prefer a slower kernel
    repeat_keys: bool = False  # every query head gets a key head of its own


@constant_when_compiled
def sdpa_plan(*fields: Any) -> SdpaPlan:
    """Return the plan of an :class:`SdpaCase` with these fields, found by asking torch's kernels."""
    case = SdpaCase(*fields)
    if case.device != "cuda":
        # Outside CUDA torch answers wide values, as well as enable_gqa, with its plain formula.
        return SdpaPlan(case.d == case.dv, repeat_keys=case.heads > 1)
    # The answers depend on these switches as well.
    switches = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return _plan_on_cuda(case, switches)


@functools.lru_cache(maxsize=256)
def _plan_on_cuda(case: SdpaCase, switches: tuple[bool, ...]) -> SdpaPlan:
    """Plan FlashAttention on the full V, else cuDNN on the full V, else FlashAttention on parts of V; and the
    memory-efficient kernel only if no other takes the request (a mask without cuDNN, or float32).

    docs/backends.md has the measurements behind this order.
    """
    flash = torch.backends.cuda.can_use_flash_attention
    efficient = torch.backends.cuda.can_use_efficient_attention
    full_v, part_of_v = _probe(case), _probe(case._replace(dv=case.d))
    if flash(full_v):
        return SdpaPlan(full_v=True)
    # cuDNN plans anew for every length, which decoding would pay at every token.
    trusted = case.queries > 1 and (torch.backends.cudnn.version() or 0) >= _TRUSTED_CUDNN
    if trusted and torch.backends.cuda.can_use_cudnn_attention(full_v):
        return SdpaPlan(full_v=True, cudnn=True)
    if flash(part_of_v):
        return SdpaPlan(full_v=False)
    if efficient(full_v) or efficient(part_of_v):
        return SdpaPlan(full_v=efficient(full_v))
    if case.heads > 1:  # FlashAttention and cuDNN alone let query heads share a key head
        return _plan_on_cuda(case._replace(heads=1), switches)._replace(repeat_keys=True)
    # torch's plain formula, of which two calls cost less than four.
    return SdpaPlan(full_v=True)


def _probe(case: SdpaCase) -> torch.backends.cuda.SDPAParams:
    """Make small tensors of a case, in the form that ``can_use_flash_attention`` and its like take."""
    make = functools.partial(torch.zeros, device=case.device, dtype=case.dtype, requires_grad=case.gradient)
    q, k, v = make((1, case.heads, 64, case.d)), make((1, 1, 64, case.d)), make((1, 1, 64, case.dv))
    mask = torch.ones(1, 1, 64, 64, device=case.device, dtype=torch.bool) if case.masked else None
    return torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, False, case.heads > 1)


def _combined_mask(request: Request, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Combine everything that hides keys into one mask, ``dtype`` if additive, and which rows see nothing.

    Those see all keys in the mask, so that their softmax stays finite.
    """
    attn_mask, allowed = request.attn_mask, request.position_mask()
    if attn_mask is None and (allowed is None or request.n <= request.s):
        return allowed, None
    if attn_mask is None or attn_mask.dtype == torch.bool:
        mask = attn_mask if allowed is None else allowed if attn_mask is None else attn_mask & allowed
        fully_masked = ~mask.any(-1, keepdim=True)
        return mask | fully_masked, fully_masked
    mask = attn_mask.to(torch.promote_types(attn_mask.dtype, dtype))
    if mask.dtype != dtype:
        # A finite value that this dtype cannot hold, such as float32's lowest in float16, must not turn into −∞.
        info = torch.finfo(dtype)
        mask = torch.where(mask == float("-inf"), mask, mask.clamp(info.min, info.max)).to(dtype)
    if allowed is not None:
        mask = mask.masked_fill(~allowed, float("-inf"))
    fully_masked = (mask == float("-inf")).all(-1, keepdim=True)
    return mask.masked_fill(fully_masked, 0.0), fully_masked


def sdpa_attention(request: Request, dropout_p: float = 0.0) -> Tensor:
    """Compute A1 V − λ A2 V, (B, H, N, dv). Of the weights of either map a share ``dropout_p`` is dropped."""
    q, k, v = request[:3]
    ratio = request.ratio
    dtype, gradient = q.dtype, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if gradient and dtype == torch.float16:
        # Gradients of keys and values are sums over heads and maps: float16 may not hold a summand of what it holds.
        k, v = k.float(), v.float()
        if q.device.type == "cpu":  # elsewhere the calls stay in float16, and their gradients alone are added up wider
            q = q.float()
            request = request._replace(q=q)
    if q.device.type == "cpu" and 0 < q.stride(-2) < q.shape[-1]:  # rows that overlap, which torch's kernel misreads
        request = request._replace(q=(q := q.contiguous()))
    n, d, dv, heads_per_key, scale = request.n, q.shape[-1], v.shape[-1], request.heads_per_key, request.scale
    # Torch aligns its own causality to the start of the keys: the same thing only if N = S. Its fused kernels hide keys
    # before they scale, which a scale of 0 or less undoes.
    hides_more = request.attn_mask is not None or request.window is not None or request.segment_bounds is not None
    plain_causal = request.is_causal and n == request.s and not hides_more and scale > 0
    mask, fully_masked = (None, None) if plain_causal else _combined_mask(request, q.dtype)
    # Torch's attention takes no symbols here, and torch.compile makes them of comparisons but not of branches.
    causal = True if plain_causal else False  # noqa: SIM210  # bool(...) leaves a symbol
    # index() fixes a size that torch.compile would leave open, and so does a condition.
    widths, counts = (operator.index(d), operator.index(dv)), (2 if heads_per_key > 1 else 1, 2 if n > 1 else 1)
    plan = sdpa_plan(q.device.type, q.dtype, *widths, mask is not None, gradient, *counts)
    if dropout_p:  # calls for parts of V would drop other weights each
        plan = SdpaPlan(full_v=True, repeat_keys=True)
    repeats = True if plan.repeat_keys and heads_per_key > 1 else False  # noqa: SIM210
    grouped = True if heads_per_key > 1 and not repeats else False  # noqa: SIM210

    # Padding the last part of V to the width d gives it the kernel of the others.
    v_parts = (v,) if plan.full_v else tuple(F.pad(part, (0, d - part.shape[-1])) for part in v.split(d, dim=-1))
    maps_v = []
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": grouped}
    options["dropout_p"] = dropout_p
    kernels: contextlib.AbstractContextManager[object] = contextlib.nullcontext()  # in torch's own order
    # The CPU's fused kernel takes exp(score − log-sum) for gradients, which has no digits beside large addends.
    exact = gradient and mask is not None and mask.dtype != torch.bool and q.device.type == "cpu"
    if plan.cudnn or exact:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # The others are for what cuDNN refuses after all, such as a single key.
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        kernels = sdpa_kernel(order, set_priority=True)
    with kernels:
        first_queries = q[:, :, 0] if ratio == 1 else q[:, :, :-1].flatten(1, 2)  # (B, H, N, d)
        for c, queries in enumerate((first_queries, q[:, :, -1])):
            keys, parts = k[:, :, c % k.shape[2]].to(q.dtype), [part.to(q.dtype) for part in v_parts]
            if repeats:
                times = queries.shape[1] // k.shape[1]
                keys, *parts = (x.repeat_interleave(times, dim=1) for x in (keys, *parts))
            outputs = [F.scaled_dot_product_attention(queries, keys, part, **options) for part in parts]
            maps_v.append((outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1))[..., :dv])
            if q.device.type == "cpu":  # with AVX-512, torch's kernel makes a 0 of a query that is not a number
                maps_v[-1] = maps_v[-1] + (queries.detach() * 0).sum(-1, keepdim=True)
    second = maps_v[1] if ratio == 1 else maps_v[1].repeat_interleave(ratio, dim=1)
    out = request.difference(maps_v[0], second)
    if fully_masked is not None:
        out = out.masked_fill(fully_masked, 0.0)
    return out.to(dtype)
