"""The Triton kernels on a GPU, compiled: everything that the interpreter cannot show.

Nearly every case compiles kernels of its own, on one core: `pytest -n 8 tests/ops/triton` shares the work.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import budget
from budget import Case, Problem, build, plain_attention, prepared
from cases import CASES, case
from counted_operators import Operators
from diff_transformer import diff_attention
from diff_transformer.ops import operator
from diff_transformer.ops.attention_request import position_mask, segment_bounds_from
from diff_transformer.ops.operator import packed_attention
from diff_transformer.ops.packed import pack, unpacked
from diff_transformer.ops.triton.triton_backend import interpreted
from nonfinite_problems import check_output, check_pair, spoil

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit.*deprecated:DeprecationWarning")]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def multiplied(precision: str) -> Iterator[None]:
    """How torch, and so the kernels, multiply float32. (monkeypatch would delete the setting, not restore it.)"""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    yield
    settings.fp32_precision = before


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """float32 as float32, here and in what the kernels are compared with."""
    with multiplied("ieee"):
        yield


def on_gpu(problem: Problem | Case) -> Problem:
    """The problem, or that of a case."""
    return (build(problem) if isinstance(problem, Case) else problem).to("cuda")


forward = partial(budget.forward, backend="triton")


def test_the_kernels_are_compiled_here() -> None:
    assert not interpreted()


# The small cases of the common suite.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name: str, dtype: torch.dtype) -> None:
    problem, expected = prepared(case(name, dtype))
    problem = on_gpu(problem)
    answer = problem.solve(diff_attention, backend="triton")
    expected.check(answer)
    out = forward(problem)  # without gradients other kernels run
    expected.check({**answer, "out": out})


# Sizes with many blocks, against the formula in float64.


def formula(problem: Problem, case: Case, weight: Tensor | None, eps: float, factor: float) -> Any:
    """What `Problem.solve` takes: Equation 1 spelled out in the dtype of its inputs, and the norm behind it."""
    n, s, device = case.queries, case.keys, problem.q.device
    documents = None if case.documents is None else segment_bounds_from(problem.options["cu_seqlens"], n)
    seen = position_mask(n, s, case.is_causal, case.window, documents, device)
    visible = torch.ones(n, s, dtype=torch.bool, device=device) if seen is None else seen
    bias = torch.zeros(1, 1, 1, 1, dtype=torch.float64, device=device)
    mask = problem.options.get("attn_mask")
    if mask is not None:
        visible = visible & (mask if mask.dtype == torch.bool else mask > -torch.inf)
        bias = bias if mask.dtype == torch.bool else mask.masked_fill(mask == -torch.inf, 0.0)
    plain = plain_attention(visible.expand(case.batch, case.heads, n, s), bias, case.d**-0.5)

    def attend(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **_: object) -> Tensor:
        out = plain(q, k, v, lam)
        if weight is None:
            return out
        wide = out.to(torch.promote_types(out.dtype, torch.float32))  # whose squares float16 cannot hold
        return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * factor).to(out.dtype)

    return attend


def check_against_formula(case: Case, *, norm: bool = False, gradients: bool = True) -> None:
    """At most twice as far from float64 as the formula with every step in the case's dtype, and a few roundings.

    Three times for gradients in float32: those of q were .7 % over twice on an H200 (d 128, norm).
    """
    problem = on_gpu(case)
    weight = torch.randn(case.dv, device="cuda") if norm else None
    attend = formula(problem, case, weight, 1e-5, 0.4)
    exact, plain = problem.double().solve(attend), problem.solve(attend)
    more = {"norm_weight": weight, "norm_eps": 1e-5, "norm_scale": 0.4} if norm else {}
    answer = problem.solve(diff_attention, backend="triton", **more) if gradients else {}
    answers = [answer, {"out": forward(problem, **more)}]
    eps = max(torch.finfo(case.dtype).eps, torch.finfo(torch.float32).eps)
    for name, value in ((name, value) for each in answers for name, value in each.items()):
        assert value.isfinite().all(), name
        largest, by_plain = exact[name].abs().max(), (plain[name].double() - exact[name]).abs().max()
        times = 3 if case.dtype == torch.float32 and name != "out" else 2
        limit = times * by_plain + 4 * eps * largest
        error = (value.double() - exact[name]).abs().max()
        assert error <= limit, f"{name} is off by {error:.3g}, allowed is {limit:.3g}"


# Logits of standard deviation 1: peaked enough to matter, and the plain formula in bfloat16 is still a formula.
SIZES = Case(batch=2, heads=4, key_heads=2, d=64, dv=128, dtype=torch.bfloat16, gain=1.0, lam="full", is_causal=True)
KERNEL_SIZES = {
    **{f"{n} tokens, d {d}": replace(SIZES, queries=n, keys=n, d=d, dv=2 * d)
       for n in (63, 111, 128, 257, 640, 1025) for d in (64, 128)},
    "float16": replace(SIZES, queries=511, keys=511, dtype=torch.float16),
    "float32": replace(SIZES, queries=257, keys=257, dtype=torch.float32),
    "float32, wide": replace(SIZES, queries=130, keys=130, d=128, dv=256, dtype=torch.float32),
    "d 32": replace(SIZES, queries=300, keys=300, d=32, dv=64),
    "d 80, dv 96": replace(SIZES, queries=300, keys=300, d=80, dv=96),
    "d 96, dv = d": replace(SIZES, queries=300, keys=300, d=96, dv=96),
    "d 128, dv 128": replace(SIZES, queries=300, keys=300, d=128, dv=128),
    "not causal": replace(SIZES, queries=511, keys=511, is_causal=False),
    "window": replace(SIZES, queries=1025, keys=1025, window=300),
    "window, not causal": replace(SIZES, queries=700, keys=700, window=300, is_causal=False),
    "200 of 1025": replace(SIZES, queries=200, keys=1025),
    "1025 of 200": replace(SIZES, queries=1025, keys=200),
    "documents": replace(SIZES, batch=1, queries=1025, keys=1025, documents=(300, 1, 0, 500, 224)),
    "documents, wide": replace(SIZES, batch=1, queries=600, keys=600, documents=(300, 1, 299), d=128, dv=256),
    "padding": replace(SIZES, queries=511, keys=511, mask="bool (B, 1, 1, S)"),
    "padding, wide": replace(SIZES, queries=300, keys=300, mask="bool (B, 1, 1, S)", d=128, dv=256),
    "mask for each head": replace(SIZES, queries=257, keys=511, mask="bool (B, H, N, S)"),
    "additive mask": replace(SIZES, queries=511, keys=511, mask="add -inf (B, 1, N, S)"),
    "additive mask, wide": replace(SIZES, queries=257, keys=257, mask="add (B, H, N, S)", d=128, dv=256),
    "shared keys": replace(SIZES, heads=8, key_heads=2, queries=511, keys=511, key_maps=1, dv=64),
    "shared keys, wide": replace(SIZES, heads=8, key_heads=2, queries=257, keys=257, key_maps=1, d=128, dv=128),
    "projection": replace(SIZES, queries=511, keys=511, layout="projection"),
    "cache": replace(SIZES, queries=257, keys=511, layout="cache"),
    "noise maps of four": replace(SIZES, heads=8, ratio=4, queries=640, keys=640, layout="projection"),
    "noise maps of two, wide": replace(SIZES, heads=8, ratio=2, queries=300, keys=511, d=128, dv=256, window=200),
    "noise maps, additive mask": replace(SIZES, heads=6, ratio=3, queries=257, keys=257, mask="add -inf (B, 1, N, S)"),
    "expanded": replace(SIZES, queries=257, keys=257, layout="expanded"),
}  # fmt: skip


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("size", KERNEL_SIZES)
def test_kernel_sizes(size: str, norm: bool) -> None:
    check_against_formula(KERNEL_SIZES[size], norm=norm)


DECODING = {
    "one token": replace(SIZES, queries=1, keys=1025),
    "one token, long cache": replace(SIZES, batch=1, queries=1, keys=100_003),
    "one token, short cache": replace(SIZES, queries=1, keys=7),
    "one token, wide": replace(SIZES, queries=1, keys=4099, d=128, dv=256),
    "four tokens, grouped": replace(SIZES, heads=8, queries=4, keys=2047),
    "four tokens, noise maps of four": replace(SIZES, heads=8, ratio=4, queries=4, keys=2047),
    "three tokens, window": replace(SIZES, queries=3, keys=4097, window=1000),
    "padding": replace(SIZES, queries=1, keys=1025, mask="bool (B, 1, 1, S)"),
    "additive mask": replace(SIZES, queries=4, keys=1025, mask="add -inf (B, 1, N, S)"),
    "shared keys": replace(SIZES, heads=8, queries=1, keys=1025, key_maps=1, dv=64),
    "cache": replace(SIZES, queries=1, keys=1025, layout="cache"),
    "d 80, dv 96": replace(SIZES, queries=2, keys=333, d=80, dv=96),
    "float16": replace(SIZES, queries=1, keys=1025, dtype=torch.float16),
    "float32": replace(SIZES, queries=1, keys=1025, dtype=torch.float32),
    "many sequences": replace(SIZES, batch=300, queries=1, keys=65),
}


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("size", DECODING)
def test_decoding(size: str, norm: bool) -> None:
    check_against_formula(DECODING[size], norm=norm, gradients=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("start", [0, 3])
def test_rows_of_eight_bits(monkeypatch: pytest.MonkeyPatch, start: int, dtype: torch.dtype) -> None:
    """At an address that 16 divides and another: about as far from float64 as the same kernels with unpacked rows."""
    for name, size in DECODING.items():
        problem = on_gpu(replace(size, dtype=dtype))
        k, v = pack(problem.k.transpose(2, 3).flatten(-2))[:, :, start:], pack(problem.v)[:, :, start:]
        options = {key: x[..., start:] if key == "attn_mask" else x for key, x in problem.options.items()}
        wide = unpacked(k, v, size.d, torch.float64)
        with torch.no_grad():
            exact = diff_attention(problem.q.double(), *wide, problem.lam, backend="reference", **options)
            numbers = unpacked(k, v, size.d, dtype)
            plain = diff_attention(problem.q, *numbers, problem.lam, backend="triton", **options)
            with monkeypatch.context() as patch:
                patch.setattr(operator, "unpacked", None)
                out = packed_attention(problem.q, k, v, problem.lam, backend="triton", **options)
        limit = 1.5 * (plain - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        assert (out - exact).abs().max() <= limit, name


WITH_NAN = {
    "causal": Case(batch=1, queries=300, keys=300, d=64, dv=128, is_causal=True, heads=4),
    "window": Case(batch=1, queries=200, keys=300, d=64, dv=128, is_causal=True, window=130),
    "documents": Case(batch=1, queries=300, keys=300, d=128, dv=256, is_causal=True, documents=(130, 170)),
    "mask": Case(queries=150, keys=150, d=64, dv=128, mask="bool (B, H, N, S)"),
    "padding": Case(queries=150, keys=150, d=64, dv=128, mask="bool (B, 1, 1, S)", is_causal=True),
    "noise maps": Case(
        batch=1, heads=4, ratio=2, key_heads=2, queries=300, keys=300, d=64, dv=128, is_causal=True, lam="full"
    ),
    "few queries": Case(heads=4, queries=4, keys=300, d=64, dv=128, is_causal=True),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize("request_", WITH_NAN)
def test_a_nan_reaches_who_sees_it(request_: str, tensor: str, dtype: torch.dtype) -> None:
    """And nobody else: the output of the others and every gradient have the bits that zeros in its place give."""
    pair = spoil(build(replace(WITH_NAN[request_], dtype=dtype)), tensor)
    pair = replace(pair, zeros=on_gpu(pair.zeros), spoilt=on_gpu(pair.spoilt), seeing=pair.seeing.cuda())
    check_pair(pair, diff_attention, "triton")
    norm = {"norm_weight": torch.ones(pair.zeros.v.shape[-1], device="cuda")}
    check_output(*(forward(x, **norm) for x in (pair.spoilt, pair.zeros)), pair.seeing)
    answer, zeros = (x.solve(diff_attention, backend="triton", **norm) for x in (pair.spoilt, pair.zeros))
    check_output(answer.pop("out"), zeros.pop("out"), pair.seeing)
    torch.testing.assert_close(answer, zeros, rtol=0, atol=0)


def test_tf32_is_torchs_own_setting() -> None:
    """With tf32 allowed the error is of tf32's size (10 bits), and far above float32's."""
    size = replace(SIZES, queries=257, keys=257, dtype=torch.float32)
    problem = on_gpu(size)
    exact = problem.double().solve(formula(problem, size, None, 0.0, 1.0))
    errors = {}
    for precision in ("ieee", "tf32"):
        with multiplied(precision):
            answer = problem.solve(diff_attention, backend="triton")
        errors[precision] = {
            name: float((answer[name].double() - value).abs().max() / value.abs().max())
            for name, value in exact.items()
        }
    for name in exact:
        assert errors["ieee"][name] < 2e-5, (name, errors)
        assert 5 * errors["ieee"][name] < errors["tf32"][name] < 16 * 2**-10, (name, errors)


# The same bits every time.


TRAINED = ("1025 tokens, d 64", "257 tokens, d 128", "documents", "mask for each head")


@pytest.mark.parametrize(
    ("request_", "trained"),
    [(KERNEL_SIZES[size], True) for size in TRAINED] + [(size, False) for size in DECODING.values()],
    ids=[*TRAINED, *DECODING],
)
def test_the_same_bits_a_hundred_times(request_: Case, trained: bool) -> None:
    """A race between threads of a block would show as a different answer now and then."""
    problem, weight = on_gpu(request_), torch.randn(request_.dv, device="cuda")

    def solve() -> list[Tensor]:
        if trained:
            return [*problem.solve(diff_attention, backend="triton", norm_weight=weight).values()]
        return [forward(problem, norm_weight=weight)]

    first = solve()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        for a, b in zip(first, solve(), strict=True):
            different += (a != b).sum()
    assert different.item() == 0


# Under torch's other machinery.

MACHINERY = {
    "causal": replace(SIZES, queries=130, keys=130),
    "padding, window": replace(SIZES, queries=130, keys=130, mask="bool (B, 1, 1, S)", window=50, layout="projection"),
    "documents": replace(SIZES, batch=1, queries=130, keys=130, documents=(63, 67)),
    "shared keys": replace(SIZES, heads=4, queries=65, keys=130, key_maps=1, layout="cache"),
}


@pytest.mark.parametrize("request_", MACHINERY)
def test_compiled_in_one_graph(request_: str) -> None:
    """By inductor, forward and backward, and without gradients; then for another length."""
    torch._dynamo.reset()
    compiled, case = torch.compile(diff_attention, fullgraph=True), MACHINERY[request_]
    longer = replace(case, queries=case.queries + 127, keys=case.keys + 127, documents=case.documents and (63, 194))
    for each in (case, longer):
        problem, weight = on_gpu(each), torch.randn(each.dv, device="cuda")
        eager = problem.solve(diff_attention, backend="triton", norm_weight=weight)
        for name, value in problem.solve(compiled, backend="triton", norm_weight=weight).items():
            torch.testing.assert_close(value, eager[name], rtol=1e-2, atol=1e-2, msg=name)
        with torch.no_grad():
            out = compiled(problem.q, problem.k, problem.v, problem.lam, **problem.options, backend="triton")
        torch.testing.assert_close(out, forward(problem), rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()


# CUDA graphs, streams, devices.


def warmed_up(run: Any) -> None:
    """What a graph may not contain: compilation, and the first use of anything."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize(
    "request_",
    [DECODING["one token"], DECODING["padding"], DECODING["four tokens, grouped"], MACHINERY["causal"]],
    ids=["decoding", "decoding, padding", "decoding four tokens", "forward"],
)
def test_a_graph_is_replayed_with_other_inputs(request_: Case) -> None:
    problem, weight = on_gpu(request_), torch.randn(request_.dv, device="cuda")
    warmed_up(lambda: forward(problem, norm_weight=weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(problem, norm_weight=weight)
    for _ in range(3):
        for static in (problem.q, problem.k, problem.v):
            static.copy_(torch.randn_like(static))
        problem.lam.copy_(torch.rand_like(problem.lam))
        graph.replay()
        assert torch.equal(out, forward(problem, norm_weight=weight))


def test_a_graph_of_a_training_step() -> None:
    problem = on_gpu(MACHINERY["causal"])
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.lam)]

    def step() -> list[Tensor]:
        out = diff_attention(*leaves, **problem.options, backend="triton")
        return [out.detach(), *torch.autograd.grad(out, leaves, problem.dout)]

    warmed_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        torch.testing.assert_close(captured, step(), rtol=0, atol=0)


