"""The Triton kernels, interpreted on the CPU: blocks of every kind, decoding, the fused norm, torch's machinery.

The common suite of tests/ops runs the backend too, at sizes that fit in one block. Here blocks are so small that
lengths of 50 to 110 have blocks at the lower edge, blocks that are seen whole, and blocks at the upper edge.
"""

import os
import textwrap
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import budget
import fresh
from budget import Case, Problem, build, check_normed, expect, prepared
from counted_operators import Operators
from diff_transformer import diff_attention
from diff_transformer.ops.triton import triton_backend
from full_run import short_run
from nonfinite_problems import check_output, spoil
from triton_interpreter import overflow_checked

triton = pytest.importorskip("triton")
if not triton_backend.interpreted():
    pytest.skip("there is a GPU: the kernels run natively in test_on_gpu.py", allow_module_level=True)

from diff_transformer.ops.triton import kernel_arguments, launch  # noqa: E402
from diff_transformer.ops.triton.kernel_arguments import Blocks  # noqa: E402

# Lengths that no block divides, so that every last block is partial.
BASE = Case(batch=1, heads=2, key_heads=1, queries=111, keys=111, d=8, dv=16, lam="full")
LONG = {
    "causal": replace(BASE, queries=82, keys=82, is_causal=True),
    "not causal, d and dv odd": replace(BASE, queries=63, keys=63, d=13, dv=27),
    "window": replace(BASE, window=70, is_causal=True),
    "documents": replace(BASE, queries=98, keys=98, documents=(34, 1, 45, 0, 18), is_causal=True),
    "47 of 98": replace(BASE, queries=47, keys=98, is_causal=True, window=70),
    "98 of 47": replace(BASE, queries=98, keys=47, is_causal=True),
    "padding": replace(BASE, batch=2, heads=1, queries=63, keys=63, mask="bool (B, 1, 1, S)", is_causal=True),
    "mask for each head": replace(BASE, mask="bool (B, H, N, S)", queries=63, keys=111, is_causal=True, window=80),
    "additive mask": replace(BASE, mask="add -inf (B, 1, N, S)", queries=63, keys=63, dtype=torch.float16),
    "mask and documents": replace(BASE, heads=1, mask="bool (N, S)", documents=(70, 41)),
    "grouped": replace(BASE, heads=4, key_heads=2, queries=63, keys=63, is_causal=True, layout="cache"),
    "shared keys": replace(BASE, key_maps=1, is_causal=True, layout="projection", dv=4),
    "expanded": replace(BASE, batch=2, key_heads=2, queries=63, keys=63, is_causal=True, layout="expanded"),
    "float16": replace(BASE, dtype=torch.float16, is_causal=True, d=20, dv=40, layout="cache"),
    "noise maps of two": replace(
        BASE, heads=8, ratio=2, key_heads=2, queries=47, keys=47, window=30, is_causal=True, layout="cache"
    ),
    "noise maps of three, shared keys": replace(
        BASE, heads=6, ratio=3, key_maps=1, queries=35, keys=63, is_causal=True, layout="projection"
    ),
    "noise maps, additive mask, float16": replace(
        BASE, batch=2, ratio=2, queries=35, keys=35, mask="add -inf (B, 1, N, S)", dtype=torch.float16
    ),
}
SMALL = {"16 × 16": Blocks(16, 16, 4, 1), "32 × 16": Blocks(32, 16, 4, 1), "16 × 32": Blocks(16, 32, 4, 1)}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    """Every launch of a kernel, in order, added before it runs."""
    launches: list[launch.Launch] = []
    run = launch.Launch.run

    def recorded(self: launch.Launch) -> None:
        launches.append(self)
        run(self)

    monkeypatch.setattr(launch.Launch, "run", recorded)
    return launches


def names(launches: list[launch.Launch]) -> list[str]:
    """Of their kernels, in order."""
    return [each.kernel.fn.__name__ for each in launches]


def set_blocks(monkeypatch: pytest.MonkeyPatch, blocks: Blocks, programs: int | None = None) -> None:
    """For every kernel; and how many programs the device has, where it is to split the keys among them."""
    monkeypatch.setattr(kernel_arguments.Problem, "blocks", lambda *_: blocks)
    if programs is not None:
        monkeypatch.setattr(triton_backend, "program_count", lambda _: programs)


forward = partial(budget.forward, backend="triton")


# Many blocks.


# The interpreter takes a second for each.
IN_SHORT_RUN = (
    "causal",
    "not causal, d and dv odd",
    "documents",
    "47 of 98",
    "padding",
    "additive mask",
    "noise maps of two",
)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("blocks", ["32 × 16", "16 × 32"])
@pytest.mark.parametrize("request_", short_run(LONG, IN_SHORT_RUN))
def test_many_blocks(monkeypatch: pytest.MonkeyPatch, request_: str, blocks: str) -> None:
    """Output and every gradient."""
    problem, expected = prepared(LONG[request_])
    set_blocks(monkeypatch, SMALL[blocks])
    expected.check(problem.solve(diff_attention, backend="triton"))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("blocks", ["32 × 16", "16 × 32"])
