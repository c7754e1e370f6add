"""The backends fa2, fa3 and fa4: their arithmetic around FlashAttention's calls, which need a GPU, and their refusals.

Stand-ins in plain torch answer the calls by their contract, under the signatures of flash-attn 2.7 to 2.8.3,
flash-attn-3 3.0.0 and flash-attn-4 4.0.0b36. The kernels of the last are compiled for Hopper and Blackwell where the
package is installed; all run where there is a GPU.
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
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from budget import Case, build, prepared
from diff_transformer import diff_attention
from diff_transformer.ops import flash
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.triton.gpu_check import TRAINING, Family, reason_against_family


class StandIn(ModuleType):
    """The module of a backend's functions, and the (query heads, key heads, d, dv) of its calls."""

    backend: str

    def __init__(self) -> None:
        super().__init__(flash.PACKAGES[self.backend][2])
        self.forwards: list[tuple[int, ...]] = []
        self.backwards: list[tuple[int, ...]] = []
        self.deterministic: list[bool] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.forwards.append(check(q, k, v))
        scores = scores_of(q, k, scale, hidden)
        log_sums = scores.logsumexp(-1)
        weights = (scores - log_sums.unsqueeze(-1)).exp().nan_to_num().to(q.dtype)
        out = weights.float() @ by_query_head(v, q)
        return out.transpose(1, 2).to(q.dtype).contiguous(), log_sums

    def differentiate(
        self, *tensors: Tensor, hidden: Tensor, softmax_scale: float, deterministic: bool, **options: Tensor
    ) -> None:
        dout, q, k, v, out, lse = tensors
        assert self.backend == "fa4" or "dlse" not in options
        dlse = options.pop("dlse", None)
        self.backwards.append(check(q, k, v))
        self.deterministic.append(deterministic)
        assert out.shape == dout.shape == (*q.shape[:3], v.shape[-1])
        assert out.dtype == dout.dtype == q.dtype
        assert lse.dtype == torch.float32
        sums = lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
        weights = (scores_of(q, k, softmax_scale, hidden) - sums).exp()
        grad = dout.float().transpose(1, 2)
        by_rows = (grad * out.float().transpose(1, 2)).sum(-1, keepdim=True)
        if dlse is not None:
            assert dlse.shape == lse.shape
            by_rows = by_rows - dlse.unsqueeze(-1)
        of_scores = (weights * (grad @ by_query_head(v, q).mT - by_rows)).to(q.dtype).float() * softmax_scale
        of_heads = {
            "dq": of_scores @ by_query_head(k, q),
            "dk": (of_scores.mT @ q.float().transpose(1, 2)).unflatten(1, (k.shape[2], -1)).sum(2),
            "dv": (weights.to(q.dtype).float().mT @ grad).unflatten(1, (k.shape[2], -1)).sum(2),
        }
        assert options.keys() == of_heads.keys()
        for name, numbers in of_heads.items():
            options[name].copy_(numbers.transpose(1, 2))


class FlashAttention2(StandIn):
    backend = "fa2"
    unused: ClassVar = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "window_size_right": -1}

    def _flash_attn_forward_fake(self) -> None: ...

    def hidden(self, q: Tensor, k: Tensor, causal: bool, left: int) -> Tensor:
        """As in its `flash_api.cpp`."""
        assert q.shape[-1] <= 256
        n, s = q.shape[1], k.shape[1]
        left, right = -1 if left >= s else left, 0 if causal else -1
        if left < 0 <= right:
            left = s
        if right < 0 <= left:
            right = s
        return hidden(n, s, left if left >= 0 else s, right if right >= 0 else n)

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, window_size_left: int, **others: Any
    ) -> tuple[Tensor, ...]:
        assert q.shape[-1] == v.shape[-1]
        assert others == {**self.unused, "return_softmax": False}
        mask = self.hidden(q, k, causal and q.shape[1] > 1, window_size_left)
        out, log_sums = self.attend(q, k, v, softmax_scale, mask)
        log_sums = log_sums.masked_fill(log_sums == float("-inf"), float("inf"))
        return torch.empty_like(q).copy_(out), log_sums, q.new_empty(0), torch.zeros(2, dtype=torch.int64)

    def _flash_attn_backward(self, *tensors: Tensor, causal: bool, window_size_left: int, **options: Any) -> None:
        assert tensors[1].shape[-1] == tensors[3].shape[-1]
        assert {name: options.pop(name) for name in self.unused} == self.unused
        self.differentiate(*tensors, hidden=self.hidden(*tensors[1:3], causal, window_size_left), **options)