def test_on_another_stream() -> None:
    """Inputs that are written late, on the stream where the kernels have to wait for them."""
    problem = on_gpu(MACHINERY["causal"])
    expected, decoded = problem.solve(diff_attention, backend="triton"), on_gpu(DECODING["one token"])
    expected_out = forward(decoded)
    late = replace(problem, q=torch.zeros_like(problem.q))
    late_decoded = replace(decoded, q=torch.zeros_like(decoded.q))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.q.copy_(problem.q)
        late_decoded.q.copy_(decoded.q)
        answer, out = late.solve(diff_attention, backend="triton"), forward(late_decoded)
    torch.cuda.synchronize()
    torch.testing.assert_close(answer, expected, rtol=0, atol=0)
    assert torch.equal(out, expected_out)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_on_a_device_that_is_not_the_current_one() -> None:
    first = on_gpu(MACHINERY["causal"])
    expected = first.solve(diff_attention, backend="triton")
    assert torch.cuda.current_device() == 0
    answer = first.to("cuda:1").solve(diff_attention, backend="triton")
    for name, value in expected.items():
        assert answer[name].device.index == 1
        assert torch.equal(answer[name].to("cuda:0"), value), name


def test_offsets_of_more_than_32_bits() -> None:
    """Batches and rows so far apart that no 32 bits hold the distance, in numbers."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("too little memory is free")
    problem = on_gpu(replace(SIZES, queries=130, keys=130, heads=2, key_heads=2))
    expected = problem.solve(diff_attention, backend="triton")

    def distant(x: Tensor, batch: int, row: int) -> Tensor:
        strides = list(x.stride())
        strides[0], strides[-2] = batch, row
        inner = 1
        for axis in range(1, x.dim() - 2):  # heads and maps inside a row
            strides[axis] = inner * x.shape[-1]
            inner *= x.shape[axis]
        size = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, strides, strict=True))
        return torch.empty(size, dtype=x.dtype, device="cuda").as_strided(x.shape, strides).copy_(x)

    far_batches = replace(problem, k=distant(problem.k, (1 << 31) + 4096, 1024))
    far_rows = replace(problem, v=distant(problem.v, 1024, 1 << 24))
    for far in (far_batches, far_rows):
        for name, value in far.solve(diff_attention, backend="triton").items():
            torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-2, msg=name)
    decoded = replace(problem, q=problem.q[..., -2:, :], lam=problem.lam[..., -2:])
    expected_out = forward(decoded)
    for far in (far_batches, far_rows):
        torch.testing.assert_close(forward(replace(decoded, k=far.k, v=far.v)), expected_out, rtol=1e-2, atol=1e-2)


def test_memory_grows_with_the_length_alone() -> None:
    """Forward and backward together take less than one map of one head would."""
    n = 8192
    q, k = (torch.randn(1, 2, 2, n, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, n, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def step() -> None:
        torch.autograd.grad(diff_attention(q, k, v, 0.5, is_causal=True, backend="triton").sum(), (q, k, v))

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    assert torch.cuda.max_memory_allocated() - before < n * n * 2


# Which backend runs.


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_auto_is_triton(dtype: torch.dtype) -> None:
    problem = on_gpu(replace(MACHINERY["causal"], dtype=dtype))
    with Operators() as seen:
        problem.solve(diff_attention)
    ours = {name: count for name, count in seen.count.items() if name.startswith("diff_transformer")}
    assert ours == {"diff_transformer::triton_forward": 1, "diff_transformer::triton_backward": 1}
    assert not [name for name in seen.count if "softmax" in name or "scaled_dot_product" in name]