@pytest.mark.parametrize("two_passes", [False, True])
@pytest.mark.parametrize("request_", short_run(LONG, IN_SHORT_RUN))
def test_forward_without_gradients(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], request_: str, blocks: str, two_passes: bool
) -> None:
    problem, expected = prepared(LONG[request_])
    set_blocks(monkeypatch, SMALL[blocks]._replace(two_passes=two_passes))
    expected.check_output(forward(problem))
    in_groups = LONG[request_].ratio > 1  # a map at a time takes one pass
    assert names(launched) == ["forward_kernel"] * (1 + in_groups)
    for each in launched:
        assert (each.arguments["SAVE"], each.arguments["TWO_PASSES"]) == (False, two_passes and not in_groups)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("request_", short_run(["causal", "mask for each head", "float16"], ["mask for each head"]))
def test_blocks_as_they_are_on_a_device(launched: list[launch.Launch], request_: str) -> None:
    problem, expected = prepared(LONG[request_])
    expected.check(problem.solve(diff_attention, backend="triton"))
    assert names(launched) == ["forward_kernel", "rows_kernel", "keys_kernel", "queries_kernel"]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("d", [64, 128])
def test_wide_heads(launched: list[launch.Launch], d: int) -> None:
    """The sums of dK and dV do not fit in registers together: two launches. The forward takes two passes."""
    problem, expected = prepared(Case(batch=1, heads=1, key_heads=1, queries=35, keys=35, d=d, dv=256, is_causal=True))
    expected.check(problem.solve(diff_attention, backend="triton"))
    assert names(launched) == ["forward_kernel", "rows_kernel", "keys_kernel", "keys_kernel", "queries_kernel"]
    shares = [(each.arguments["OF_KEYS"], each.arguments["OF_VALUES"]) for each in launched[2:4]]
    assert shares == [(True, False), (False, True)]
    launched.clear()
    expected.check_output(forward(problem))
    (only,) = launched
    assert only.arguments["TWO_PASSES"]


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("ratio", [1, 2])
def test_wide_heads_in_many_blocks(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """Both launches where dK and dV are added up over heads, maps share their keys, and positions hide."""
    case = replace(LONG["window"], d=72, dv=24, key_maps=1, queries=63, keys=63, window=40, ratio=ratio)
    problem, expected = prepared(case)
    set_blocks(monkeypatch, SMALL["16 × 16"])
    expected.check(problem.solve(diff_attention, backend="triton"))


def test_a_noise_map_is_computed_once_for_its_group(launched: list[launch.Launch]) -> None:
    """Of six signal heads in two groups the six first maps and two second ones: forward, backward and decoding."""
    problem, expected = prepared(replace(BASE, batch=2, heads=6, ratio=3, key_heads=2, queries=20, keys=20))
    expected.check(problem.solve(diff_attention, backend="triton"))
    assert [(each.kernel.fn.__name__, each.grid[1]) for each in launched[:3]] == [
        ("forward_kernel", 2),
        ("forward_kernel", 6),
        ("rows_kernel", 2),  # each program goes through the signal heads of a group
    ]
    assert [each.arguments["heads_per_key"] for each in launched[3:5]] == [1, 3]  # heads to a key head
    assert [each.grid[1] for each in launched[5:]] == [2, 6]
    launched.clear()
    problem, expected = prepared(replace(BASE, heads=6, ratio=3, queries=2))
    expected.check_output(forward(problem))
    assert names(launched) == ["parts_kernel", "combine_kernel"]
    assert launched[0].arguments["tops"].shape[-1] == 6 * 2 + 2 * 2  # rows of the signal heads and of the noise maps


# Decoding.

DECODING = {
    "one query": Case(queries=1, keys=97, is_causal=True),
    "three queries": Case(queries=3, keys=37, is_causal=True, lam="full"),
    "three queries, window": Case(queries=3, keys=97, is_causal=True, window=21, lam="per token"),
    "grouped": Case(heads=8, key_heads=2, queries=4, keys=67, is_causal=True, lam="full", layout="cache"),
    "shared keys, grouped, d and dv odd": Case(heads=6, key_maps=1, queries=2, keys=61, d=5, dv=11, is_causal=True),
    "padding": Case(batch=3, queries=1, keys=63, mask="bool (B, 1, 1, S)", is_causal=True),
    "mask for each head": Case(heads=4, key_heads=2, queries=4, keys=63, mask="bool (B, H, N, S)", is_causal=True),
    "mask for each head alone": Case(heads=6, key_heads=2, queries=2, keys=40, mask="bool (H, 1, S)"),
    "additive mask": Case(heads=4, key_heads=2, queries=4, keys=63, mask="add (B, H, N, S)", is_causal=True),
    "additive mask that hides": Case(queries=4, keys=63, mask="add -inf (B, 1, N, S)", is_causal=True),
    "queries that see nothing": Case(queries=4, keys=2, is_causal=True),
    "float16": Case(heads=4, key_heads=1, queries=2, keys=97, is_causal=True, dtype=torch.float16, layout="cache"),
    "peaked": Case(queries=1, keys=97, is_causal=True, gain=6.0),
    "large logits": Case(queries=1, keys=97, gain=30.0),
    "noise maps of two": Case(
        heads=8, ratio=2, key_heads=2, queries=3, keys=67, is_causal=True, lam="full", layout="cache"
    ),
    "noise maps of three, padding": Case(
        batch=3, heads=6, ratio=3, key_heads=1, queries=1, keys=63, mask="bool (B, 1, 1, S)", lam="full"
    ),
    "noise maps, mask for each query": Case(
        heads=4, ratio=2, queries=2, keys=40, mask="add -inf (B, 1, N, S)", key_maps=1, dtype=torch.float16
    ),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("programs", [1, 13, 64])
@pytest.mark.parametrize(
    "request_",
    short_run(
        DECODING,
        ("one query", "three queries, window", "grouped", "padding", "mask for each head", "noise maps of two"),
    ),
)
def test_decoding(monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], request_: str, programs: int) -> None:
    case = DECODING[request_]
    problem, expected = prepared(case)
    set_blocks(monkeypatch, SMALL["16 × 16"], programs)
    expected.check_output(forward(problem))
    in_parts = launched[-2]
    assert names(launched)[-2:] == ["parts_kernel", "combine_kernel"]
    assert (in_parts.grid[0] > 1) == (programs > 1 and case.keys > 16)
    if request_ == "three queries, window":  # what the window hides is left alone
        assert in_parts.arguments["start"] == 64  # 97 − 3 − 21 + 1 = 74, in whole blocks


def test_many_parts_are_put_together_in_chunks(monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch]) -> None:
    """More parts than one step of the combining kernel adds up."""
    problem, expected = prepared(Case(batch=1, heads=1, key_heads=1, queries=1, keys=563, is_causal=True, d=2, dv=3))
    set_blocks(monkeypatch, SMALL["16 × 16"], programs=64)
    expected.check_output(forward(problem))
    assert launched[0].grid[0] == 36 > 2 * launched[1].arguments["CHUNK"]


