"""Calls FlashAttention 2, 3 or 4, packages of others, for the maps, then subtracts and normalises their results.

Version 4 takes values wider than keys, so a map is one call; for the others the narrower are padded with zeros. Maps
that share their keys (DIFF V2) are one call together, in which the queries of both are heads that share a key head.

Everything around the calls is plain torch, compiled as one graph with them or in a caller's: the subtraction, the norm,
zeros in place of keys that are not finite and the sums of gradients are each one pass over memory, forward and
backward. A kernel of our own would do the same in more lines.
"""

import functools
import importlib
import importlib.metadata
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.attention_request import (
    Norm,
    Request,
    confine,
    constant_when_compiled,
    is_eager,
    refuse_second_order,
    triton_is_installed,
)

# By backend: the package, a version that has the functions called below, and their module.
PACKAGES = {
    "fa2": ("flash-attn", "2.8.3", "flash_attn.flash_attn_interface"),
    "fa3": ("flash-attn-3", "3.0.0", "flash_attn_interface"),
    "fa4": ("flash-attn-4", "4.0.0b36", "flash_attn.cute.interface"),
}
# The widest key or value, by backend and major compute capability.
WIDEST = {"fa2": dict.fromkeys((8, 9, 10, 12), 256), "fa3": {9: 256}, "fa4": {9: 256, 10: 128}}
ALIGNED = 8  # numbers: rows of a tensor begin at multiples of 16 bytes
# What was timed, in bfloat16, causal: .39 to .80 of the Triton kernels' time on an H100 (docs/log.md).
MEASURED_QUERIES, MEASURED_WIDTHS = 4096, ((64, 128), (128, 256))
# By metadata and not by module: the parent of FlashAttention-4's imports FlashAttention-2 if that is there.
is_installed = functools.cache(lambda package: any(importlib.metadata.distributions(name=package)))


def reason_against_flash(backend: str, request: Request) -> str | None:
    """Return why FlashAttention of a version, "fa2", "fa3" or "fa4", does not take the request, or None."""
    q, d, dv = request.q, request.q.shape[-1], request.v.shape[-1]
    reason, major = _kernels_on(backend, q.device.type, q.device.index, q.dtype)
    if reason is not None:
        return reason
    # Out of the function above, whose arguments torch.compile takes as constants: these sizes may be open.
    widest = WIDEST[backend][major]
    if backend == "fa3" and request.needs_gradient and torch.are_deterministic_algorithms_enabled():
        widest = 192
    if max(d, dv) > widest or d % ALIGNED or dv % ALIGNED:
        return f"it takes d and dv up to {widest} that are multiples of {ALIGNED}, got d {d} and dv {dv}"
    if request.attn_mask is not None or request.segment_bounds is not None:
        return "it takes no attn_mask and no documents (cu_seqlens); use 'triton' or 'sdpa'"
    if request.scale <= 0 or q.shape[0] == 0:
        return f"it takes a scale above 0 and a batch of 1 or more, got {request.scale} and {q.shape[0]}"
    # Where nothing bounds the keys after a query's position its kernels take S: too few for a position below 0.
    if backend == "fa2" and request.window is not None and not request.is_causal and request.n > request.s:
        return f"it takes a window without is_causal for no more queries than keys, got {request.n} and {request.s}"
    return None


def auto_takes_fa4(request: Request) -> bool:
    """Return whether ``auto`` tries FlashAttention-4: if installed, by times of Hopper, by prediction on Blackwell."""
    q, v = request.q, request.v
    if q.dtype != torch.bfloat16 or not request.is_causal or request.window is not None or request.n < MEASURED_QUERIES:
        return False
    is_measured = any(q.shape[-1] == d and v.shape[-1] == dv for d, dv in MEASURED_WIDTHS)
    return is_measured and reason_against_flash("fa4", request) is None


@constant_when_compiled
def _kernels_on(backend: str, device: str, index: int | None, dtype: torch.dtype) -> tuple[str | None, int]:
    """Return why there are no kernels for tensors of this kind, or None, and the major compute capability."""
    package, known = PACKAGES[backend][0], WIDEST[backend]
    if device != "cuda":
        return f"it needs its tensors on a CUDA device, got {device}", 0
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, got {dtype}", 0
    major, minor = torch.cuda.get_device_capability(index)
    if torch.version.hip is not None or major not in known:
        listed = ", ".join(f"{each}.x" for each in known)
        return f"it is called on NVIDIA's compute capabilities {listed}, got {major}.{minor}", major
    return None if is_installed(package) else f"the package {package} is not installed", major


