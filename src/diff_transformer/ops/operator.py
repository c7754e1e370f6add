"""Defines the public operator, which checks the request, chooses a backend and calls it."""

import itertools
import math
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import (
    WIDEST_WINDOW,
    Norm,
    Request,
    autocast_dtype,
    check_dense,
    confine,
    is_block_mask,
    is_eager,
    is_floating,
    segment_bounds_from,
)
from diff_transformer.ops.backends import Backend, decode_rows, resolve
from diff_transformer.ops.cpu.cpu_backend import decode_fast_path
from diff_transformer.ops.functional import rms_norm
from diff_transformer.ops.packed import packed_views, rows_are_words, unpacked
from diff_transformer.ops.reference import log_sums, softmax_maps

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# The CPU kernel's arguments after λ for decoding, in its order, with the operator's defaults.
_OF_DECODING: dict[str, Any] = {"attn_mask": None, "is_causal": False, "scale": None, "window": None}
_OF_DECODING |= {"norm_weight": None, "norm_eps": 1e-5, "norm_scale": 1.0, "signal_weight": None}


@overload
def diff_attention(
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    is_causal: bool = False,
    attn_mask: "Tensor | BlockMask | None" = None,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_scale: float = 1.0,
    dropout_p: float = 0.0,
    signal_weight: Tensor | float | None = None,
    return_lse: Literal[False] = False,
    backend: str = "auto",
) -> Tensor: ...


@overload
def diff_attention(
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    is_causal: bool = False,
    attn_mask: "Tensor | BlockMask | None" = None,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_scale: float = 1.0,
    dropout_p: float = 0.0,
    signal_weight: Tensor | float | None = None,
    return_lse: Literal[True],
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]: ...