CHUNKS = {
    "causal": Case(batch=1, heads=2, key_heads=2, queries=37, keys=90, is_causal=True, dtype=torch.float16),
    "grouped, window": Case(batch=1, heads=4, key_heads=1, queries=13, keys=90, is_causal=True, window=50,
                            dtype=torch.float16, layout="cache"),
    "padding": Case(batch=3, heads=1, key_heads=1, queries=20, keys=70, mask="bool (B, 1, 1, S)", is_causal=True,
                    dtype=torch.float16),
    "additive mask": Case(batch=1, heads=1, key_heads=1, queries=33, keys=70, mask="add -inf (N, S)",
                          dtype=torch.float16),
    "noise map of four": Case(batch=1, heads=4, ratio=4, key_heads=1, queries=13, keys=90, is_causal=True, window=50,
                              lam="full", dtype=torch.float16, layout="cache"),
}  # fmt: skip


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("programs", [1, 64])
@pytest.mark.parametrize("request_", CHUNKS)
def test_a_chunk_of_queries_is_split_over_the_keys(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], request_: str, programs: int
) -> None:
    case = CHUNKS[request_]
    problem, expected = prepared(case)
    set_blocks(monkeypatch, Blocks(64, 16, 4, 1), programs)
    monkeypatch.setattr(kernel_arguments, "LONG_CACHE", 64)
    expected.check_output(forward(problem))
    assert names(launched)[-2:] == ["parts_kernel", "combine_kernel"]
    assert launched[-2].arguments["ROWS"] == (32 if request_ == "padding" else 64)
    assert launched[-2].arguments["NOISE_ROWS"] == (16 if case.ratio > 1 else launched[-2].arguments["ROWS"])
    assert (launched[-2].grid[0] > 1) == (programs > 1)