@functools.cache
def _functions(backend: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Import forward(q, k, v) and backward(dout, q, k, v, out, log_sums), whose options then have the same names.

    FlashAttention-4 takes its tiles on Hopper by the keys' width, and spills registers where values are twice as wide.
    Forward the tiles of the values' width spill nothing, and backward those of the mean width. Other calls keep theirs.
    """
    package, version, module = PACKAGES[backend]
    # Versions without the third take other arguments.
    names = ["_flash_attn_forward", "_flash_attn_backward", "_flash_attn_forward_fake"]
    if backend == "fa4":
        names = ["_flash_attn_fwd", "_flash_attn_bwd", "_tile_size_fwd_sm90", "_tile_size_bwd_sm90"]
    try:
        interface: Any = importlib.import_module(module)
        forward, backward, *tiles = (getattr(interface, name) for name in names)
    except (ImportError, AttributeError) as error:
        lacks = f"lacks what {backend!r} calls, as {version} has it"
        why = "does not load" if isinstance(error, ImportError) else lacks
        raise ValueError(f"{package} {importlib.metadata.version(package)} {why}: {error}") from error
    if backend == "fa2":
        unused = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "window_size_right": -1}
        return functools.partial(forward, return_softmax=False, **unused), functools.partial(backward, **unused)
    if backend == "fa3":
        return forward, lambda *tensors, causal, **options: backward(*tensors, is_causal=causal, **options)
    interface._tile_size_fwd_sm90 = lambda d, dv, *a, **b: tiles[0](max(d, dv), dv, *a, **b)
    interface._tile_size_bwd_sm90 = lambda d, dv, *a, **b: tiles[1](max(d, (d + dv) // 2), dv, *a, **b)
    forward = functools.partial(forward, return_lse=True)
    return forward, lambda dout, q, k, v, out, *a, **b: backward(q, k, v, out, dout, *a, **b)


def _alike(backend: str, *tensors: Tensor) -> list[Tensor]:
    """Pad tensors with zeros to one width, of which FlashAttention-4 takes several; copy rows that are not aligned."""
    width = max(x.shape[-1] for x in tensors)
    padded = [x if backend == "fa4" or x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]
    for i, x in enumerate(padded):
        if x.stride(-1) != 1 or any(n % ALIGNED for n in (*x.stride()[:-1], x.data_ptr() // 2)):
            padded[i] = x.clone(memory_format=torch.contiguous_format)
    return padded


@torch.library.custom_op("diff_transformer::flash", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, backend: str, scale: float, is_causal: bool, window_left: int | None
) -> tuple[Tensor, Tensor]:
    """Return (B, N, H, dv) of q (B, N, H, d), k (B, S, H_kv, d), v (B, S, H_kv, dv); log-sums (B, H, N), float32."""
    options = {"softmax_scale": scale, "causal": is_causal, "window_size_left": window_left}
    out, log_sums, *_ = _functions(backend)[0](*_alike(backend, q, k, v), **options)
    return out.narrow(-1, 0, v.shape[-1]).contiguous(), log_sums


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    batch, n, heads, _ = q.shape
    return q.new_empty(batch, n, heads, v.shape[-1]), q.new_empty((batch, heads, n), dtype=torch.float32)


@torch.library.custom_op(
    "diff_transformer::flash_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor? grad_log_sums, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, "
    "str backend, float scale, bool is_causal, SymInt? window_left) -> (Tensor, Tensor, Tensor)",
)
def backward(grad_out: Tensor, grad_log_sums: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v."""
    *tensors, log_sums, backend, scale, is_causal, window_left = others
    grad_out, q, k, v, out = _alike(backend, grad_out, *tensors)
    sharing = q.shape[2] // k.shape[2]
    # FlashAttention-4's takes heads that share a key head only if values are as wide as keys.
    repeats = sharing > 1 and k.shape[-1] != v.shape[-1]
    if repeats:
        k, v = (x.repeat_interleave(sharing, dim=2) for x in (k, v))
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    options = {"softmax_scale": scale, "causal": is_causal, "window_size_left": window_left}
    # Otherwise several programs add to a gradient of q in the order in which they arrive.
    options |= {"deterministic": torch.are_deterministic_algorithms_enabled()}
    options |= zip(("dq", "dk", "dv"), gradients, strict=True)
    options |= {} if grad_log_sums is None else {"dlse": grad_log_sums}  # FlashAttention-4 alone takes one
    _functions(backend)[1](grad_out, q, k, v, out, log_sums, **options)
    if repeats:
        gradients[1:] = (x.unflatten(2, (-1, sharing)).sum(3, dtype=torch.float32).to(x.dtype) for x in gradients[1:])
    return tuple(x.narrow(-1, 0, like.shape[-1]).contiguous() for x, like in zip(gradients, tensors, strict=False))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.settings = inputs[3:]


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_log_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[3]) if grad_out is None else grad_out
    return *backward(grad_out, grad_log_sums, *saved, *ctx.settings), None, None, None, None


