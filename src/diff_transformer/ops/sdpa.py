"""Both of Appendix A's compositions over torch's ``scaled_dot_product_attention``.

Where the kernel that torch would use takes values wider than the keys (dv ≠ d), each map is one call; where it does
not, V is cut into pieces of width d and each map is one call a piece. Where torch multiplies bfloat16 with AMX, both
maps are one call, of queries padded with zeros.
"""

import contextlib
import functools
import operator
import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.ops.visibility import position_mask

# Older ones can be wrong for lengths that 128 does not divide; torch itself prefers cuDNN from here on.
_TRUSTED_CUDNN = 91501


# Queries from which the padded call was measured to be faster than the fused kernel: without and with a gradient.
PADDED_QUERIES = (512, 2048)


class Question(NamedTuple):
    """What decides which of torch's kernels can run, and so how the maps are computed."""

    device: str
    dtype: torch.dtype
    d: int
    dv: int
    masked: bool
    gradient: bool = False
    heads: int = 1  # query heads that share a key head, 2 for any number
    queries: int = 2  # 2 for any number


class Way(NamedTuple):
    """How each map is computed: values ``whole`` or in pieces; ``cudnn`` before other kernels; key heads repeated."""

    whole: bool
    cudnn: bool = False
    repeat: bool = False


@torch.compiler.assume_constant_result
def wide_values_allowed(
    device: str,
    dtype: torch.dtype,
    d: int,
    dv: int,
    masked: bool,
    gradient: bool = False,
    heads: int = 1,
    queries: int = 2,
) -> bool:
    """Whether values of width ``dv`` go into one call with keys of width ``d``, by asking what torch's kernels take."""
    return _way(Question(device, dtype, d, dv, masked, gradient, heads, queries)).whole


@torch.compiler.assume_constant_result
def cudnn_comes_first(*question: Any) -> bool:
    """Whether the calls should go to cuDNN where torch itself might prefer a slower kernel."""
    return _way(Question(*question)).cudnn


@torch.compiler.assume_constant_result
def key_heads_repeated(*question: Any) -> bool:
    """Whether a fused kernel needs a key head of its own for every query head."""
    return _way(Question(*question)).repeat


def _way(question: Question) -> Way:
    if question.device != "cuda":
        # Outside CUDA torch answers enable_gqa with its plain formula.
        return Way(question.d == question.dv or _is_fused(question), repeat=question.heads > 1)
    # The answers depend on these switches as well.
    switches = (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    return _way_on_cuda(question, switches)


@functools.lru_cache(maxsize=256)
def _way_on_cuda(question: Question, switches: tuple[bool, ...]) -> Way:
    """Not measured: FlashAttention on whole values, else cuDNN on whole values, else FlashAttention on pieces, and the
    memory-efficient kernel only where it is the one that takes the request (a mask without cuDNN, or float32).
    """
    flash = torch.backends.cuda.can_use_flash_attention
    efficient = torch.backends.cuda.can_use_efficient_attention
    whole, piece = _probe(question), _probe(question._replace(dv=question.d))
    if flash(whole):
        return Way(whole=True)
    # cuDNN plans anew for every length, which decoding would pay at every token.
    trusted = question.queries > 1 and (torch.backends.cudnn.version() or 0) >= _TRUSTED_CUDNN
    if trusted and torch.backends.cuda.can_use_cudnn_attention(whole):
        return Way(whole=True, cudnn=True)
    if flash(piece):
        return Way(whole=False)
    if efficient(whole) or efficient(piece):
        return Way(whole=efficient(whole))
    if question.heads > 1:  # FlashAttention and cuDNN alone let query heads share a key head
        return _way_on_cuda(question._replace(heads=1), switches)._replace(repeat=True)
    # torch's plain formula, of which two calls cost less than four.
    return Way(whole=True)


def _probe(question: Question) -> torch.backends.cuda.SDPAParams:
    """Small tensors of the kind that is asked about, as torch's questions take them."""
    q, k, v, mask = _examples(question)
    return torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, False, question.heads > 1)


def _examples(question: Question) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    make = functools.partial(torch.zeros, device=question.device, dtype=question.dtype, requires_grad=question.gradient)
    q, k, v = make((1, question.heads, 64, question.d)), make((1, 1, 64, question.d)), make((1, 1, 64, question.dv))
    mask = torch.ones(1, 1, 64, 64, device=question.device, dtype=torch.bool) if question.masked else None
    return q, k, v, mask


@functools.cache
def _is_fused(question: Question) -> bool:
    q, k, v, mask = _examples(question._replace(gradient=False, heads=1))
    return torch._fused_sdp_choice(q, k, v, mask) != torch.nn.attention.SDPBackend.MATH.value


def _kernels(cudnn: bool) -> contextlib.AbstractContextManager[object]:
    """Which of torch's kernels may run: those that may anyway, or cuDNN before the others that take wide values."""
    if not cudnn:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # The others are for what cuDNN refuses after all, such as a single key.
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(order, set_priority=True)


@torch.compiler.assume_constant_result
def multiplies_with_amx() -> bool:
    """Whether torch's attention multiplies bfloat16 with AMX in this process.

    That takes AVX-512 as torch's own level, which ATEN_CPU_CAPABILITY lowers, and oneDNN, which can be switched off or
    held to other instructions.
    """
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "ALL")).upper()
    return bool(
        supported is not None
        and supported()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and (limit in ("ALL", "DEFAULT") or "AMX" in limit)
    )


