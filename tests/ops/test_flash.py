"""The fa4 backend: its arithmetic around FlashAttention-4's calls, which need a GPU, and its refusals.

A stand-in in plain torch answers the calls by their contract. The kernels themselves are compiled for Hopper and
Blackwell where the package is installed, and run where there is a GPU.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from budget import Case, build, prepared
from diff_transformer import diff_attention
from diff_transformer.ops import flash
from diff_transformer.ops.attention_request import Request


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
        dlse: Tensor | None,
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
        if dlse is not None:
            assert dlse.shape == lse.shape
            by_rows = by_rows - dlse.unsqueeze(-1)
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
    monkeypatch.setattr(flash, "_kernels_on", lambda *_: (None, 256))
    flash._interface.cache_clear()
    yield interface
    flash._interface.cache_clear()


def case_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(**{"heads": 4, "key_heads": 4, "d": 8, "dv": 16, "dtype": dtype, **CASES[name]})


CASES: dict[str, dict[str, Any]] = {
    "DIFF V1": {"is_causal": True},
    "not causal": {},
    "fewer queries": {"is_causal": True, "queries": 3, "keys": 11},
    "queries that see nothing": {"is_causal": True, "queries": 9, "keys": 5},
    "window": {"is_causal": True, "window": 3},
    "window that is not causal": {"window": 4},
    "window wider than the keys": {"is_causal": True, "window": 40},
    "grouped-query": {"is_causal": True, "key_heads": 2},
    "DIFF V2": {"is_causal": True, "dv": 8, "key_maps": 1},
    "DIFF V2, grouped-query": {"is_causal": True, "dv": 8, "key_maps": 1, "key_heads": 2},
    "shared keys, wide values": {"is_causal": True, "key_maps": 1},
    "grouped noise maps": {"is_causal": True, "ratio": 2, "key_heads": 2},
    "grouped noise maps, shared keys": {"is_causal": True, "ratio": 2, "key_maps": 1, "key_heads": 1, "dv": 8},
    "scale": {"is_causal": True, "scale": 0.25},
    "projection": {"is_causal": True, "layout": "projection", "lam": "full"},
    "cache": {"is_causal": True, "layout": "cache", "lam": "per head"},
    "expanded": {"is_causal": True, "layout": "expanded", "lam": "per token"},
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


# What a process compiles for a GPU that is not there: both passes of one map.
COMPILED = """
    import json, sys, torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from diff_transformer.ops import flash

    d, dv, heads, key_heads, is_causal, window = json.loads(sys.argv[1])
    with FakeTensorMode():
        sizes = ((heads, d), (key_heads, d), (key_heads, dv))
        q, k, v = (torch.empty(1, 1024, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        out, log_sums = flash.attend._init_fn(q, k, v, 0.125, is_causal, window)
        flash.backward._init_fn(torch.empty_like(out), q, k, v, out, log_sums, 0.125, is_causal, window)
"""


@pytest.mark.all
@pytest.mark.skipif(not flash.fa4_is_installed(), reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("capability", "heads"),
    [
        *((90, heads) for heads in ((64, 128, 4, 4), (128, 256, 4, 4), (64, 64, 8, 4), (128, 128, 8, 4))),
        *((100, heads) for heads in ((64, 128, 4, 4), (64, 64, 8, 4), (128, 128, 8, 4))),
    ],
    ids=str,
)
def test_kernels_compile_and_spill_nothing(
    tmp_path: Path, capability: int, heads: tuple[int, ...], is_causal: bool, window: int | None
) -> None:
    """But for the backward of wide heads on Blackwell, whose tiles are the package's own."""
    import triton

    settings = {
        "FLASH_ATTENTION_ARCH": f"sm_{capability}",
        "CUTE_DSL_ARCH": f"sm_{capability}a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "CUTE_DSL_KEEP_CUBIN": "1",
        "CUTE_DSL_DUMP_DIR": str(tmp_path),
    }
    request = json.dumps([*heads, is_causal, window])
    program = [sys.executable, "-c", textwrap.dedent(COMPILED), request]
    subprocess.run(program, env=os.environ | settings, check=True)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    spilled = {}
    for file in tmp_path.glob("*.cubin"):
        done = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
        name, usage = re.search(r"FlashAttention\w+", file.name), re.search(r"STACK:(\d+)", done.stdout)
        assert name is not None
        assert usage is not None, done.stdout
        spilled[name[0].partition("_object")[0]] = int(usage[1])
    assert {f"FlashAttentionForwardSm{capability}", f"FlashAttentionBackwardSm{capability}"} <= set(spilled)
    most = 24 if (capability, heads[0]) == (100, 128) else 0
    assert {name for name, count in spilled.items() if count > most} == set(), spilled


def test_it_is_a_part_of_a_compiled_graph(fa4: StandIn) -> None:
    problem, expected = prepared(case_of("grouped-query"))
    attend = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    expected.check(problem.solve(attend, backend="fa4"))
    assert fa4.backwards


@pytest.mark.parametrize("factor", [0.8, 1.0])
def test_the_norm_is_that_of_the_reference(fa4: StandIn, factor: float) -> None:
    problem, weight = build(case_of("DIFF V1")), torch.randn(16, generator=torch.Generator().manual_seed(0))
    answers = []
    for backend, dtype in (("fa4", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        leaves += [torch.full((4, 1), 0.6, requires_grad=True), weight.clone().requires_grad_()]
        q, k, v, lam, norm_weight = leaves
        options = {"is_causal": True, "norm_weight": norm_weight, "norm_eps": 1e-3, "norm_scale": factor}
        out = diff_attention(q, k, v, lam, **options, backend=backend)
        answers.append([out.detach(), *torch.autograd.grad(out, leaves, problem.dout.to(dtype))])
    for ours, truth in zip(*answers, strict=True):
        # A few roundings of 2⁻⁹ on the way, relative to the largest.
        assert float((ours.double() - truth.double()).abs().max()) <= 2**-5 * float(truth.abs().max())


@pytest.mark.parametrize("case", ["DIFF V1", "DIFF V2", "grouped noise maps", "queries that see nothing"])
def test_two_weights_and_log_sums_are_those_of_the_reference(fa4: StandIn, case: str) -> None:
    problem, answers = build(case_of(case)), []
    for backend, dtype in (("fa4", torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        leaves += [torch.full((4, 1), weight, requires_grad=True) for weight in (0.6, 0.3)]
        q, k, v, lam, signal_weight = leaves
        options = {"is_causal": True, "signal_weight": signal_weight, "return_lse": True}
        out, *log_sums = diff_attention(q, k, v, lam, **options, backend=backend)
        log_sums = [x.nan_to_num(neginf=-3.0).double() for x in log_sums]
        total = (out.double() * problem.dout).sum() + sum(x.square().sum() for x in log_sums)
        answers.append([x.detach() for x in (out, *log_sums, *torch.autograd.grad(total, leaves))])
    for ours, truth in zip(*answers, strict=True):
        assert float((ours.double() - truth.double()).abs().max()) <= 2**-5 * float(truth.abs().max())


def test_hidden_nan_is_not_seen(fa4: StandIn) -> None:
    problem = build(case_of("DIFF V1"))
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, :, 6], v[:, :, 7] = float("nan"), float("inf")
    clean, spoiled = (
        diff_attention(problem.q, *tensors, 0.5, is_causal=True, backend="fa4")
        for tensors in ((problem.k, problem.v), (k, v))
    )
    assert torch.equal(clean[:, :, :6], spoiled[:, :, :6])
    assert spoiled[:, :, 6:].isnan().all()


def test_tiles_follow_the_values_where_they_are_wider_than_the_keys(fa4: StandIn) -> None:
    interface = flash._interface()
    assert interface._tile_size_fwd_sm90(64, 128, True, False) == ("forward", 128, 128)
    assert interface._tile_size_bwd_sm90(128, 256, True, False) == ("backward", 192, 256)
    assert interface._tile_size_fwd_sm90(192, 128, True, False) == ("forward", 192, 128)
    assert interface._tile_size_bwd_sm90(64, 64, True, False) == ("backward", 64, 64)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "it takes no attn_mask"),
        ({"scale": -1.0}, r"it takes a scale above 0, got -1\.0"),
        ({"dropout_p": 0.1}, "it drops no attention weights"),
    ],
)
def test_refusals(fa4: StandIn, options: dict[str, Any], reason: str) -> None:
    problem = build(case_of("DIFF V1"))
    with pytest.raises(ValueError, match=f"^backend 'fa4' cannot run this request: {reason}"):
        diff_attention(problem.q, problem.k, problem.v, 0.5, **options, backend="fa4")


def test_documents_are_refused(fa4: StandIn) -> None:
    problem = build(Case(batch=1, documents=(4, 5), d=8, dv=16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"it takes no documents \(cu_seqlens\)"):
        problem.solve(diff_attention, backend="fa4")


def test_the_cpu_is_refused() -> None:
    problem = build(case_of("DIFF V1"))
    with pytest.raises(ValueError, match=r"'fa4' cannot run .* needs its tensors on a CUDA device, got cpu\.$"):
        problem.solve(diff_attention, backend="fa4")


@pytest.mark.parametrize(
    ("capability", "dtype", "widths", "reason"),
    [
        ((9, 0), torch.float32, (64, 128), "it computes bfloat16 and float16, got torch.float32"),
        ((8, 0), torch.bfloat16, (64, 128), "it is made for NVIDIA's compute capabilities 9.x and 10.x, got 8.0"),
        ((9, 0), torch.bfloat16, (60, 120), "it takes d and dv up to 256 that are multiples of 8, got d 60 and dv 120"),
        ((10, 0), torch.bfloat16, (128, 256), "it takes d and dv up to 128 that .*, got d 128 and dv 256"),
        ((9, 0), torch.bfloat16, (128, 256), None),
        ((10, 0), torch.float16, (64, 128), None),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    widths: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(flash, "fa4_is_installed", lambda: True)
    found = flash.reason_against_fa4(on_cuda(dtype, *widths))
    assert found == reason or (found and reason and re.fullmatch(reason, found))


def on_cuda(dtype: torch.dtype, d: int, dv: int) -> Request:
    """A request without numbers, on a device that need not be there."""
    with FakeTensorMode():
        q, v = (torch.empty(*size, dtype=dtype, device="cuda") for size in ((1, 2, 2, 9, d), (1, 2, 9, dv)))
        lam = torch.empty(1, 2, 9, device="cuda")
    return Request(q, q, v, lam, None, True, 1.0, None, None)


def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "fa4_is_installed", lambda: False)
    assert flash.reason_against_fa4(on_cuda(torch.bfloat16, 64, 128)) == "the package flash-attn-4 is not installed"


def test_another_version_of_the_package_is_named(fa4: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StandIn, "_tile_size_bwd_sm90")
    monkeypatch.setattr(flash.importlib.metadata, "version", lambda _: "9.9")
    flash._interface.cache_clear()
    with pytest.raises(ValueError, match=r"^flash-attn-4 9\.9 lacks what 'fa4' calls, as 4\.0\.0b36 has it: "):
        flash._interface()


def test_open_widths_compile_in_one_graph(fa4: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes that torch.compile leaves open, whether `auto` takes it is no constant."""
    monkeypatch.setattr(flash, "MEASURED_QUERIES", 1)

    def chosen(q: Tensor, v: Tensor) -> Tensor:
        request = Request(q, q, v, v[..., 0], None, True, 1.0, None, None)
        return v + (1 if flash.reason_against_fa4(request) is None else 2)

    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="eager")
    for d in (8, 16, 12):
        q, v = torch.randn(1, 2, 2, 9, d, dtype=torch.bfloat16), torch.zeros(1, 2, 9, 2 * d, dtype=torch.bfloat16)
        assert compiled(q, v).unique().item() == (2 if d == 12 else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str) -> None:
    small = case_of(case)
    problem, expected = prepared(replace(small, d=64, dv=8 * small.dv))
    if reason := flash._kernels_on("cuda", None, torch.bfloat16)[0]:
        pytest.skip(reason)
    expected.check(problem.to("cuda").solve(diff_attention, backend="fa4"))