@pytest.mark.parametrize("kind", ["padding", "additive mask"])
def test_the_device_finds_which_keys_are_in_use(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], kind: str
) -> None:
    """The same launches serve a cache that fills up, as in a CUDA graph: only what the tensors hold changes."""
    set_blocks(monkeypatch, SMALL["16 × 16"], programs=8)
    problem = build(Case(batch=2, heads=1, key_heads=1, queries=1, keys=90, d=8, dv=16))
    mask = torch.zeros(2, 1, 1, 90, dtype=torch.bool if kind == "padding" else torch.float32)
    options = {"attn_mask": mask}
    replayed: list[launch.Launch] = []
    for begin, end, parts in ((0, 1, 1), (3, 40, 3), (17, 90, 3)):
        used = (torch.arange(90) >= begin) & (torch.arange(90) < end)
        mask.copy_(used if kind == "padding" else torch.zeros(90).masked_fill(~used, -torch.inf))
        if not replayed:
            out = forward(replace(problem, options=options))
            replayed = list(launched)
        for each in replayed:
            each.run()
        expected = diff_attention(problem.q, problem.k, problem.v, problem.lam, **options, backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        # Of the three parts, for all keys would be 32 a part.
        assert (replayed[0].arguments["totals"] > 0).sum((1, 2, 3)).tolist() == [parts * 2] * 2


@pytest.mark.parametrize("two_passes", [False, True], ids=["one pass", "two passes"])
def test_weights_below_the_normal_numbers_of_float16(monkeypatch: pytest.MonkeyPatch, two_passes: bool) -> None:
    """One key takes nearly all of both maps and its value is 0, so the output comes from weights around 1e−6 alone."""
    q, k = torch.zeros(1, 1, 2, 16, 16, dtype=torch.float16), torch.zeros(1, 1, 2, 64, 16, dtype=torch.float16)
    q[..., 0], k[:, :, 0, 5, 0], k[:, :, 1, 5, 0] = 1.0, 13.3, 13.9
    v = torch.full((1, 1, 64, 16), 1000.0, dtype=torch.float16)
    v[:, :, 5] = 0.0
    dout = torch.full((1, 1, 16, 16), 100.0, dtype=torch.float16)
    dout[:, :, ::2] = 300.0
    problem = Problem(q, k, v, torch.tensor(0.3), dout, {"scale": 1.0})
    set_blocks(monkeypatch, SMALL["16 × 16"]._replace(two_passes=two_passes))
    exact = problem.double().solve(diff_attention, backend="reference")
    torch.testing.assert_close(forward(problem).double(), exact["out"], rtol=3e-3, atol=0)
    answer = problem.solve(diff_attention, backend="triton")
    torch.testing.assert_close(answer["v"].double(), exact["v"], rtol=3e-3, atol=0)


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (Case(heads=4, key_heads=1, queries=4, keys=9), "parts_kernel"),
        (Case(heads=1, key_heads=1, queries=17, keys=9), "forward_kernel"),
        (Case(batch=1, documents=(4, 5)), "forward_kernel"),
    ],
    ids=["sixteen rows", "seventeen rows", "documents"],
)
def test_which_requests_are_decoding(launched: list[launch.Launch], case: Case, kernel: str) -> None:
    problem, expected = prepared(case)
    expected.check_output(forward(problem))
    assert names(launched)[0] == kernel
    launched.clear()
    problem.solve(diff_attention, backend="triton")  # with gradients, what decoding does not keep is needed
    assert names(launched)[0] == "forward_kernel"


# The norm.


def normed(
    problem: Problem, weight: Tensor, backend: str, dtype: torch.dtype | None = None, **settings: float
) -> dict[str, Tensor]:
    """The operator with its norm, and gradients of all five; ``dtype``: everything cast to it before."""

    def cast(x: Tensor) -> Tensor:
        return (x if dtype is None else x.to(dtype)).detach().requires_grad_()

    assert isinstance(problem.lam, Tensor)
    leaves = [cast(x) for x in (problem.q, problem.k, problem.v, problem.lam, weight)]
    options = dict(problem.options)
    if dtype is not None and options.get("attn_mask") is not None and options["attn_mask"].dtype != torch.bool:
        options["attn_mask"] = options["attn_mask"].to(dtype)
    q, k, v, lam, norm_weight = leaves
    out = diff_attention(q, k, v, lam, **options, norm_weight=norm_weight, backend=backend, **settings)
    gradients = torch.autograd.grad(out, leaves, problem.dout.to(out.dtype))
    return dict(zip(("out", "q", "k", "v", "lam", "weight"), (out.detach(), *gradients), strict=True))


def check_norm(problem: Problem, weight: Tensor, **settings: float) -> None:
    """As near to float64 as the plain composition in the problem's dtype, twice its error and some roundings."""
    exact = normed(problem, weight, "reference", torch.float64, **settings)
    plain = normed(problem, weight, "reference", **settings)
    fused = normed(problem, weight, "triton", **settings)
    for name, value in exact.items():
        assert fused[name].dtype == plain[name].dtype
        assert fused[name].isfinite().all(), name
        by_plain = (plain[name].double() - value).abs().max()
        limit = 2 * by_plain + 16 * torch.finfo(problem.q.dtype).eps * value.abs().max()
        error = (fused[name].double() - value).abs().max()
        assert error <= limit, f"{name} is off by {error}, allowed is {limit}"