def _fits_padded_call(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether both maps can be one call, [q1; 0] and [0; q2] over [k1; k2], and that is the fastest way through torch.

    A head's keys and values are repeated for its two queries, and those of grouped queries would be for each of them.
    """
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and q.shape[3] > 1
        and q.shape[1] == k.shape[1]
        and k.shape[2] == 2
        and v.shape[-1] == 2 * q.shape[-1]
        and multiplies_with_amx()
    )


def padded_call_is_fastest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: object,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
) -> bool:
    """Whether the padded call was measured to be faster than the fused kernel for the CPU. See docs/backends.md."""
    hidden_by_a_mask = attn_mask is not None or window is not None or documents is not None
    if hidden_by_a_mask or q.shape[3] != k.shape[3] or scale <= 0 or not _fits_padded_call(q, k, v):
        return False
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, lam))
    return q.shape[3] >= PADDED_QUERIES[gradient]


def _padded_call(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """A1 V and A2 V, each (B, H, N, dv), by one call of queries (B, 2H, N, 2d) with a zero beside each."""
    d = q.shape[-1]
    queries = torch.stack((F.pad(q[:, :, 0], (0, d)), F.pad(q[:, :, 1], (d, 0))), dim=2).flatten(1, 2)
    # [k1; k2] is what a cache of the model holds: a view there.
    keys, values = (x.repeat_interleave(2, dim=1) for x in (k.transpose(2, 3).flatten(3), v))
    heads = F.scaled_dot_product_attention(queries, keys, values, is_causal=causal, scale=scale)
    return heads.unflatten(1, (-1, 2)).unbind(2)


def _combined_mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, window: int | None, documents: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """One mask for everything that hides keys, and which rows see nothing (those let all through, to stay finite)."""
    n, s = q.shape[-2], k.shape[-2]
    allowed = position_mask(n, s, is_causal, window, documents, q.device)
    if attn_mask is None:
        if allowed is None:
            return None, None
        if n <= s:
            return allowed, None
        blind = ~allowed.any(-1, keepdim=True)
        return allowed | blind, blind
    if attn_mask.dtype == torch.bool:
        mask = attn_mask if allowed is None else attn_mask & allowed
        blind = ~mask.any(-1, keepdim=True)
        return mask | blind, blind
    mask = attn_mask.to(torch.promote_types(attn_mask.dtype, q.dtype))
    if mask.dtype != q.dtype:
        # A finite value that q's dtype cannot hold, such as float32's lowest in float16, must not turn into −∞.
        info = torch.finfo(q.dtype)
        mask = torch.where(mask == float("-inf"), mask, mask.clamp(info.min, info.max)).to(q.dtype)
    if allowed is not None:
        mask = mask.masked_fill(~allowed, float("-inf"))
    blind = (mask == float("-inf")).all(-1, keepdim=True)
    return mask.masked_fill(blind, 0.0), blind


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lam: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float,
    window: int | None,
    documents: Tensor | None,
) -> Tensor:
    """A1 V − λ A2 V. Shapes as in :func:`diff_transformer.diff_attention`; ``lam`` is (B, H, N)."""
    dtype, gradient = q.dtype, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if gradient and dtype == torch.float16:
        # Gradients of keys and values are sums over heads and maps: float16 may not hold a summand of what it holds.
        k, v = k.float(), v.float()
        if q.device.type == "cpu":  # elsewhere the calls stay in float16, and their gradients alone are added up wider
            q = q.float()
    n, s, d, dv = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    # torch aligns its own causality to the start of the keys: the same thing only where N = S. Its fused kernels hide
    # keys before they scale, which a scale of 0 or less undoes.
    plain_causal = is_causal and n == s and window is None and attn_mask is None and documents is None and scale > 0
    mask, blind = (None, None) if plain_causal else _combined_mask(q, k, attn_mask, is_causal, window, documents)
    # Torch's attention takes no symbols here, and torch.compile makes them of comparisons but not of branches.
    causal = True if plain_causal else False  # noqa: SIM210  # bool(...) leaves a symbol
    if mask is None and _fits_padded_call(q, k, v):
        first, second = _padded_call(q, k, v, causal, scale)
        return (first - lam.unsqueeze(-1) * second).to(dtype)
    groups = q.shape[1] // k.shape[1]
    # index() fixes a size that torch.compile would leave open, and so does a condition.
    question = (
        q.device.type,
        q.dtype,
        operator.index(d),
        operator.index(dv),
        mask is not None,
        gradient,
        1 if groups == 1 else 2,
        1 if n == 1 else 2,
    )
    if groups > 1 and key_heads_repeated(*question):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        groups = 1
    if wide_values_allowed(*question):
        pieces: tuple[Tensor, ...] = (v,)
    else:
        pieces = tuple(F.pad(piece, (0, d - piece.shape[-1])) for piece in v.split(d, dim=-1))
    grouped = True if groups > 1 else False  # noqa: SIM210
    outputs = []
    with _kernels(cudnn_comes_first(*question)):
        for c in range(2):
            parts = [
                F.scaled_dot_product_attention(
                    q[:, :, c],
                    k[:, :, c % k.shape[2]].to(q.dtype),
                    piece.to(q.dtype),
                    attn_mask=mask,
                    is_causal=causal,
                    scale=scale,
                    enable_gqa=grouped,
                )
                for piece in pieces
            ]
            outputs.append((parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))[..., :dv])
    out = outputs[0] - lam.unsqueeze(-1) * outputs[1]
    if blind is not None:
        out = out.masked_fill(blind, 0.0)
    return out.to(dtype)
