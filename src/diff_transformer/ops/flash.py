"""Calls FlashAttention-4 (the package ``flash-attn-4``) for the maps, then subtracts and normalises their results.

Its kernels, for Hopper and Blackwell, take values wider than keys, so a map is one call. Maps that share their keys
(DIFF V2) are one call together, in which the queries of both are heads that share a key head.

Everything around the calls is plain torch, compiled as one graph with them: the subtraction, the norm, zeros in place
of keys that are not finite and the sums of gradients are each one pass over memory, forward and backward. Where a
caller compiles the model, they become part of its graph instead. A kernel of our own would do the same in more lines.
"""

import functools
import importlib.metadata
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import (
    Norm,
    Request,
    confine,
    is_eager,
    refuse_second_order,
    triton_is_installed,
)

PACKAGE = "flash-attn-4"
DTYPES = (torch.bfloat16, torch.float16)
WIDEST = {9: 256, 10: 128}  # key or value, by the major compute capability
ALIGNED = 8  # numbers: rows of a tensor begin at multiples of 16 bytes
# What was timed, in bfloat16, causal: .39 to .80 of the Triton kernels' time on an H100 (docs/log.md).
MEASURED_QUERIES, MEASURED_WIDTHS = 4096, ((64, 128), (128, 256))


def reason_against_fa4(request: Request) -> str | None:
    """Return why FlashAttention-4 does not take the request, or None."""
    q, d, dv = request.q, request.q.shape[-1], request.v.shape[-1]
    reason, widest = _kernels_on(q.device.type, q.device.index, q.dtype)
    if reason is not None:
        return reason
    # Out of the function above, whose arguments torch.compile takes as constants: these sizes may be open.
    if max(d, dv) > widest or d % ALIGNED or dv % ALIGNED:
        return f"it takes d and dv up to {widest} that are multiples of {ALIGNED}, got d {d} and dv {dv}"
    if request.attn_mask is not None:
        return "it takes no attn_mask; use 'triton' or 'sdpa'"
    if request.segment_bounds is not None:
        return "it takes no documents (cu_seqlens); use 'triton' or 'sdpa'"
    if request.scale <= 0:
        return f"it takes a scale above 0, got {request.scale}"
    return None


def auto_takes_fa4(request: Request) -> bool:
    """Return whether ``auto`` tries FlashAttention-4: installed, on Hopper, for the kind of request that was timed."""
    q, v = request.q, request.v
    if q.dtype != torch.bfloat16 or not request.is_causal or request.window is not None or request.n < MEASURED_QUERIES:
        return False
    is_measured = any(q.shape[-1] == d and v.shape[-1] == dv for d, dv in MEASURED_WIDTHS)
    return is_measured and reason_against_fa4(request) is None and _is_hopper(q.device.index)


@torch.compiler.assume_constant_result
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index)[0] == 9


@torch.compiler.assume_constant_result
def _kernels_on(device: str, index: int | None, dtype: torch.dtype) -> tuple[str | None, int]:
    """Return why there are no kernels for tensors of this kind, or None, and the widest heads that they take."""
    if device != "cuda":
        return f"it needs its tensors on a CUDA device, got {device}", 0
    if dtype not in DTYPES:
        return f"it computes bfloat16 and float16, got {dtype}", 0
    if not fa4_is_installed():
        return f"the package {PACKAGE} is not installed", 0
    major, minor = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None or major not in WIDEST:
        return f"it is made for NVIDIA's compute capabilities 9.x and 10.x, got {major}.{minor}", 0
    return None, WIDEST[major]


