"""FlashAttention's functions for transformers' own glue around them, in plain torch.

FlashAttention needs a GPU. Its contract can be kept without one: its signatures and layouts (tokens before heads,
sequences of unequal length end to end), causality aligned to the *end* of the keys, a window counted from there, and
queries, keys and values of one width of at most 256.
"""

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

# The names that transformers runs FlashAttention under: two packages, and one kernel of the hub.
HUB_KERNEL = "kernels-community/flash-attn2"
NAMES = ("flash_attention_2", "flash_attention_3", HUB_KERNEL)


def attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, causal: bool, window_size: tuple[int, int]
) -> Tensor:
    """One sequence: q (N, heads, width), k and v (S, kv_heads, width) → (N, heads, width)."""
    n, s, width = q.shape[0], k.shape[0], q.shape[-1]
    assert k.shape == v.shape
    assert k.shape[-1] == width <= 256, "FlashAttention takes one width for all, of at most 256"
    assert q.shape[1] % k.shape[1] == 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = torch.einsum("nhd,shd->hns", q, k) * (width**-0.5 if softmax_scale is None else softmax_scale)
    distance = torch.arange(n)[:, None] + (s - n) - torch.arange(s)
    left, right = window_size
    seen = distance >= (0 if causal else -right if right >= 0 else -s)
    if left >= 0:
        seen &= distance <= left
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
    return torch.einsum("hns,shd->nhd", weights, v)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """q (B, N, heads, width), k and v (B, S, kv_heads, width) → (B, N, heads, width)."""
    assert dropout_p == softcap == 0.0
    return torch.stack([attend(*row, softmax_scale, causal, window_size) for row in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Sequences end to end: q (tokens, heads, width), k and v (tokens, kv_heads, width) → (tokens, heads, width)."""
    assert dropout_p == softcap == 0.0
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    out, ends = torch.zeros_like(q), zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    starts_q, starts_k = 0, 0
    for end_q, end_k in list(ends)[1:]:
        assert end_q - starts_q <= max_seqlen_q
        assert end_k - starts_k <= max_seqlen_k
        rows, columns = slice(starts_q, end_q), slice(starts_k, end_k)
        document_output = attend(q[rows], k[columns], v[columns], softmax_scale, causal, window_size)
        out = out.index_put((torch.arange(starts_q, end_q),), document_output)
        starts_q, starts_k = end_q, end_k
    return out


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the stand-in where transformers looks for FlashAttention; returns the names of its functions as they run."""
    ran: list[str] = []

    def noted(function: Any) -> Any:
        # transformers reads the signature to know which of its arguments to pass on: no *args here.
        def call(*args: Any, **kwargs: Any) -> Tensor:
            ran.append(function.__name__)
            out: Tensor = function(*args, **kwargs)
            return out

        call.__wrapped__ = function  # type: ignore[attr-defined]  # what inspect.signature follows
        return call

    functions = (
        noted(flash_attn_func),
        noted(flash_attn_varlen_func),
        None,
        flash_utils._pad_input,
        flash_utils._unpad_input,
    )
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    # As transformers registers a kernel when it has fetched it.
    monkeypatch.setitem(AttentionInterface._global_mapping, HUB_KERNEL, flash_attention_forward)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, HUB_KERNEL, flash_attention_mask)
    return ran