class FlashAttention3(StandIn):
    backend = "fa3"

    def _flash_attn_forward_fake(self) -> None: ...

    def hidden(self, q: Tensor, k: Tensor, causal: bool, left: int) -> Tensor:
        """As in its `flash_api.cpp`."""
        n, s = q.shape[1], k.shape[1]
        return hidden(n, s, left if 0 <= left < s else s - 1, 0 if causal else n - 1)

    def _flash_attn_forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, window_size_left: int
    ) -> tuple[Tensor, ...]:
        d, dv = q.shape[-1], v.shape[-1]
        assert d == dv or (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512)
        mask = self.hidden(q, k, causal and q.shape[1] > 1, window_size_left)
        return *self.attend(q, k, v, softmax_scale, mask), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(self, *tensors: Tensor, is_causal: bool, window_size_left: int, **options: Any) -> None:
        self.differentiate(*tensors, hidden=self.hidden(*tensors[1:3], is_causal, window_size_left), **options)


class FlashAttention4(StandIn):
    backend = "fa4"

    def _tile_size_fwd_sm90(self, d: int, dv: int, is_causal: bool, is_local: bool) -> tuple[str, int, int]:
        return "forward", d, dv

    def _tile_size_bwd_sm90(self, d: int, dv: int, causal: bool, local: bool) -> tuple[str, int, int]:
        return "backward", d, dv

    def hidden(self, q: Tensor, k: Tensor, causal: bool, left: int | None) -> Tensor:
        n, s = q.shape[1], k.shape[1]
        return hidden(n, s, s if left is None else left, 0 if causal else n)

    def _flash_attn_fwd(
        self, *tensors: Tensor, softmax_scale: float, causal: bool, window_size_left: int | None, return_lse: bool
    ) -> tuple[Tensor | None, ...]:
        assert return_lse
        mask = self.hidden(*tensors[:2], causal, window_size_left)
        return *self.attend(*tensors, softmax_scale, mask), None, None, None

    def _flash_attn_bwd(self, *tensors: Tensor, causal: bool, window_size_left: int | None, **options: Any) -> None:
        q, k, v, out, dout, lse = tensors
        assert q.shape[2] == k.shape[2] or q.shape[-1] == v.shape[-1], "GQA backward requires head_dim == head_dim_v"
        self.differentiate(dout, q, k, v, out, lse, hidden=self.hidden(q, k, causal, window_size_left), **options)


def check(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    assert q.dtype == k.dtype == v.dtype
    assert k.shape[:3] == v.shape[:3]
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[2] % k.shape[2] == 0
    for x in (q, k, v):  # loads of 16 bytes ask for it
        assert x.stride(-1) == 1
        assert not any(stride % 8 for stride in x.stride()[:-1])
        assert x.data_ptr() % 16 == 0
    return q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]