@functools.cache
def fa4_is_installed() -> bool:
    # Its metadata and not the module, whose parent imports FlashAttention-2 where that is installed.
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _interface() -> Any:
    """Import FlashAttention-4, and give its kernels for Hopper other tiles for values wider than keys.

    It takes the tiles by the keys' width, and spills registers where values are twice as wide. Forward the tiles of the
    values' width spill nothing, and backward those of the mean width. Other calls keep theirs.
    """
    try:
        from flash_attn.cute import interface  # type: ignore[import-not-found, unused-ignore]  # there is no stub

        forward_tiles, backward_tiles = interface._tile_size_fwd_sm90, interface._tile_size_bwd_sm90
    except (ImportError, AttributeError) as error:
        found = importlib.metadata.version(PACKAGE)
        raise ValueError(f"{PACKAGE} {found} lacks what 'fa4' calls, as 4.0.0b36 has it: {error}") from error

    def by(width: Callable[[int, int], int], tiles: Callable[..., Any]) -> Callable[..., Any]:
        return lambda d, dv, *others, **options: tiles(max(d, width(d, dv)), dv, *others, **options)

    interface._tile_size_fwd_sm90 = by(lambda d, dv: dv, forward_tiles)
    interface._tile_size_bwd_sm90 = by(lambda d, dv: (d + dv) // 2, backward_tiles)
    return interface


def _options(k: Tensor, scale: float, is_causal: bool, window: int | None) -> dict[str, Any]:
    """Return the arguments of both passes; a window there counts the keys before a query's own, and is no option."""
    before = None if window is None or window >= k.shape[1] else window - 1
    return {"softmax_scale": scale, "causal": is_causal, "window_size_left": before}


@torch.library.custom_op(
    "diff_transformer::fa4",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float scale, bool is_causal, SymInt? window) -> (Tensor, Tensor)",
)
def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Attend with q (B, N, H, d), k (B, S, H_kv, d) and v (B, S, H_kv, dv).

    Returns:
        The output (B, N, H, dv), and the logarithm of each row's sum of exponentials, (B, H, N) float32.
    """
    options = _options(k, scale, is_causal, window)
    out, log_sums, *_ = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **options)
    return out, log_sums


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _ = q.shape
    return q.new_empty(batch, n, heads, v.shape[-1]), q.new_empty((batch, heads, n), dtype=torch.float32)


@torch.library.custom_op(
    "diff_transformer::fa4_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, float scale, bool is_causal, "
    "SymInt? window, Tensor? grad_log_sums=None) -> (Tensor, Tensor, Tensor)",
)
def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    *settings, grad_log_sums = others if len(others) == 4 else (*others, None)  # which may be left out
    sharing = q.shape[2] // k.shape[2]
    # Its backward takes heads that share a key head only if values are as wide as keys.
    repeats = sharing > 1 and k.shape[-1] != v.shape[-1]
    if repeats:
        k, v = (x.repeat_interleave(sharing, dim=2) for x in (k, v))
    # Otherwise several programs add to a gradient of q in the order in which they arrive.
    options = {**_options(k, *settings), "deterministic": torch.are_deterministic_algorithms_enabled()}
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    options |= {"dq": grad_q, "dk": grad_k, "dv": grad_v, "dlse": grad_log_sums}
    _interface()._flash_attn_bwd(q, k, v, out, grad_out, log_sums, **options)
    if repeats:
        grad_k, grad_v = (
            x.unflatten(2, (-1, sharing)).sum(3, dtype=torch.float32).to(x.dtype) for x in (grad_k, grad_v)
        )
    return grad_q, grad_k, grad_v


@backward.register_fake
def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, is_causal, window = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.settings = (scale, is_causal, window)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[3]) if grad_out is None else grad_out
    return *backward(grad_out, *saved, *ctx.settings, grad_log_sums), None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
refuse_second_order("fa4", backward)


def fa4_attention(request: Request, norm: Norm | None = None, *, compiles: bool = True) -> Tensor:
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the norm of it if there is one; around the calls compiled or not."""
    return _run(request, norm, compiles, False)[0]


def fa4_log_sums(request: Request, *, compiles: bool = True) -> tuple[Tensor, Tensor]:
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the log-sums of the scores, (B, G, r + 1, N), float32."""
    out, log_sums = _run(request, None, compiles, True)
    return out, torch.where(log_sums > -math.inf, log_sums, -math.inf)


def _run(request: Request, norm: Norm | None, compiles: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
    weight, eps = None, 0.0
    if norm is not None:  # the factor differs from layer to layer: as a part of the graph it would be compiled anew
        weight, eps = norm.weight.to(request.lam.dtype) * norm.factor, norm.eps
    run, signal_weight = _attend, request.signal_weight
    # Inside of what traces the call, its own compilation takes these steps up.
    is_cuda = request.q.device.type == "cuda"
    eager = is_eager(*request[:4], signal_weight, weight) and not torch.jit.is_tracing()
    if compiles and is_cuda and triton_is_installed() and eager:
        run = _compiled(request.q.shape[-1], request.v.shape[-1], request.q.dtype)
    settings = request.is_causal, request.scale, request.window
    return run(*request[:4], signal_weight, *settings, weight, eps, return_lse)


@functools.cache
def _compiled(*kind: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return :func:`_attend` compiled for a kind of request.

    Each has code of its own: torch leaves a width open where one piece of code meets two of them, and counts how often
    a piece of code was compiled.
    """
    code = _attend.__code__.replace(co_name="_".join(("attend", *map(str, kind))))
    return torch.compile(types.FunctionType(code, globals()))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    signal_weight: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sums (B, G, r + 1, N); empty unless asked for: their gradient would be zeros."""
    request, addend = confine(Request(q, k, v, lam, None, is_causal, scale, window, None))
    q, k, v = request.q, request.k, request.v.transpose(1, 2)
    ratio, settings = request.ratio, (scale, is_causal, window)
    if k.shape[2] == 1 and q.shape[-1] == v.shape[-1]:  # of wide values its backward wants one head to a key head
        queries, keys = q.flatten(1, 2).transpose(1, 2), k[:, :, 0].transpose(1, 2)
        heads, log_sums = attend(queries, keys, v, *settings)
        heads, log_sums = heads.unflatten(2, (-1, ratio + 1)), log_sums.unflatten(1, (-1, ratio + 1))
        first, second = heads[:, :, :, :-1], heads[:, :, :, -1:]
    else:
        of_maps, first_queries = k.unbind(2), q[:, :, 0] if ratio == 1 else q[:, :, :-1].flatten(1, 2)
        (first, log_sums1), (second, log_sums2) = (
            attend(queries.transpose(1, 2), of_maps[c % len(of_maps)].transpose(1, 2), v, *settings)
            for c, queries in enumerate((first_queries, q[:, :, -1]))
        )
        first, second = first.unflatten(2, (-1, ratio)), second.unsqueeze(3)
        log_sums = torch.cat((log_sums1.unflatten(1, (-1, ratio)), log_sums2.unsqueeze(2)), dim=2)
    # (B, N, G, r, dv) from here on, in float32, λ's dtype.
    if signal_weight is not None:
        first = signal_weight.transpose(1, 2).unflatten(2, (-1, ratio)).unsqueeze(-1) * first
    out = first - lam.transpose(1, 2).unflatten(2, (-1, ratio)).unsqueeze(-1) * second
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    out = out.flatten(2, 3).transpose(1, 2).to(q.dtype)
    out = out if addend is None else out + addend
    return out, log_sums if return_lse else lam.new_empty(0)