NORMED = {
    "causal": replace(BASE, queries=63, keys=63, is_causal=True),
    "odd widths": replace(BASE, queries=35, keys=35, d=5, dv=19, window=20),
    "queries that see nothing": replace(BASE, queries=40, keys=33, is_causal=True, mask="bool (N, S)", heads=1),
    "additive mask": replace(BASE, batch=2, heads=1, queries=20, keys=20, mask="add -inf (B, 1, N, S)"),
    "layout": replace(BASE, batch=2, heads=4, key_heads=2, queries=17, keys=33, is_causal=True, layout="cache"),
    "one query": replace(BASE, queries=1, keys=33, is_causal=True),
    "documents": replace(BASE, queries=50, keys=50, documents=(17, 33), is_causal=True),
    "noise maps": replace(BASE, batch=2, heads=6, ratio=3, key_heads=2, queries=17, keys=33, is_causal=True),
    "noise maps, float16": replace(BASE, heads=4, ratio=2, key_heads=2, queries=20, keys=20, layout="projection"),
}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "request_", short_run(NORMED, ("causal", "odd widths", "additive mask", "one query", "noise maps"))
)
def test_the_fused_norm(monkeypatch: pytest.MonkeyPatch, request_: str, dtype: torch.dtype) -> None:
    problem = build(replace(NORMED[request_], dtype=dtype))
    weight = torch.randn(problem.v.shape[-1]).to(dtype)
    weight[:3] = 0.0  # a channel that is switched off still has a gradient of its weight
    set_blocks(monkeypatch, SMALL["16 × 16"])
    check_norm(problem, weight, norm_eps=1e-3, norm_scale=0.35)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [(torch.float16, {"norm_eps": 0.1, "norm_scale": -1.5}), (torch.float32, {})],
    ids=["mixed precision", "defaults"],
)
def test_the_fused_norm_with_a_weight_in_float32(dtype: torch.dtype, settings: dict[str, float]) -> None:
    """As under mixed precision."""
    problem = build(replace(NORMED["causal"], queries=20, keys=20, dtype=dtype))
    check_norm(problem, torch.randn(problem.v.shape[-1]), **settings)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    "request_", ["three queries", "grouped", "additive mask that hides", "float16", "noise maps of two"]
)
def test_the_fused_norm_while_decoding(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], request_: str
) -> None:
    problem = build(DECODING[request_])
    weight, settings = torch.randn(problem.v.shape[-1]), {"norm_eps": 1e-3, "norm_scale": 0.35}
    set_blocks(monkeypatch, SMALL["16 × 16"], programs=64)
    fused = forward(problem, norm_weight=weight, **settings)
    assert names(launched)[-2:] == ["parts_kernel", "combine_kernel"]
    check_normed(fused, prepared(DECODING[request_])[1], weight, **settings)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("two_passes", [False, True], ids=["one pass", "two passes"])
def test_the_fused_norm_without_gradients(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], two_passes: bool
) -> None:
    problem, expected = prepared(LONG["window"])
    weight, settings = torch.randn(problem.v.shape[-1]), {"norm_eps": 1e-3, "norm_scale": 0.35}
    set_blocks(monkeypatch, SMALL["16 × 32"]._replace(two_passes=two_passes))
    check_normed(forward(problem, norm_weight=weight, **settings), expected, weight, **settings)
    assert names(launched) == ["forward_kernel"]


# A NaN in keys and values. Blocks at the edges mix queries that see it with such that do not.


def solve(problem: Problem) -> dict[str, Tensor]:
    return problem.solve(diff_attention, backend="triton")