def by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, S, H_kv, width) as (B, H, S, width), in float32."""
    return x.float().repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


def hidden(n: int, s: int, before: int, behind: int) -> Tensor:
    """Which of S keys are more than so many before or behind the position of a query, (N, S)."""
    distance = torch.arange(n)[:, None] + (s - n) - torch.arange(s)
    return (distance > before) | (-distance > behind)


def scores_of(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    return (q.float().transpose(1, 2) @ by_query_head(k, q).mT * scale).masked_fill(hidden, float("-inf"))


STAND_INS = {each.backend: each for each in (FlashAttention2, FlashAttention3, FlashAttention4)}


@pytest.fixture(params=STAND_INS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    interface = STAND_INS[request.param]()
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    monkeypatch.setattr(flash, "_kernels_on", lambda *_: (None, 9))
    flash._functions.cache_clear()
    yield interface
    flash._functions.cache_clear()


only_fa4 = pytest.mark.parametrize("library", ["fa4"], indirect=True)


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
    "values narrower than keys": {"is_causal": True, "d": 16, "dv": 8},
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
    "cache, all seen": {"layout": "cache", "dv": 8},
    "expanded, all seen": {"layout": "expanded"},
    "projection, shared keys, all seen": {"layout": "projection", "dv": 8, "key_maps": 1},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_within_budget(library: StandIn, case: str, dtype: torch.dtype) -> None:
    problem, expected = prepared(case_of(case, dtype))
    expected.check(problem.solve(diff_attention, backend=library.backend))
    assert library.forwards


@pytest.mark.parametrize(
    ("case", "forwards", "backwards", "padded"),
    [
        ("DIFF V1", [(4, 4, 8, 16)] * 2, [(4, 4, 8, 16)] * 2, [(4, 4, 16, 16)] * 2),
        ("values narrower than keys", [(4, 4, 16, 8)] * 2, [(4, 4, 16, 8)] * 2, [(4, 4, 16, 16)] * 2),
        ("grouped-query", [(4, 2, 8, 16)] * 2, [(4, 4, 8, 16)] * 2, [(4, 2, 16, 16)] * 2),
        ("DIFF V2", [(8, 4, 8, 8)], [(8, 4, 8, 8)], [(8, 4, 8, 8)]),
        (
            "grouped noise maps",
            [(4, 2, 8, 16), (2, 2, 8, 16)],
            [(2, 2, 8, 16), (4, 4, 8, 16)],
            [(4, 2, 16, 16), (2, 2, 16, 16)],
        ),
    ],
)
def test_calls(library: StandIn, case: str, forwards: Any, backwards: Any, padded: Any) -> None:
    """FlashAttention 2 and 3 take one width alone, and heads that share a key head in both passes."""
    build(case_of(case)).solve(diff_attention, backend=library.backend)
    expected = (forwards, backwards) if library.backend == "fa4" else (padded, padded[::-1])
    assert (library.forwards, library.backwards) == expected
    assert library.deterministic == [False] * len(library.backwards)


def test_determinism_is_passed_on(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    build(case_of("DIFF V1")).solve(diff_attention, backend=library.backend)
    assert library.deterministic == [True] * 2
    wide = build(replace(case_of("DIFF V1"), dv=200))
    if library.backend == "fa3":
        with pytest.raises(ValueError, match="it takes d and dv up to 192 that are multiples of 8, got d 8 and dv 200"):
            wide.solve(diff_attention, backend="fa3")
    out = diff_attention(wide.q.detach(), wide.k.detach(), wide.v.detach(), 0.5, backend=library.backend)
    assert out.shape[-1] == 200


@pytest.mark.parametrize("case", ["DIFF V1", "values narrower than keys"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_operators_are_what_torch_takes_them_for(library: StandIn, case: str, is_transposed: bool) -> None:
    """Also in the order of the numbers that they give out, which a compiled graph counts on."""
    problem = build(case_of(case))
    q, k, v = (x.flatten(1, -3).detach() for x in (problem.q[:, :, 0], problem.k[:, :, 0], problem.v))
    q, k, v = (x.transpose(1, 2) if is_transposed else x.transpose(1, 2).contiguous() for x in (q, k, v))
    settings = library.backend, 0.25, True, None if library.backend == "fa4" else -1
    tensors = [x.requires_grad_() for x in (q, k, v)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(flash.attend, (*tensors, *settings), test_utils=checks)
    with torch.no_grad():
        out, log_sums = flash.attend(*tensors, *settings)
    saved = torch.randn_like(out), None, q.detach(), k.detach(), v.detach(), out, log_sums
    torch.library.opcheck(flash.backward, (*saved, *settings), test_utils=checks)


# What a process compiles for a GPU that is not there: both passes of one map.
COMPILED = """
    import json, sys, types
    import cutlass.utils, torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from diff_transformer.ops import flash

    # It asks a driver, where a launch gives each multiprocessor several tiles.
    cutlass.utils.HardwareInfo = lambda: types.SimpleNamespace(get_device_multiprocessor_count=lambda: 132)
    d, dv, heads, key_heads, is_causal, window = json.loads(sys.argv[1])
    with FakeTensorMode():
        sizes = ((heads, d), (key_heads, d), (key_heads, dv))
        q, k, v = (torch.empty(1, 1024, *size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        out, log_sums = flash.attend._init_fn(q, k, v, "fa4", 0.125, is_causal, window)
        flash.backward._init_fn(torch.empty_like(out), None, q, k, v, out, log_sums, "fa4", 0.125, is_causal, window)
"""


@pytest.mark.all
@pytest.mark.skipif(not flash.is_installed("flash-attn-4"), reason="flash-attn-4 is not installed")
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
def test_kernels_compile_fit_and_spill_nothing(
    tmp_path: Path, capability: int, heads: tuple[int, ...], is_causal: bool, window: int | None
) -> None:
    """But for a few registers on Blackwell, whose tiles are the package's own; how many depends on its compiler."""
    import triton

    settings = {
        "FLASH_ATTENTION_ARCH": f"sm_{capability}",
        "CUTE_DSL_ARCH": f"sm_{capability}a",
        "FLASH_ATTENTION_NUM_SMS": "132",
        "CUTE_DSL_KEEP": "ir,cubin",
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
    most = {(100, 128): 56, (100, 64): 8}.get((capability, heads[0]), 0)
    assert {name for name, count in spilled.items() if count > most} == set(), spilled
    # Shared memory is allocated once a kernel, and a launch asks for all of that.
    written = [file.read_text() for file in tmp_path.glob("*_clean.mlir")]
    asked = [int(size) for text in written for size in re.findall(r'memref<i8, smem, align<1024>, "(\d+):1">', text)]
    assert len(asked) >= 2
    assert max(asked) <= 227 * 1024, asked


@pytest.mark.parametrize(
    "library", ["fa4", *(pytest.param(x, marks=pytest.mark.all) for x in ("fa2", "fa3"))], indirect=True
)
def test_it_is_a_part_of_a_compiled_graph(library: StandIn) -> None:
    problem, expected = prepared(case_of("grouped-query"))
    attend = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    expected.check(problem.solve(attend, backend=library.backend))
    assert library.backwards


def check_beside_the_reference(backend: str, case: str, leaf: str, weight: Tensor, **options: Any) -> None:
    """Outputs, log-sums and gradients, where ``leaf`` names an option that has a gradient, too."""
    problem, answers = build(case_of(case)), []
    for name, dtype in ((backend, torch.bfloat16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
        leaves += [torch.full((4, 1), 0.6, requires_grad=True), weight.clone().requires_grad_()]
        outs = diff_attention(*leaves[:4], is_causal=True, backend=name, **{leaf: leaves[4]}, **options)
        out, *log_sums = outs if isinstance(outs, tuple) else (outs,)
        # The gradient that comes to a row which sees nothing is infinite.
        gradients = torch.autograd.grad((out, *log_sums), leaves, (problem.dout.to(dtype), *(2 * x for x in log_sums)))
        answers.append([torch.where(x == float("-inf"), -3.0, x.detach()) for x in (out, *log_sums, *gradients)])
    for ours, truth in zip(*answers, strict=True):
        # A few roundings of 2⁻⁹ on the way, relative to the largest.
        assert float((ours.double() - truth.double()).abs().max()) <= 2**-5 * float(truth.abs().max())


@pytest.mark.parametrize("factor", [0.8, 1.0])
@only_fa4
def test_the_norm_is_that_of_the_reference(library: StandIn, factor: float) -> None:
    weight = torch.randn(16, generator=torch.Generator().manual_seed(0))
    check_beside_the_reference(library.backend, "DIFF V1", "norm_weight", weight, norm_eps=1e-3, norm_scale=factor)


@pytest.mark.parametrize("case", ["DIFF V1", "DIFF V2", "grouped noise maps", "queries that see nothing"])
def test_two_weights_and_log_sums_are_those_of_the_reference(library: StandIn, case: str) -> None:
    check_beside_the_reference(library.backend, case, "signal_weight", torch.full((4, 1), 0.3), return_lse=True)


def test_hidden_nan_is_not_seen(library: StandIn) -> None:
    problem = build(case_of("DIFF V1"))
    k, v = problem.k.clone(), problem.v.clone()
    k[:, :, :, 6], v[:, :, 7] = float("nan"), float("inf")
    clean, spoiled = (
        diff_attention(problem.q, *tensors, 0.5, is_causal=True, backend=library.backend)
        for tensors in ((problem.k, problem.v), (k, v))
    )
    assert torch.equal(clean[:, :, :6], spoiled[:, :, :6])
    assert spoiled[:, :, 6:].isnan().all()


@only_fa4
def test_tiles_follow_the_values_where_they_are_wider_than_the_keys(library: FlashAttention4) -> None:
    flash._functions("fa4")
    interface: Any = library
    assert interface._tile_size_fwd_sm90(64, 128, True, False) == ("forward", 128, 128)
    assert interface._tile_size_bwd_sm90(128, 256, True, False) == ("backward", 192, 256)
    assert interface._tile_size_fwd_sm90(192, 128, True, False) == ("forward", 192, 128)
    assert interface._tile_size_bwd_sm90(64, 64, True, False) == ("backward", 64, 64)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool)}, "it takes no attn_mask and no documents"),
        ({"cu_seqlens": torch.tensor([0, 4, 9])}, r"it takes no attn_mask and no documents \(cu_seqlens\)"),
        ({"scale": -1.0}, r"it takes a scale above 0 and a batch of 1 or more, got -1\.0"),
    ],
)
def test_refusals(library: StandIn, options: dict[str, Any], reason: str) -> None:
    problem = build(replace(case_of("DIFF V1"), batch=1))
    with pytest.raises(ValueError, match=f"^backend {library.backend!r} cannot run this request: {reason}"):
        diff_attention(problem.q, problem.k, problem.v, 0.5, **options, backend=library.backend)


