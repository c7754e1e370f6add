"""The fa4 backend: its arithmetic around FlashAttention-4's calls, which need a GPU, and its refusals.

A stand-in in plain torch answers the calls by their contract. The kernels themselves are compiled for Hopper where the
package is installed, and run where there is a GPU.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from budget import Case, build, expect, prepared
from diff_transformer import diff_attention
from diff_transformer.ops import flash
from diff_transformer.ops.functional import rms_norm


class StandIn(ModuleType):
    """`flash_attn.cute.interface`, and the (query heads, key heads, d, dv) of its calls."""

    def __init__(self) -> None:
        super().__init__("flash_attn.cute.interface")
        self.forwards: list[tuple[int, ...]] = []
        self.backwards: list[tuple[int, ...]] = []

    def _tile_size_fwd_sm90(self, d: int, dv: int, is_causal: bool, is_local: bool) -> tuple[str, int, int]:
        return "forward", d, dv

    def _tile_size_bwd_sm90(self, d: int, dv: int, causal: bool, local: bool) -> tuple[str, int, int]:
        return "backward", d, dv

    def _flash_attn_fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None,
        return_lse: bool,
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        self.forwards.append(check(q, k, v))
        scores = masked_scores(q, k, softmax_scale, causal, window_size_left)
        log_sums = scores.logsumexp(-1)
        weights = (scores - log_sums.unsqueeze(-1)).exp().nan_to_num().to(q.dtype)
        out = weights.float() @ by_query_head(v, q)
        return out.transpose(1, 2).to(q.dtype).contiguous(), log_sums, None, None, None

    def _flash_attn_bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        *,
        softmax_scale: float,
        causal: bool,
        window_size_left: int | None,
        deterministic: bool,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        self.backwards.append(sizes := check(q, k, v))
        assert out.shape == dout.shape == (*q.shape[:3], v.shape[-1])
        assert out.dtype == dout.dtype == q.dtype
        assert lse.dtype == torch.float32
        assert sizes[0] == sizes[1] or sizes[2] == sizes[3], "GQA backward requires head_dim == head_dim_v"
        sums = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
        weights = (masked_scores(q, k, softmax_scale, causal, window_size_left) - sums).exp()
        grad = dout.float().transpose(1, 2)
        by_rows = (grad * out.float().transpose(1, 2)).sum(-1, keepdim=True)
        of_scores = (weights * (grad @ by_query_head(v, q).mT - by_rows)).to(q.dtype).float() * softmax_scale
        dq.copy_((of_scores @ by_query_head(k, q)).transpose(1, 2))
        for gradient, of_heads in (
            (dk, of_scores.mT @ q.float().transpose(1, 2)),
            (dv, weights.to(q.dtype).float().mT @ grad),
        ):
            gradient.copy_(of_heads.unflatten(1, (k.shape[2], -1)).sum(2).transpose(1, 2))


def check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    assert q.dtype == k.dtype == v.dtype
    assert k.shape[:3] == v.shape[:3]
    assert q.shape[2] % k.shape[2] == 0
    return q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]


def by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, S, H_kv, width) as (B, H, S, width), in float32."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def masked_scores(q: Tensor, k: Tensor, scale: float, causal: bool, before: int | None) -> Tensor:
    n, s = q.shape[1], k.shape[1]
    distance = torch.arange(n)[:, None] + (s - n) - torch.arange(s)
    hidden = (distance < 0) & causal
    if before is not None:
        hidden = hidden | (distance > before)
    scores = q.float().transpose(1, 2) @ by_query_head(k, q).mT * scale
    return scores.masked_fill(hidden, float("-inf"))


@pytest.fixture
def fa4(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    interface, package = StandIn(), ModuleType("flash_attn.cute")
    package.interface = interface  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(flash, "_reason_against_device", lambda *_: None)
    flash._interface.cache_clear()
    yield interface
    flash._interface.cache_clear()


def case_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(**{"heads": 4, "key_heads": 4, "d": 8, "dv": 16, "dtype": dtype, **CASES[name]})


CASES = {
    "DIFF V1": dict(is_causal=True),
    "not causal": dict(),
    "fewer queries": dict(is_causal=True, queries=3, keys=11),
    "queries that see nothing": dict(is_causal=True, queries=9, keys=5),
    "window": dict(is_causal=True, window=3),
    "window that is not causal": dict(window=4),
    "window wider than the keys": dict(is_causal=True, window=40),
    "grouped-query": dict(is_causal=True, key_heads=2),
    "DIFF V2": dict(is_causal=True, dv=8, key_maps=1),
    "DIFF V2, grouped-query": dict(is_causal=True, dv=8, key_maps=1, key_heads=2),
    "shared keys, wide values": dict(is_causal=True, key_maps=1),
    "grouped noise maps": dict(is_causal=True, ratio=2, key_heads=2),
    "grouped noise maps, shared keys": dict(is_causal=True, ratio=2, key_maps=1, key_heads=1, dv=8),
    "scale": dict(is_causal=True, scale=0.25),
    "projection": dict(is_causal=True, layout="projection", lam="full"),
    "cache": dict(is_causal=True, layout="cache", lam="per head"),
    "expanded": dict(is_causal=True, layout="expanded", lam="per token"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_within_budget(fa4: StandIn, case: str, dtype: torch.dtype) -> None:
    problem, expected = prepared(case_of(case, dtype))
    expected.check(problem.solve(diff_attention, backend="fa4"))
    assert fa4.forwards


@pytest.mark.parametrize(
    ("case", "forwards", "backwards"),
    [
        ("DIFF V1", [(4, 4, 8, 16)] * 2, [(4, 4, 8, 16)] * 2),
        ("grouped-query", [(4, 2, 8, 16)] * 2, [(4, 4, 8, 16)] * 2),
        ("DIFF V2", [(8, 4, 8, 8)], [(8, 4, 8, 8)]),
        ("grouped noise maps", [(4, 2, 8, 16), (2, 2, 8, 16)], [(2, 2, 8, 16), (4, 4, 8, 16)]),
    ],
)
def test_calls(fa4: StandIn, case: str, forwards: Any, backwards: Any) -> None:
    build(case_of(case)).solve(diff_attention, backend="fa4")
    assert fa4.forwards == forwards
    assert fa4.backwards == backwards