@pytest.mark.filterwarnings("ignore:(invalid value encountered|All-NaN slice encountered):RuntimeWarning")
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("blocks", ["32 × 16", "16 × 32"])
@pytest.mark.parametrize("tensor", ["values", "keys"])
@pytest.mark.parametrize("request_", short_run(LONG, ["causal"]))
def test_a_nan_reaches_who_sees_it(monkeypatch: pytest.MonkeyPatch, request_: str, tensor: str, blocks: str) -> None:
    """And nobody else: the output of the others and every gradient have the bits that zeros in its place give."""
    pair = spoil(prepared(LONG[request_])[0], tensor)
    for two_passes in (False, True):
        set_blocks(monkeypatch, SMALL[blocks]._replace(two_passes=two_passes))
        check_output(forward(pair.spoilt), forward(pair.zeros), pair.seeing)
    answer, zeros = solve(pair.spoilt), solve(pair.zeros)
    expect(pair.zeros).check(zeros)
    check_output(answer.pop("out"), zeros.pop("out"), pair.seeing)
    torch.testing.assert_close(answer, zeros, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("request_", short_run(NORMED, ["documents"]))
def test_a_nan_before_the_norm(monkeypatch: pytest.MonkeyPatch, request_: str, tensor: str) -> None:
    pair = spoil(build(NORMED[request_]), tensor)
    weight = torch.randn(pair.zeros.v.shape[-1])
    set_blocks(monkeypatch, SMALL["16 × 16"])
    answer, zeros = (normed(problem, weight, "triton", norm_eps=1e-3) for problem in (pair.spoilt, pair.zeros))
    check_output(answer.pop("out"), zeros.pop("out"), pair.seeing)
    torch.testing.assert_close(answer, zeros, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize(
    "request_",
    [
        "three queries, window",
        "grouped",
        "mask for each head",
        pytest.param("noise maps of two", marks=pytest.mark.all),
    ],
)
def test_a_nan_while_decoding(monkeypatch: pytest.MonkeyPatch, request_: str, tensor: str) -> None:
    pair = spoil(build(DECODING[request_]), tensor)
    set_blocks(monkeypatch, SMALL["16 × 16"], programs=64)
    check_output(forward(pair.spoilt), forward(pair.zeros), pair.seeing)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.parametrize("fill", short_run([torch.nan, torch.inf], [torch.inf]))
@pytest.mark.parametrize("tensor", short_run(["q", "dout"], ["q"]))
def test_a_query_that_is_not_finite_stays_alone(monkeypatch: pytest.MonkeyPatch, tensor: str, fill: float) -> None:
    """Outputs of other queries, and their gradients, know nothing of it."""
    problem = build(LONG["window"])
    set_blocks(monkeypatch, SMALL["32 × 16"])
    spoilt = getattr(problem, tensor).clone()
    spoilt[..., 50, 1] = fill
    answer, usual = solve(replace(problem, **{tensor: spoilt})), solve(problem)
    others = torch.arange(111) != 50
    for name in ("out", "q", "lam"):
        axis = 2 if name != "q" else 3
        both = (x[name].movedim(axis, 0)[others] for x in (answer, usual))
        assert torch.equal(*both), name
    assert tensor == "dout" or not answer["out"][..., 50, :].isfinite().any()


# Memory.


def inside_nan(x: Tensor, rows: int = 3, channels: int = 5) -> Tensor:
    """The same numbers as a view into memory that is NaN before and after every row, and on all sides of the rows."""
    buffer = x.new_full((*x.shape[:-2], x.shape[-2] + 2 * rows, x.shape[-1] + channels), float("nan"))
    view = buffer[..., rows:-rows, 2 : 2 + x.shape[-1]]
    view.copy_(x)
    return view


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("blocks", ["32 × 16", "16 × 32"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    "request_",
    short_run(
        ["47 of 98", "mask for each head", "shared keys", "float16", "causal", "noise maps of two"],
        ("causal", "mask for each head"),
    ),
)
def test_nothing_outside_the_tensors_is_read(
    monkeypatch: pytest.MonkeyPatch, request_: str, norm: bool, blocks: str
) -> None:
    """A cache is longer than what is in it, and whatever is in its unused part, or beside a head, must not show.

    32 queries are whole blocks, which the backward reads without looking where they end.
    """
    queries = 32 if request_ == "causal" else 35
    case = replace(LONG[request_], layout="contiguous", queries=queries, keys=51, d=12, dv=20)
    problem = build(case)
    surrounded = replace(
        problem,
        **{name: inside_nan(getattr(problem, name)) for name in ("q", "k", "v", "dout")},
        lam=torch.full((*problem.lam.shape, 3), float("nan"))[..., 1].copy_(problem.lam),
    )
    more = {"norm_weight": torch.randn(case.dv)} if norm else {}
    if "attn_mask" in problem.options:
        mask = problem.options["attn_mask"]
        around = torch.ones(*mask.shape[:-1], 2 * mask.shape[-1] + 40, dtype=torch.bool)
        around[..., 7 : 7 + 2 * mask.shape[-1] : 2] = mask
        strided = around[..., 7 : 7 + 2 * mask.shape[-1] : 2]
        surrounded = replace(surrounded, options={**problem.options, "attn_mask": strided})
    set_blocks(monkeypatch, SMALL[blocks])
    torch.testing.assert_close(
        *(x.solve(diff_attention, backend="triton", **more) for x in (surrounded, problem)), rtol=0, atol=0
    )
    decoded, more_keys = (
        replace(each, q=each.q[..., -3:, :], lam=each.lam[..., -3:]) for each in (problem, surrounded)
    )
    if norm or "attn_mask" not in problem.options:
        for each in (decoded, more_keys):
            each.options.pop("attn_mask", None)
        assert torch.equal(forward(decoded, **more), forward(more_keys, **more))


def untouched(size: int) -> Tensor:
    """Memory that is asked for, but hardly touched."""
    try:
        return torch.empty(size, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("the system does not hand out memory that it does not have")


@pytest.mark.parametrize("far", ["batches", "rows"])
def test_offsets_of_more_than_32_bits(monkeypatch: pytest.MonkeyPatch, far: str) -> None:
    """Batches 2³¹ + 2²⁰ numbers apart, or rows so far that the last tiles of K and V begin beyond 2³¹."""
    set_blocks(monkeypatch, SMALL["16 × 16"])
    batch, keys = (2, 40) if far == "batches" else (1, 160)
    case = Case(batch=batch, heads=1, key_heads=1, queries=17, keys=keys, d=4, dv=8, dtype=torch.float16)
    problem, expected = prepared(case)
    if far == "batches":
        distance = (1 << 31) + (1 << 20)
        k = untouched(distance + 4096).as_strided(problem.k.shape, (distance, 1, 4, 8, 1))
        v = untouched(distance + 4096).as_strided(problem.v.shape, (distance, 1, 8, 1))
    else:
        row = (1 << 24) - 8
        k = untouched((keys - 1) * row + 8).as_strided(problem.k.shape, (0, 0, 4, row, 1))
        v = untouched((keys - 1) * row + 8).as_strided(problem.v.shape, (0, 0, row, 1))
    distant = replace(problem, k=k.copy_(problem.k), v=v.copy_(problem.v))
    with overflow_checked():
        expected.check(distant.solve(diff_attention, backend="triton"))
        few = problem.q[..., -2:, :]
        assert torch.equal(forward(replace(distant, q=few)), forward(replace(problem, q=few)))


# Under torch's other machinery.

SMALL_CASES = {
    "causal": Case(is_causal=True, queries=7, lam="full", layout="expanded"),
    "grouped, masked, windowed": Case(
        heads=4, mask="bool (B, 1, 1, S)", is_causal=True, window=4, lam="full", layout="projection"
    ),
    "documents": Case(batch=1, heads=4, documents=(3, 0, 6), is_causal=True, lam="full", layout="projection"),
    "shared keys, additive mask": Case(
        key_maps=1, mask="add -inf (B, 1, N, S)", queries=11, lam="full", is_causal=True, dv=4, layout="cache"
    ),
    "noise maps of two": Case(heads=4, ratio=2, lam="full", is_causal=True, layout="projection"),
}


def operator_arguments(case: Case, norm: bool, keep: bool) -> tuple[Any, ...]:
    """As ``triton_forward`` takes them."""
    q, k, v, lam, *others = budget.operator_arguments(case)
    weight = torch.randn(case.dv, requires_grad=keep) if norm else None
    return *(x.detach().requires_grad_(keep) for x in (q, k, v, lam)), *others, weight, 1e-5, 0.7, keep


@pytest.mark.all
@pytest.mark.parametrize("request_", SMALL_CASES)
def test_opcheck(request_: str) -> None:
    """With the norm and without it: what the backward needs depends on it."""
    case, norm = SMALL_CASES[request_], request_ != "shared keys, additive mask"
    keeping = operator_arguments(case, norm, True)
    torch.library.opcheck(torch.ops.diff_transformer.triton_forward, keeping)
    without_gradients = operator_arguments(case, norm, False)
    signal = torch.rand(without_gradients[3].shape)
    for others in ((), (signal, True)):
        torch.library.opcheck(torch.ops.diff_transformer.triton_forward, (*without_gradients, *others))
    torch.library.opcheck(torch.ops.diff_transformer.triton_forward, (*keeping, signal.clone().requires_grad_()))
    detached = [x.detach() if isinstance(x, Tensor) else x for x in keeping]
    q, k, v, lam, mask, is_causal, scale, window, documents, weight, eps, factor, _ = detached
    out, plain, *saved, a1_v = torch.ops.diff_transformer.triton_forward(*detached, signal)
    arguments = (build(case).dout, q, k, v, lam, mask, documents, weight, plain if norm else out, *saved)
    settings = (is_causal, scale, window, eps, factor)
    torch.library.opcheck(torch.ops.diff_transformer.triton_backward, (*arguments, *settings))
    of_signal = (a1_v, torch.ones_like(saved[1]), signal)
    torch.library.opcheck(torch.ops.diff_transformer.triton_backward, (*arguments, *settings, *of_signal))


def test_autocast_and_checkpointing() -> None:
    """Half precision chosen by autocast is what half precision is, and so is what checkpointing computes again."""
    problem, weight = build(replace(SMALL_CASES["grouped, masked, windowed"])), torch.randn(8)
    half = replace(problem, **{name: getattr(problem, name).half() for name in ("q", "k", "v", "dout")})
    plain = normed(half, weight, "triton")
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.lam, weight)]

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, weight: Tensor) -> Tensor:
        return diff_attention(q, k, v, lam, **problem.options, norm_weight=weight, backend="triton")

    for checkpointed in (False, True):
        with torch.autocast("cpu", dtype=torch.float16):
            out = checkpoint(attend, *leaves, use_reentrant=False) if checkpointed else attend(*leaves)
        assert out.dtype == torch.float16
        gradients = torch.autograd.grad(out, leaves, half.dout)
        torch.testing.assert_close([out, *gradients], [*plain.values()], rtol=0, atol=0, check_dtype=False)


# Which backend runs, and what it says where it does not.


@pytest.mark.parametrize("request_", SMALL_CASES)
def test_the_kernels_run_alone(launched: list[launch.Launch], request_: str) -> None:
    problem, weight = build(SMALL_CASES[request_]), torch.randn(SMALL_CASES[request_].dv)
    with Operators() as seen:
        problem.solve(diff_attention, backend="triton", norm_weight=weight)
        forward(problem, norm_weight=weight)
    each = 1 if SMALL_CASES[request_].ratio == 1 else 2  # launches: a map at a time where heads share noise maps
    expected = ["forward_kernel"] * each + ["rows_kernel"] + ["keys_kernel"] * each + ["queries_kernel"] * each
    assert names(launched)[: len(expected)] == expected
    ours = {name: count for name, count in seen.count.items() if name.startswith("diff_transformer")}
    assert ours == {"diff_transformer::triton_forward": 2, "diff_transformer::triton_backward": 1}
    of_others = ("softmax", "scaled_dot_product", "mm", "mean", "rsqrt")
    for part in (*of_others, "sum", "masked_fill", "clone"):  # the last three would keep hidden NaN away
        assert not [name for name in seen.count if part in name], part


def attend(dtype: torch.dtype = torch.float32, d: int = 4, dv: int = 8) -> Tensor:
    q, v = torch.randn(1, 1, 2, 3, d, dtype=dtype), torch.randn(1, 1, 3, dv, dtype=dtype)
    return diff_attention(q, q, v, 0.5, backend="triton")


def test_reasons() -> None:
    attend()
    with pytest.raises(ValueError, match=r"'triton' cannot run.*float32.*torch.float64"):
        attend(torch.float64)
    attend(d=128, dv=256)
    for d, dv in ((129, 8), (4, 257)):
        with pytest.raises(ValueError, match=rf"'triton' cannot run.*128.*256.* d {d} and dv {dv}"):
            attend(d=d, dv=dv)
    meta = torch.empty(1, 1, 2, 3, 4, device="meta")
    with pytest.raises(ValueError, match=r"'triton' cannot run.*on a CUDA device, got meta"):
        diff_attention(meta, meta, meta[:, :, 0], 0.5, backend="triton")


@pytest.mark.parametrize(
    ("settings", "precision"),
    [({"fp32_precision": "tf32"}, "tf32"), ({"fp32_precision": "none"}, "ieee"), ({"allow_tf32": True}, "tf32")],
    ids=str,
)
def test_float32_is_multiplied_as_torch_is_told_to(
    monkeypatch: pytest.MonkeyPatch, launched: list[launch.Launch], settings: dict[str, Any], precision: str
) -> None:
    """In every kernel that multiplies tiles. Narrower types have one precision."""
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(**settings))
    for case, expected in ((Case(), precision), (Case(dtype=torch.float16), "ieee")):
        build(case).solve(diff_attention, backend="triton")
        forward(build(case))
        precisions = {names([each])[0]: each.arguments.get("PRECISION") for each in launched}
        launched.clear()
        assert precisions.pop("rows_kernel") is precisions.pop("combine_kernel", None) is None
        assert precisions == dict.fromkeys(
            ("forward_kernel", "keys_kernel", "queries_kernel", "parts_kernel"), expected
        )


