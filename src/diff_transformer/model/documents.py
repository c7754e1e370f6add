"""Keeps documents that are packed into one row apart without a mask.

transformers' names for documents that a padding-free collator has packed into one row are FlashAttention's:
``cu_seq_lens_q`` and ``cu_seq_lens_k``, (documents + 1,) int32 or int64, both 0, …, N, and ``max_length_q`` and
``max_length_k``, the longest document's length. With our own implementations the operator gets them (its
``cu_seqlens``), and ordinary attention is computed here. Any other implementation reads them, or the positions, as it
does for every model of transformers.
"""

import functools
import inspect
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diff_transformer.ops.attention_request import autocast_dtype, position_mask, segment_bounds_from
from diff_transformer.ops.operator import abridged, check_document_ends

_WIDEST_FLASH_HEAD = 256
_ROWS = 128  # of queries that look through a window together, or as many as the window is wide


def check_cu_seqlens(
    inputs_embeds: Tensor,
    attention_mask: object,
    past_key_values: object,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Return ``cu_seq_lens_q`` as our own implementations take it.

    The arguments are the model's, ``inputs_embeds`` (B, N, D). Raises ValueError or TypeError if they do not fit. Away
    from the CPU, and while torch.compile traces, the numbers are not looked at.
    """
    batch, n = inputs_embeds.shape[:2]
    if not isinstance(cu_seq_lens_q, Tensor):
        raise TypeError(f"cu_seq_lens_q must be a tensor, got {type(cu_seq_lens_q).__name__}.")
    if not isinstance(cu_seq_lens_k, Tensor | None):
        raise TypeError(f"cu_seq_lens_k must be a tensor or None, got {type(cu_seq_lens_k).__name__}.")
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q says where documents of one row begin, (1, N), got a batch of ({batch}, {n}).")
    for name, argument in (("a cache", past_key_values), ("attention_mask", attention_mask)):
        if argument is not None:
            raise ValueError(
                f"documents packed into one row (cu_seq_lens_q) go without {name}, got a {type(argument).__name__}."
            )
    ends = check_document_ends("cu_seq_lens_q", cu_seq_lens_q, n)
    if cu_seq_lens_k is not None:
        of_keys = check_document_ends("cu_seq_lens_k", cu_seq_lens_k, n)
        if ends is not None and of_keys is not None and of_keys != ends:
            raise ValueError(f"cu_seq_lens_k must be cu_seq_lens_q, {abridged(ends)}, got {abridged(of_keys)}.")
    return cu_seq_lens_q


def document_positions(cu_seqlens: Tensor, n: int) -> Tensor:
    """Return positions (1, N) that begin anew with each document."""
    tokens = torch.arange(n, device=cu_seqlens.device)
    return (tokens - segment_bounds_from(cu_seqlens, n)[0]).unsqueeze(0)


def attend_by_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
    longest: int | None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute ordinary attention in which every document sees itself alone.

    In half precision on CUDA that is one call of torch's FlashAttention for sequences of several lengths; else torch's
    ``scaled_dot_product_attention`` for one document after the other, which away from the CPU waits for the device.

    ``query`` is (1, heads, N, d), ``key`` and ``value`` (1, H_kv, N, d), and the result (1, N, heads, d). Causal
    attention alone has a ``window``, and no document has more tokens than ``longest``. FlashAttention drops no weights
    of sequences of several lengths.
    """
    dtype = autocast_dtype(query.device.type) or query.dtype
    if not dropout and _takes_several_lengths(query.device.type, dtype, query.shape[-1]):
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
        ends, most = cu_seqlens.to(torch.int32), query.shape[2] if longest is None else longest
        sides = (-1 if window is None else window - 1, 0 if is_causal else -1)
        grouped = q.shape[1] != k.shape[1]
        out: Any = varlen_attn(q, k, v, ends, ends, most, most, scale=scaling, window_size=sides, enable_gqa=grouped)
        return out.unsqueeze(0)
    return _attend_in_turn(module, (query, key, value), cu_seqlens, scaling, is_causal, window, dropout)


@torch.compiler.assume_constant_result
def _takes_several_lengths(device: str, dtype: torch.dtype, width: int) -> bool:
    """Return whether torch has a kernel for sequences of several lengths that takes such queries."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device == "cuda" and half and width % 8 == 0 and width <= _WIDEST_FLASH_HEAD and _has_several_lengths()


@functools.cache
def _has_several_lengths() -> bool:
    # Whether AMD's kernels take the same has not been looked at.
    flash = torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None
    if not flash or find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    # The first releases that have it take neither a scale nor a window.
    needed = {"scale", "window_size", "enable_gqa"}
    return needed <= set(inspect.signature(varlen_attn).parameters) and torch.cuda.get_device_capability() >= (8, 0)


# Lengths read from a tensor would be constants of the graph: another one for every batch.
@torch.compiler.disable
def _attend_in_turn(
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: Tensor,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
    dropout: float,
) -> Tensor:
    options: dict[str, Any] = {"scaling": scaling, "is_causal": is_causal, "dropout": dropout}
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    outs = []
    for q, k, v in zip(*(x.split(lengths, dim=2) for x in inputs), strict=True):
        n = q.shape[2]
        back = n if window is None else window
        rows = n if n <= back else max(_ROWS, back)
        for start in range(0, n, rows):
            stop, low = min(n, start + rows), max(0, start - back + 1)
            mask = None if n <= back else position_mask(stop - start, stop - low, True, window, None, q.device)
            block = q[:, :, start:stop], k[:, :, low:stop], v[:, :, low:stop]
            outs.append(sdpa_attention_forward(module, *block, mask, **options)[0])
    return torch.cat(outs, dim=1)