def test_a_window_behind_which_all_is_seen(library: StandIn) -> None:
    """FlashAttention 2 would look at S keys behind a query's position, which may be below 0."""
    problem, expected = prepared(replace(case_of("window that is not causal"), queries=9, keys=3))
    if library.backend == "fa2":
        with pytest.raises(
            ValueError, match="takes a window without is_causal for no more queries than keys, got 9 and"
        ):
            problem.solve(diff_attention, backend="fa2")
    else:
        expected.check(problem.solve(diff_attention, backend=library.backend))


@pytest.mark.parametrize("backend", STAND_INS)
def test_the_cpu_is_refused(backend: str) -> None:
    problem = build(case_of("DIFF V1"))
    with pytest.raises(ValueError, match=rf"{backend!r} cannot run .* needs its tensors on a CUDA device, got cpu\.$"):
        problem.solve(diff_attention, backend=backend)


@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "widths", "reason"),
    [
        ("fa4", (9, 0), torch.float32, (64, 128), "it computes bfloat16 and float16, got torch.float32"),
        ("fa4", (8, 0), torch.bfloat16, (64, 128), "it is called on NVIDIA's compute capabilities 9.x, 10.x, got 8.0"),
        ("fa4", (9, 0), torch.bfloat16, (60, 120), "it takes d and dv up to 256 that .* 8, got d 60 and dv 120"),
        ("fa4", (10, 0), torch.bfloat16, (128, 256), "it takes d and dv up to 128 that .*, got d 128 and dv 256"),
        ("fa4", (9, 0), torch.bfloat16, (128, 256), None),
        ("fa4", (10, 0), torch.float16, (64, 128), None),
        ("fa3", (8, 9), torch.bfloat16, (64, 128), "it is called on NVIDIA's compute capabilities 9.x, got 8.9"),
        ("fa3", (9, 0), torch.float16, (128, 256), None),
        ("fa2", (7, 5), torch.float16, (64, 128), "it is called .* 8.x, 9.x, 10.x, 12.x, got 7.5"),
        ("fa2", (8, 9), torch.bfloat16, (256, 264), "it takes d and dv up to 256 that .*, got d 256 and dv 264"),
        ("fa2", (12, 0), torch.bfloat16, (128, 256), None),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    capability: tuple[int, int],
    dtype: torch.dtype,
    widths: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(flash, "is_installed", lambda package: True)
    found = flash.reason_against_flash(backend, on_cuda(dtype, *widths))
    assert found == reason or (found and reason and re.fullmatch(reason, found))


def on_cuda(dtype: torch.dtype, d: int, dv: int) -> Request:
    """A request without numbers, on a device that need not be there."""
    with FakeTensorMode():
        q, v = (torch.empty(*size, dtype=dtype, device="cuda") for size in ((1, 2, 2, 9, d), (1, 2, 9, dv)))
        lam = torch.empty(1, 2, 9, device="cuda")
    return Request(q, q, v, lam, None, True, 1.0, None, None)


@pytest.mark.parametrize(
    ("backend", "package"), [("fa2", "flash-attn"), ("fa3", "flash-attn-3"), ("fa4", "flash-attn-4")]
)
def test_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, backend: str, package: str) -> None:
    monkeypatch.setattr(flash, "is_installed", lambda package: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reason = flash.reason_against_flash(backend, on_cuda(torch.bfloat16, 64, 128))
    assert reason == f"the package {package} is not installed"


@pytest.mark.parametrize(
    ("library", "lacking", "message"),
    [
        ("fa2", "_flash_attn_forward_fake", r"flash-attn 9\.9 lacks what 'fa2' calls, as 2\.8\.3 has it: "),
        ("fa3", "_flash_attn_forward_fake", r"flash-attn-3 9\.9 lacks what 'fa3' calls, as 3\.0\.0 has it: "),
        ("fa4", "_tile_size_bwd_sm90", r"flash-attn-4 9\.9 lacks what 'fa4' calls, as 4\.0\.0b36 has it: "),
    ],
    indirect=["library"],
)
def test_another_version_of_the_package_is_named(
    library: StandIn, lacking: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(library), lacking)
    monkeypatch.setattr(flash.importlib.metadata, "version", lambda _: "9.9")
    with pytest.raises(ValueError, match=f"^{message}"):
        flash._functions(library.backend)
    monkeypatch.setitem(sys.modules, flash.PACKAGES[library.backend][2], None)
    with pytest.raises(ValueError, match=r"9\.9 does not load: "):
        flash._functions(library.backend)


def test_the_check_before_use_finds_a_wrong_gradient(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(torch.bfloat16, 16, 32, "", TRAINING, backend=library.backend, has_signal=True)
    assert reason_against_family(family, torch.device("cpu")) is None
    differentiate = library.differentiate

    def wrong(*tensors: Tensor, dq: Tensor, **options: Any) -> None:
        differentiate(*tensors, dq=dq, **options)
        dq.mul_(1.1)

    monkeypatch.setattr(library, "differentiate", wrong)
    assert str(reason_against_family(family, torch.device("cpu"))).startswith("the gradient of q is wrong, ")


def test_second_order_is_refused(library: StandIn) -> None:
    problem = build(case_of("DIFF V1"))
    tensors = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out = diff_attention(*tensors, 0.5, backend=library.backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="backend 'fa2, fa3, fa4' cannot be differentiated twice"):
        gradient.sum().backward()


@only_fa4
def test_open_widths_compile_in_one_graph(library: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sizes that torch.compile leaves open, whether `auto` takes it is no constant."""
    monkeypatch.setattr(flash, "MEASURED_QUERIES", 1)

    def chosen(q: Tensor, v: Tensor) -> Tensor:
        request = Request(q, q, v, v[..., 0], None, True, 1.0, None, None)
        return v + (1 if flash.reason_against_flash("fa4", request) is None else 2)

    compiled = torch.compile(chosen, fullgraph=True, dynamic=True, backend="eager")
    for d in (8, 16, 12):
        q, v = torch.randn(1, 2, 2, 9, d, dtype=torch.bfloat16), torch.zeros(1, 2, 9, 2 * d, dtype=torch.bfloat16)
        assert compiled(q, v).unique().item() == (2 if d == 12 else 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("backend", STAND_INS)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, backend: str) -> None:
    small = case_of(case)
    problem, expected = prepared(replace(small, d=8 * small.d, dv=8 * small.dv))
    if reason := flash._kernels_on(backend, "cuda", None, torch.bfloat16)[0]:
        pytest.skip(reason)
    expected.check(problem.to("cuda").solve(diff_attention, backend=backend))