def diff_attention(
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    lam: Tensor | float,
    *,
    is_causal: bool = False,
    attn_mask: "Tensor | BlockMask | None" = None,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    norm_scale: float = 1.0,
    dropout_p: float = 0.0,
    signal_weight: Tensor | float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Compute differential attention, (softmax(Q1 K1ᵀ·s) − λ · softmax(Q2 K2ᵀ·s)) V (Equation 1).

    B is the batch, H the differential heads, H_kv the key/value heads (H is a multiple of H_kv; head h reads key head
    h // (H / H_kv)), N and S the query and key lengths, d the width of a query or key, dv that of a value. The axis of
    size 2 holds the two maps: a head's two queries always meet their own two keys.

    In grouped differential attention (arXiv 2510.06949) r signal heads share the second map, the noise map of their
    group. There are G groups, G a multiple of H_kv, and H = r·G: head h is signal head h % r of group h // r.

    Args:
        q: (B, H, 2, N, d), floating; or (B, G, r + 1, N, d), the queries of a group's signal heads and behind them the
            one of its noise map, which is the same for r = 1; or a pair of signal queries (B, H, N, d) and noise
            queries (B, G, N, d), which are copied into that form.
        k: (B, H_kv, 2, S, d), or (B, H_kv, 1, S, d) if both maps share their keys (DIFF V2).
        v: (B, H_kv, S, dv).
        lam: λ, a number or a floating tensor broadcastable to (B, H, N); differentiable.
        is_causal: query i sees key j if j ≤ i + S − N: aligned to the *end* of the keys.
        attn_mask: broadcastable to (B, H, N, S); boolean (True = may attend) or additive, for both maps. One that
            differs between the heads of a group makes their noise maps differ: they are then computed one by one.
            Combines with ``is_causal`` and ``window``. Or a BlockMask of torch's FlexAttention, (B or 1, H or 1, N, S),
            for masks that no tensor should hold: it stands alone, and only "flex" takes it.
        scale: factor s of the scores, 1/√d unless given.
        window: how many keys a query may look back on, itself included: key j is hidden if j ≤ i + S − N − window.
        cu_seqlens: (documents + 1,) int32 or int64, the starts of documents packed into one sequence (B = 1, N = S),
            and N at the end: 0, …, N, not decreasing. A token sees its own document alone. The values are not checked
            away from the CPU, which would wait for the device, nor if a transformation of torch.func maps over them.
        norm_weight: (dv,), or None for no norm. With it each head is normalised as in Equation 3: ``norm_scale`` ·
            RMSNorm(head) · ``norm_weight``; fused into the kernel if the backend can.
        norm_eps: added to the mean square.
        norm_scale: 1 − λ_init in the paper.
        dropout_p: the share of the weights of each map that is dropped at random, at least 0 and below 1; those that
            stay are divided by 1 − ``dropout_p``. Only "reference" and "sdpa" drop weights, and "auto" takes one of
            them: with "reference", memory grows with N·S.
        signal_weight: w, a number or a floating tensor broadcastable to (B, H, N), differentiable; for
            (w · softmax(Q1 K1ᵀ·s) − λ · softmax(Q2 K2ᵀ·s)) V. 1 unless given.
        return_lse: return the logarithms of both softmaxes' sums, too; not with a BlockMask.
        backend: "auto", "reference", "blockwise", "sdpa", "flex" (FlexAttention), "cpu" (a fused kernel for float32,
            bfloat16 and float16, compiled on first use), "triton" (fused kernels for CUDA), or "fa2", "fa3" or "fa4"
            (FlashAttention, where flash-attn, flash-attn-3 or flash-attn-4 is installed). A backend asked for by name
            runs or raises.

    Returns:
        (B, H, N, dv) in the dtype of q, k and v (under autocast, in autocast's). A query that sees no key gives 0, with
        gradient 0, if its own numbers are finite. Keys and values that a query may not see change neither its output
        nor the gradients that come from it, even if they hold a NaN or an infinity; a NaN that it sees makes its output
        NaN. The softmax runs in float32 at least. With ``return_lse`` a triple of it and L1, L2, (B, H, N), float32 at
        least and differentiable: log Σ exp of the scores that a query sees in either map, −∞ if it sees no key. A
        softmax with a learned sink s in its sum is the plain one times σ(L − s).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a λ or mask that does not broadcast, an unknown backend,
            or a named backend that cannot run the request.
        TypeError: an argument that is no tensor where one is needed, or one that does not hold its own numbers (sparse,
            nested, masked, a DTensor).

    Examples:
        >>> q, k, v = torch.randn(1, 4, 2, 10, 16), torch.randn(1, 4, 2, 10, 16), torch.randn(1, 4, 10, 32)
        >>> diff_attention(q, k, v, lam=0.3, is_causal=True).shape
        torch.Size([1, 4, 10, 32])
    """
    q = _joined(q)
    is_plain = cu_seqlens is None and type(dropout_p) is float and dropout_p == 0.0 and not return_lse
    if is_plain and backend in ("auto", "cpu"):
        more = norm_weight, norm_eps, norm_scale, signal_weight
        out = decode_fast_path(backend, q, k, v, lam, attn_mask, is_causal, scale, window, *more)
        if out is not None:
            return out
    if return_lse and signal_weight is None:
        # So that the kernels have a factor of each map, beside which a gradient of its log-sum fits.
        signal_weight = 1.0
    request = _checked({"q": q, "k": k, "v": v}, lam, is_causal, attn_mask, scale, window, cu_seqlens, signal_weight)
    norm = _checked_norm(request.v, norm_weight, norm_eps, norm_scale)
    _check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        _refuse(f"dropout_p must be at least 0 and below 1, got {dropout_p!r}.")
    if return_lse and is_block_mask(request.attn_mask):
        _refuse("return_lse needs attn_mask as a tensor or None, got a BlockMask.")
    chosen = resolve(backend, request, dropout_p)
    options = (dropout_p,) if dropout_p else ()  # which the backends that drop take
    if return_lse:
        out, first, second = _with_log_sums(chosen, request, *options)
        return _normed(out, norm), first, second
    if norm is not None and chosen.fuses_norm:
        return chosen.attend(request, norm)
    return _normed(chosen.attend(request, *options), norm)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, *, backend: str = "auto", **settings: Any) -> Tensor:
    """Compute :func:`diff_attention` of packed keys (B, H_kv, S, [k1; k2]) and values, as :func:`pack` makes them.

    The kernels of the CPU and Triton read the rows as they are, for the few queries of decoding. Others unpack them.
    """
    if settings.get("cu_seqlens") is None and not settings.get("dropout_p") and not torch.is_grad_enabled():
        arguments = {name: settings.get(name, default) for name, default in _OF_DECODING.items()}
        out = decode_fast_path(backend, q, k, v, lam, *arguments.values(), packed=True)
        if out is None and (backend == "triton" or q.is_cuda) and is_eager(q, k, v) and rows_are_words(q, k, v):
            of_norm = [arguments.pop(name) for name in ("norm_weight", "norm_eps", "norm_scale")]
            keys, values = packed_views(k, v, q.shape[-1])
            # A check looks at no number: for those of the rows stand tensors of their shapes, without memory.
            stand_ins = {name: q.new_empty(()).expand(x.shape) for name, x in (("k", keys), ("v", values))}
            request = _checked({"q": q, **stand_ins}, lam, cu_seqlens=None, **arguments)
            out = decode_rows(backend, request._replace(k=keys, v=values), _checked_norm(request.v, *of_norm))
        if out is not None:
            return out
    return diff_attention(q, *unpacked(k, v, q.shape[-1], q.dtype), lam, backend=backend, **settings)


def _checked_norm(v: Tensor, weight: Tensor | None, eps: float, factor: float) -> Norm | None:
    _check_number("norm_eps", eps)
    _check_number("norm_scale", factor)
    if eps < 0:
        _refuse(f"norm_eps must be 0 or more, got {eps!r}.")
    if weight is None:
        return None
    _check_tensor("norm_weight", weight, v)
    if tuple(weight.shape) != (v.shape[-1],) or not is_floating(weight):
        _refuse(
            f"norm_weight must be ({v.shape[-1]},) and floating, of 16 bits or more, got {_shape(weight)} "
            f"{weight.dtype}."
        )
    return Norm(weight, eps, factor)


def _normed(out: Tensor, norm: Norm | None) -> Tensor:
    return out if norm is None else rms_norm(out, norm.weight, norm.eps) * norm.factor


def _with_log_sums(chosen: Backend, request: Request, *options: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output and the log-sums of its two maps, (B, H, N), NaN where the output of a query is."""
    if chosen.log_sums is not None:
        out, of_maps = chosen.log_sums(request)
    else:
        out, of_maps = chosen.attend(request, *options), log_sums(confine(request)[0])
    first, second = of_maps[:, :, :-1].flatten(1, 2), of_maps[:, :, -1].repeat_interleave(request.ratio, dim=1)
    is_nan = out.isnan().any(-1)
    return out, first.masked_fill(is_nan, math.nan), second.masked_fill(is_nan, math.nan)


def diff_attention_maps(
    q: Tensor | tuple[Tensor, Tensor],
    k: Tensor,
    lam: Tensor | float,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    signal_weight: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the maps A1, A2 and A1 − λA2 of Equation 1, for looking at; memory grows with N·S.

    The arguments are those of :func:`diff_attention`.

    Returns:
        Three tensors (B, H, N, S), float32 at least. The rows of A1 and A2 add up to 1 (to 0 if a query sees
        nothing); the weights of A1 − λA2, with a ``signal_weight`` w of wA1 − λA2, can be negative. Signal heads of a
        group have the same A2.

    Raises:
        ValueError, TypeError: as in :func:`diff_attention`.

    Examples:
        >>> q, k = torch.randn(1, 4, 2, 10, 16), torch.randn(1, 4, 2, 10, 16)
        >>> first, second, difference = diff_attention_maps(q, k, lam=0.3)
        >>> torch.allclose(difference, first - 0.3 * second)
        True
    """
    tensors = {"q": _joined(q), "k": k}
    request = _checked(tensors, lam, is_causal, attn_mask, scale, window, cu_seqlens, signal_weight)
    request, addend = confine(request)
    a1, a2 = softmax_maps(request)
    if addend is not None:
        a1, a2 = a1 + addend, a2 + addend
    return a1, a2, request.difference(a1, a2)


def _joined(q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Join signal queries (B, r·G, N, d) and noise queries (B, G, N, d) to (B, G, r + 1, N, d); keep a tensor."""
    if not isinstance(q, tuple | list):
        return q
    if len(q) != 2 or not all(isinstance(each, Tensor) for each in q):
        what = f"{type(q).__name__} of {', '.join(type(each).__name__ for each in q)}"
        raise TypeError(f"q must be a tensor, or a pair of tensors of signal and noise queries, got {what}.")
    signal, noise = q
    for each in q:
        check_dense("q", each)
    sizes = [(*each.shape[:1], *each.shape[2:]) for each in q]
    if signal.dim() != 4 or sizes[0] != sizes[1]:
        _refuse(f"a pair of queries must be (B, r·G, N, d) and (B, G, N, d), got {_shape(signal)} and {_shape(noise)}.")
    if signal.dtype != noise.dtype or signal.device != noise.device:
        _refuse(
            f"a pair of queries must have one dtype and device, got {signal.dtype} on {signal.device} and "
            f"{noise.dtype} on {noise.device}."
        )
    heads, groups = signal.shape[1], noise.shape[1]
    if groups == 0 or heads == 0 or heads % groups != 0:
        _refuse(f"the heads of signal queries must be a multiple of those of noise queries, got {heads} and {groups}.")
    return torch.cat((signal.unflatten(1, (groups, -1)), noise.unsqueeze(2)), dim=2)


def _checked(
    tensors: dict[str, Any],
    lam: Tensor | float,
    is_causal: bool,
    attn_mask: Any,
    scale: float | None,
    window: int | None,
    cu_seqlens: Tensor | None,
    signal_weight: Tensor | float | None = None,
) -> Request:
    """Return the request that the arguments make, or refuse what does not fit; ``v`` may be left out of ``tensors``."""
    q, k, *values = _autocast(**tensors)
    _check_queries_and_keys(q, k)
    v = values[0] if values else k[:, :, 0]  # maps need none: keys stand in for them
    if v.dim() != 4 or v.shape[-1] == 0:
        _refuse(f"v must be (B, H_kv, S, dv), got {_shape(v)}.")
    if v.dtype != k.dtype or v.device != k.device:
        _refuse(f"v must have the dtype and device of k, {k.dtype} on {k.device}, got {v.dtype} on {v.device}.")
    if v.shape[:2] != k.shape[:2] or v.shape[2] != k.shape[3]:
        _refuse(f"v must agree with k in batch, heads and length, got k {_shape(k)} and v {_shape(v)}.")
    batch, heads, n, s = target = (q.shape[0], q.shape[1] * (q.shape[2] - 1), q.shape[3], k.shape[3])
    if not isinstance(is_causal, bool):
        _refuse(f"is_causal must be True or False, got {is_causal!r}.")
    if scale is not None:
        _check_number("scale", scale)
    if window is not None:
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            _refuse(f"window must be None or a whole number of keys, 1 or more, got {window!r}.")
        window = min(window, WIDEST_WINDOW)
    if values and attn_mask is not None and is_block_mask(attn_mask):
        if is_causal or window is not None or cu_seqlens is not None:
            _refuse("is_causal, window and cu_seqlens do not combine with a BlockMask: put them into its mask_mod.")
        shape = tuple(attn_mask.shape)
        if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (n, s):
            _refuse(f"a BlockMask must be (B or 1, H or 1, N, S) with (B, H, N, S) = {target}, got {shape}.")
        _check_tensor("attn_mask", attn_mask.kv_indices, q)
    else:
        attn_mask = check_mask(attn_mask, q, target)
    lambdas = _check_weight("lam", lam, q, (batch, heads, n))
    signals = None if signal_weight is None else _check_weight("signal_weight", signal_weight, q, (batch, heads, n))
    segment_bounds = None
    if cu_seqlens is not None:
        _check_tensor("cu_seqlens", cu_seqlens, q)
        if batch != 1 or n != s:
            _refuse(
                f"cu_seqlens takes documents packed into one sequence, B = 1 and N = S, got B {batch}, N {n}, S {s}."
            )
        check_document_ends("cu_seqlens", cu_seqlens, n)
        segment_bounds = segment_bounds_from(cu_seqlens, n)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    request = Request(q, k, v, lambdas, attn_mask, is_causal, scale, window, segment_bounds, signals)
    return request.ungrouped() if isinstance(attn_mask, Tensor) and attn_mask.shape[1] > 1 else request


def _autocast(**named: Tensor) -> tuple[Tensor, ...]:
    """Cast all tensors to autocast's dtype under autocast, as torch's own attention does."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"q, k and v must be tensors, got {type(tensor).__name__}.")
        check_dense(name, tensor)
    tensors = tuple(named.values())
    if (dtype := autocast_dtype(tensors[0].device.type)) is None:
        return tensors
    return tuple(t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors)


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(str(size) for size in tensor.shape)})"


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _check_tensor(name: str, value: object, q: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(value).__name__}.")
    check_dense(name, value)
    if value.device != q.device:
        _refuse(f"{name} must be on the device of q, {q.device}, got {value.device}.")


def check_broadcast(name: str, tensor: Tensor, axes: str, target: tuple[int, ...]) -> None:
    """Refuse a tensor that does not broadcast to the target, whose axes a message names so."""
    sizes = zip(reversed(tensor.shape), reversed(target), strict=False)
    if tensor.dim() > len(target) or not all(size == 1 or size == full for size, full in sizes):
        _refuse(f"{name} must broadcast to {axes} = {target}, got {_shape(tensor)}.")


def _check_number(name: str, number: object) -> None:
    # Comparisons instead of math.isfinite, which torch.compile cannot trace for a number that it leaves open.
    if isinstance(number, bool) or not isinstance(number, int | float) or not -math.inf < number < math.inf:
        _refuse(f"{name} must be a finite number, got {number!r}.")


def _check_queries_and_keys(q: Tensor, k: Tensor) -> None:
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 5 or q_shape[2] < 2:
        _refuse(f"q must be (B, H, 2, N, d), two maps to a head, or (B, G, r + 1, N, d), got {_shape(q)}.")
    if len(k_shape) != 5 or k_shape[2] not in (1, 2):
        _refuse(f"k must be (B, H_kv, 2, S, d), or (B, H_kv, 1, S, d) for keys shared by the maps, got {_shape(k)}.")
    if not is_floating(q) or q.dtype != k.dtype:
        _refuse(f"q and k must have one floating dtype of 16 bits or more, got {q.dtype} and {k.dtype}.")
    if q.device != k.device:
        _refuse(f"q and k must be on one device, got {q.device} and {k.device}.")
    if q_shape[0] != k_shape[0] or q_shape[4] != k_shape[4]:
        _refuse(f"q and k must agree in batch and head width, got q {_shape(q)} and k {_shape(k)}.")
    if 0 in q_shape[1:] or 0 in k_shape[1:]:
        _refuse(f"q and k must have at least one head, token and channel, got q {_shape(q)} and k {_shape(k)}.")
    if q_shape[1] % k_shape[1] != 0:
        counted = "heads" if q_shape[2] == 2 else "groups"
        _refuse(f"the {counted} of q must be a multiple of the heads of k, got {q_shape[1]} and {k_shape[1]}.")


def check_mask(attn_mask: Any, like: Tensor, target: tuple[int, int, int, int]) -> Tensor | None:
    """Return the mask with all four axes, none of them expanded; it must broadcast to the target (B, H, N, S).

    A float64 mask of narrower queries becomes float32, in which backends add it.
    """
    if attn_mask is None:
        return None
    _check_tensor("attn_mask", attn_mask, like)
    if attn_mask.dtype != torch.bool and not is_floating(attn_mask):
        _refuse(
            "attn_mask must be boolean (True = may attend) or floating of 16 bits or more (added), got "
            f"{attn_mask.dtype}."
        )
    check_broadcast("attn_mask", attn_mask, "(B, H, N, S)", target)
    if attn_mask.dtype == torch.float64 and like.dtype != torch.float64:
        info = torch.finfo(torch.float32)  # whose lowest number a finite addend becomes, and not −∞
        narrow = torch.where(attn_mask.isinf(), attn_mask, attn_mask.clamp(info.min, info.max))
        attn_mask = narrow.to(torch.float32)
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def check_document_ends(name: str, ends: Tensor, n: int) -> list[int] | None:
    """Refuse ends that do not cut N tokens into documents: (documents + 1,) int32 or int64, 0, …, N, not decreasing.

    Returns:
        The numbers; None if nobody looks at them: away from the CPU, and while they are traced or transformed.
    """
    if ends.dtype not in (torch.int32, torch.int64) or ends.dim() != 1 or ends.shape[0] < 2:
        _refuse(f"{name} must be (documents + 1,) int32 or int64, got {_shape(ends)} {ends.dtype}.")
    values_are_hidden = torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(ends)
    if ends.device.type != "cpu" or values_are_hidden:
        return None
    numbers: list[int] = ends.tolist()
    if numbers[0] != 0 or numbers[-1] != n or any(a > b for a, b in itertools.pairwise(numbers)):
        _refuse(f"{name} must go from 0 to N = {n} without decreasing, got {abridged(numbers)}.")
    return numbers


def abridged(numbers: list[int]) -> str:
    """Abridge numbers for a message: the first ones and the last, if there are many."""
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, …, {numbers[-1]}]"


def _check_weight(name: str, weight: Tensor | float, q: Tensor, target: tuple[int, int, int]) -> Tensor:
    """Return the weight of a map as (B, H, N), float32 at least; expanded, so that autograd adds up its gradient."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    if isinstance(weight, Tensor):
        check_dense(name, weight)
        if weight.dtype == dtype and weight.shape == target and weight.device == q.device:
            return weight
        if not is_floating(weight):
            _refuse(f"{name} must be floating, of 16 bits or more, got {weight.dtype}.")
        if weight.dim() > 0 or weight.is_meta:  # a scalar may come from another device, if it has a value
            _check_tensor(name, weight, q)
            check_broadcast(name, weight, "(B, H, N)", target)
        return weight.to(device=q.device, dtype=dtype).expand(target)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"{name} must be a number or a tensor, got {type(weight).__name__}.")
    _check_number(name, weight)
    return torch.full((), weight, dtype=dtype, device=q.device).expand(target)