attend.register_autograd(_differentiate, setup_context=_save)
backward.register_fake(lambda *tensors_and_settings: tuple(x.new_empty(x.shape) for x in tensors_and_settings[2:5]))
refuse_second_order("fa2, fa3, fa4", backward)


def flash_attention(backend: str, request: Request, norm: Norm | None = None, *, compiles: bool = True) -> Tensor:
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the norm of it if there is one; around the calls compiled or not."""
    return _run(backend, request, norm, compiles, False)[0]


def fa4_log_sums(request: Request, *, compiles: bool = True) -> tuple[Tensor, Tensor]:
    """Compute (w A1 − λA2) V, (B, H, N, dv), and the log-sums of the scores, (B, G, r + 1, N), float32."""
    return _run("fa4", request, None, compiles, True)


def _run(backend: str, request: Request, norm: Norm | None, compiles: bool, return_lse: bool) -> tuple[Tensor, Tensor]:
    weight, eps = None, 0.0
    if norm is not None:  # the factor differs from layer to layer: as a part of the graph it would be compiled anew
        weight, eps = norm.weight.to(request.lam.dtype) * norm.factor, norm.eps
    # Inside of what traces the call, its own compilation takes these steps up.
    eager = is_eager(*request[:4], request.signal_weight, weight) and not torch.jit.is_tracing()
    compiles = compiles and request.q.device.type == "cuda" and triton_is_installed() and eager
    run = _compiled(backend, request.q.shape[-1], request.v.shape[-1], request.q.dtype) if compiles else _attend
    return run(backend, request, weight, eps, return_lse)


@functools.cache
def _compiled(*kind: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return :func:`_attend` compiled for a kind of request, as code of its own.

    Torch leaves a width open where one piece of code meets two of them, and counts how often it was compiled.
    """
    code = _attend.__code__.replace(co_name="_".join(("attend", *map(str, kind))))
    return torch.compile(types.FunctionType(code, globals()))


def _attend(
    backend: str, request: Request, norm_weight: Tensor | None, norm_eps: float, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, and the log-sums (B, G, r + 1, N); empty unless asked for: their gradient would be zeros."""
    request, addend = confine(request)
    q, k, window, ratio = request.q, request.k.unbind(2), request.window, request.ratio
    everything = None if backend == "fa4" else -1
    window_left = everything if window is None or window >= request.s else window - 1  # without a query's own key
    # Of wide values a backward wants one head to a key head.
    parts = [q] if len(k) == 1 and q.shape[-1] == request.v.shape[-1] else [q[:, :, :-1], q[:, :, -1:]]
    outs, log_sums = [], []
    for part, of_part in zip(parts, k * 2, strict=False):
        tensors = [x.transpose(1, 2) for x in (part.flatten(1, 2), of_part, request.v)]
        out, log_sum = attend(*tensors, backend, request.scale, request.is_causal, window_left)
        outs.append(out.unflatten(2, (-1, part.shape[2])))
        log_sums.append(log_sum.unflatten(1, (-1, part.shape[2])))
    # (B, N, G, r, dv) from here on, in float32, λ's dtype.
    first, second = outs[0][:, :, :, :ratio], outs[-1][:, :, :, -1:]
    if request.signal_weight is not None:
        first = request.signal_weight.transpose(1, 2).unflatten(2, (-1, ratio)).unsqueeze(-1) * first
    out = first - request.lam.transpose(1, 2).unflatten(2, (-1, ratio)).unsqueeze(-1) * second
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight
    out = out.flatten(2, 3).transpose(1, 2).to(q.dtype)
    lse = torch.cat(log_sums, dim=2) if return_lse else request.lam.new_empty(0)
    return out if addend is None else out + addend, torch.where(lse > -torch.inf, lse, -torch.inf)