def test_a_learned_mask_is_refused() -> None:
    problem = build(Case(mask="add (H, N, S)"))
    problem.options["attn_mask"].requires_grad_()
    with pytest.raises(ValueError, match=r"'triton' cannot run.*no gradient for attn_mask"):
        problem.solve(diff_attention, backend="triton")


def test_the_kernels_are_imported_when_they_are_used() -> None:
    """torch._dynamo, which marking functions for torch.compile loads, imports triton itself: it is ours that counts."""
    program = """
        import sys
        import diff_transformer.ops
        assert diff_transformer.ops.backends.explain()["triton"] is not None
        print([name for name in sys.modules if name.startswith("diff_transformer.ops.triton.")])
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = fresh.run(textwrap.dedent(program), environment=environment)
    loaded = [f"diff_transformer.ops.triton.{name}" for name in ("kernel_arguments", "triton_backend", "gpu_check")]
    assert done.stdout == f"{loaded}\n", done.stderr


@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_a_norm_weight_need_not_be_contiguous(kind: str) -> None:
    wider = torch.randn(2 * BASE.dv)
    weight = wider[::2] if kind == "strided" else torch.full((1,), 1.5).expand(BASE.dv)
    problem = build(replace(BASE, queries=20, keys=20, is_causal=True))
    torch.testing.assert_close(*(normed(problem, x, "triton") for x in (weight, weight.contiguous())), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("d", "addend", "limit"), [(16, -1e5, 1e-2), (128, -1e9, 1e-4), (16, torch.finfo(torch.float32).min, 1e-4)], ids=str
)
def test_addends_so_large_that_the_logits_vanish_beside_them(d: int, addend: float, limit: float) -> None:
    """A row whose keys all carry such an addend attends to all alike, in the gradients and in two passes too.

    At −1e5 the logits are left with few bits, in the reference as in the kernel.
    """
    case = Case(batch=1, heads=1, key_heads=1, queries=40, keys=40, d=d, dv=2 * d, gain=0.5)
    problem = build(case)
    mask = torch.zeros(1, 1, 40, 40)
    mask[..., 3, :] = addend
    problem = replace(problem, options={"attn_mask": mask})
    expected, result = (problem.solve(diff_attention, backend=name) for name in ("reference", "triton"))
    for name, value in expected.items():
        assert (result[name] - value).abs().max() <= limit * value.abs().max().clamp(min=1), name
    # Each map's weights add up to 1 in the backward pass, too: what rounding takes from their log-sum is not lost.
    assert torch.allclose(result["v"].sum(2), expected["v"].sum(2), atol=1e-3)
    with torch.no_grad():
        out = diff_attention(problem.q, problem.k, problem.v, problem.lam, attn_mask=mask, backend="triton")
    assert (out - expected["out"]).abs().max() <= limit


def test_the_output_may_be_changed_in_place() -> None:
    q = torch.randn(1, 2, 2, 5, 8, requires_grad=True)
    k, v, weight = torch.randn(1, 2, 2, 5, 8), torch.randn(1, 2, 5, 16), torch.ones(16)
    out = diff_attention(q, k, v, 0.5, norm_weight=weight, backend="triton")
    out += 1  # no view, and with a norm not what the backward needs
    out.sum().backward()


def test_more_heads_than_a_grid_has_rows() -> None:
    q = torch.zeros(1, 65536, 2, 1, 1)
    with pytest.raises(ValueError, match="up to 65535 sequences and heads, got 1 and 65536"):
        diff_attention(q, q, torch.zeros(1, 65536, 1, 1), 0.5, backend="triton")
