"""The fused CPU kernel where its blocks, chunks and strips end, by every path through it, with one thread and with two.

The common suite (tests/ops) runs on it too, with sizes that mostly fit into one block.
"""

import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budget import Case, Problem, build, expect, prepared, random_cases
from diff_transformer import diff_attention
from diff_transformer.ops.cpu.cpu_backend import reason_against_cpu_kernel

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no kernel"),
]

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)


def one(n: int, s: int | None = None, **more: Any) -> Case:
    """One sequence of one head, unless it is said otherwise, with N queries and N or S keys."""
    return Case(**{"batch": 1, "heads": 1, "key_heads": 1, "queries": n, "keys": s or n, **more})


# A block has up to 64 queries, a chunk 96 keys (256 with AMX), a strip 64 channels; up to 8 queries for each key head
# (4 where instructions multiply bfloat16), or 16 where threads would be idle, take the path for few queries, which
# shares out 256 keys or more to a task.
CASES = {
    "one block, one chunk": one(64, 96, d=16, dv=32),
    "one more of each": one(65, 97, d=17, dv=33),
    "two blocks, two chunks, causal": one(128, 192, heads=2, key_heads=2, d=8, dv=16, is_causal=True),
    "widths beyond a strip": one(20, 30, d=80, dv=144, gain=1.5),
    "widths of several strips, odd": one(7, 9, d=129, dv=193, gain=1.2),
    "blocks across the heads of a group": one(25, 40, batch=2, heads=6, key_heads=2, is_causal=True, lam="full"),
    "blocks within the heads of a group": one(
        70, batch=2, heads=4, key_heads=2, is_causal=True, lam="per token", layout="expanded"
    ),
    "narrow window": one(130, window=5, is_causal=True),
    "window, heads in one block": one(30, 150, heads=4, window=40, is_causal=True),
    "wide window, not causal": one(80, 200, window=90),
    "window that begins near the end of the last chunk": one(10, 256, window=2, is_causal=True),
    "window across the end of a chunk": one(70, 590, heads=2, window=37, is_causal=True),
    "many blind queries": one(150, 40, heads=2, is_causal=True),
    "mask over several chunks": one(70, 210, batch=2, heads=2, key_heads=2, mask="bool (B, H, N, S)"),
    "additive mask over several chunks": one(70, 210, batch=2, heads=2, key_heads=2, mask="add -inf (B, 1, N, S)"),
    "padding over several chunks": one(40, 210, batch=2, heads=2, key_heads=2, mask="bool (B, 1, 1, S)"),
    "padding, heads in one block": one(20, 110, batch=3, heads=4, mask="bool (B, 1, 1, S)", is_causal=True),
    "mask by head, heads in one block": one(20, 110, heads=4, mask="bool (H, 1, S)"),
    "shared keys": one(70, 100, heads=4, key_heads=2, key_maps=1, dv=4, is_causal=True),
    "few queries, many keys": one(2, 700, heads=2, is_causal=True),
    "few queries, wide and odd": one(3, 70, d=70, dv=137, gain=1.3),
    "few queries, window": one(3, 600, heads=2, key_heads=2, window=70, is_causal=True),
    "few queries, parts that begin anywhere": one(1, 3000, d=4, dv=8, window=2967, is_causal=True),
    "few queries, mask": one(2, 300, batch=2, heads=2, key_heads=2, mask="bool (B, 1, 1, S)", is_causal=True),
    "few queries, additive mask": one(2, 300, batch=2, heads=2, key_heads=2, mask="add -inf (B, 1, N, S)"),
    "few queries, shared keys": one(1, 300, batch=2, heads=4, key_heads=2, key_maps=1, is_causal=True),
    "documents": one(432, heads=2, documents=(63, 1, 111, 257), is_causal=True, lam="full"),
    "documents, not causal": one(432, documents=(63, 1, 111, 0, 257), layout="projection"),
    "documents, window, shared keys": one(
        200, heads=4, key_heads=2, key_maps=1, documents=(97, 2, 101), window=33, dv=4
    ),
    "documents, mask": one(
        300, heads=2, key_heads=2, documents=(150, 53, 97), mask="bool (B, 1, 1, S)", is_causal=True
    ),
    "documents, additive mask": one(200, documents=(101, 99), mask="add -inf (B, 1, N, S)"),
    "documents, heads in one block": one(25, heads=6, documents=(7, 5, 13), is_causal=True, lam="per token"),
    "documents of one token": one(130, heads=2, key_heads=2, documents=(1,) * 130, is_causal=True),
    "few queries, documents": one(4, documents=(1, 3), is_causal=True),
    "sixteen queries of one key head, documents": one(16, documents=(3, 9, 0, 4), d=20, window=6),
    "a chunk of queries for each head": one(
        4, 300, batch=2, heads=4, key_heads=2, d=80, dv=96, gain=1.5, is_causal=True
    ),
    "more of them than the path for few takes": one(
        5, 300, batch=2, heads=4, key_heads=2, d=112, dv=112, is_causal=True, layout="projection"
    ),
    "three signal heads, two blocks, three chunks": one(70, 210, heads=6, ratio=3, is_causal=True, lam="full"),
    "three signal heads, groups in one block, padding": one(
        25, 130, batch=2, heads=6, ratio=3, mask="bool (B, 1, 1, S)", lam="per head"
    ),
    "two signal heads, documents, shared keys": one(
        200, heads=4, key_heads=2, ratio=2, key_maps=1, documents=(97, 2, 101), window=33, dv=4
    ),
    "four signal heads, widths beyond a strip": one(
        20, 30, heads=4, ratio=4, d=80, dv=144, gain=1.5, layout="projection"
    ),
    "two signal heads, few queries, many keys": one(2, 700, heads=4, ratio=2, is_causal=True, lam="full"),
    "three signal heads, few queries, additive mask": one(
        1, 600, batch=2, heads=6, key_heads=2, ratio=3, mask="add -inf (B, 1, N, S)", layout="cache", is_causal=True
    ),
    "sixteen queries of one key head": one(2, 530, heads=8, is_causal=True),
}


@contextmanager
def using_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


# In `make test` float32 with one thread, and with two bfloat16, which other instructions multiply.
WAYS = [
    pytest.param(dtype, threads, marks=() if (dtype, threads) in in_short_run else pytest.mark.all)
    for in_short_run in [((torch.float32, 1), (torch.bfloat16, 2))]
    for dtype in DTYPES
    for threads in (1, 2)
]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with using_threads(request.param):
        yield request.param


def test_threads_that_change_before_the_backward_pass_leave_weights_at_most_1() -> None:
    """With AMX the number of threads decides how scores are rounded, which are as far as 2^13 apart here."""
    q, k = (torch.randn(1, 1, 2, n, 64).mul(1e4).bfloat16().requires_grad_() for n in (65, 330))
    v = torch.randn(1, 1, 330, 64).bfloat16().requires_grad_()
    with using_threads(1):
        out = diff_attention(q, k, v, 0.5, is_causal=True, backend="cpu")
    with using_threads(8):
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.abs().max() <= 66 for x in gradients)


def test_where_there_is_a_compiler_there_is_a_kernel() -> None:
    """Elsewhere a missing kernel skips tests; here it must not go unnoticed."""
    assert reason_against_cpu_kernel() is None


def solve(problem: Problem, backend: str = "cpu") -> dict[str, torch.Tensor]:
    return problem.solve(diff_attention, backend=backend)


by_reference = partial(solve, backend="reference")


def attend(problem: Problem) -> torch.Tensor:
    return diff_attention(problem.q, problem.k, problem.v, problem.lam, **problem.options, backend="cpu")


@pytest.mark.parametrize(("dtype", "threads"), WAYS, indirect=["threads"], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients(name: str, dtype: torch.dtype, threads: int) -> None:
    problem, expected = prepared(replace(CASES[name], dtype=dtype))
    expected.check(solve(problem))


@pytest.mark.parametrize(("dtype", "threads"), WAYS, indirect=["threads"], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_output_without_gradients(name: str, dtype: torch.dtype, threads: int) -> None:
    """What takes the path for few queries: with gradients, scores are summed up as the backward does."""
    problem, expected = prepared(replace(CASES[name], dtype=dtype))
    out = attend(problem)
    assert not out.requires_grad
    expected.check_output(out)


def products() -> str:
    assert reason_against_cpu_kernel() is None
    products: str = torch.ops.diff_transformer_cpu.bfloat16_products()
    return products


@contextmanager
def without_tiles() -> Iterator[None]:
    """As torch's own attention is told to do without AMX."""
    torch.backends.mkldnn.set_flags(_enabled=False)
    yield
    torch.backends.mkldnn.set_flags(_enabled=True)


def test_what_multiplies_bfloat16() -> None:
    """AMX wherever torch's own attention has it."""
    is_level = torch.backends.cpu.get_cpu_capability() == "AVX512"
    assert (products() == "AMX") is (is_level and torch.cpu._is_amx_tile_supported())
    with without_tiles():
        assert products() in ("AVX512-BF16", "float32")


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_without_amx(name: str) -> None:
    if products() != "AMX":
        pytest.skip("all other tests are without it")
    problem, expected = prepared(replace(CASES[name], dtype=torch.bfloat16))
    with without_tiles():
        expected.check(solve(problem))


def test_tiles_are_taken_and_given_up() -> None:
    """Sums of another order differ in their last bits, of the output and of every gradient; a forward pass with tiles
    may be followed by a backward pass without.
    """
    if products() != "AMX":
        pytest.skip("this processor has no tiles")
    problem, expected = prepared(one(70, 300, heads=2, d=64, dv=64, dtype=torch.bfloat16, gain=1.0))
    tensors = [x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.lam)]
    with_tiles, few = solve(problem), attend(problem)
    out = diff_attention(*tensors, **problem.options, backend="cpu")
    with without_tiles():
        without = solve(problem)
        assert not torch.equal(few, attend(problem))
        gradients = torch.autograd.grad(out, tensors, problem.dout)
    assert not any(torch.equal(value, without[name]) for name, value in with_tiles.items())
    expected.check({"out": out.detach(), **dict(zip(("q", "k", "v", "lam"), gradients, strict=True))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_that_are_huge_are_rounded_once(dtype: torch.dtype) -> None:
    """A score of 10¹⁰ times a scale that is no power of two is rounded by hundreds: so must its maximum be."""
    q, k, v = 1e5 * torch.randn(1, 1, 2, 20, 24), 1e5 * torch.randn(1, 1, 2, 96, 24), 1 + torch.rand(1, 1, 96, 48)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    lam = torch.full((), 0.5, requires_grad=True)
    out = diff_attention(q, k, v, lam, scale=0.3, backend="cpu")
    expected = diff_attention(*(x.double() for x in (q, k, v, lam)), scale=0.3, backend="reference")
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=0)
    for x in torch.autograd.grad(out.sum(), (q, k, v, lam)):
        assert x.isfinite().all()


@pytest.mark.parametrize("queries", [2, 4])
def test_gradients_of_few_queries(queries: int, threads: int) -> None:
    """Values that are nearly alike: a map whose rows do not add up to 1 exactly would show in dq and dk tenfold.

    So the forward has to sum its scores up in the backward's order wherever there will be a backward.
    """
    q, k = 3 * torch.randn(1, 1, 2, queries, 64), 3 * torch.randn(1, 1, 2, 512, 64)
    v, grad, lam = 10 + torch.rand(1, 1, 512, 16), torch.rand(1, 1, queries, 16), torch.full((1, 1, queries), 0.5)
    problem = Problem(q, k, v, lam, grad)
    answer, plain, truth = solve(problem), by_reference(problem), by_reference(problem.double())
    for name in ("q", "k"):
        assert (answer[name] - truth[name]).norm() <= 5 * (plain[name] - truth[name]).norm(), name


@pytest.mark.parametrize("queries", [3, 70])
def test_strided_masks(queries: int, threads: int) -> None:
    """A mask seen through a transpose, a slice with a step, and an expand."""
    problem, may = build(Case(queries=queries, keys=110)), torch.rand(110, queries) < 0.7
    stepped, shared = may.repeat_interleave(2, 0)[::2], may[:, :1]
    for mask in (may.T, stepped.T, may.T.expand(2, 2, -1, -1), shared.T.expand(queries, -1)):
        masked = replace(problem, options={"attn_mask": mask})
        plain = replace(problem, options={"attn_mask": mask.contiguous()})
        assert torch.equal(attend(masked), attend(plain))
        torch.testing.assert_close(solve(masked), solve(plain), rtol=0, atol=0)
        expect(plain).check(solve(masked))


@pytest.mark.parametrize("open_head", [0, 3])
@pytest.mark.parametrize("queries", [2, 20])
def test_heads_of_one_block_with_masks_of_their_own(queries: int, open_head: int) -> None:
    """A chunk of keys is taken as open or hidden only if it is for all the heads that share the block."""
    problem = build(one(queries, 210, heads=4))
    for is_open in (False, True):
        may = torch.rand(4, 1, 210) < 0.5
        may[open_head] = is_open
        may[:, :, 100] = True
        masked = replace(problem, options={"attn_mask": may})
        expected = expect(masked)
        expected.check(solve(masked))
        expected.check_output(attend(masked))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["two blocks, two chunks, causal", "sixteen queries of one key head", "documents"])
def test_more_threads_than_processors(name: str, dtype: torch.dtype) -> None:
    """Eight: more than the heads, so that each head's work is divided, and in the backward its sums of keys are."""
    problem, expected = prepared(replace(CASES[name], dtype=dtype))
    with using_threads(8):
        expected.check(solve(problem))
        out = attend(problem)
        assert torch.equal(out, attend(problem))
    expected.check_output(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [Case(), Case(window=37), Case(ratio=3), Case(documents=(250, 1, 69))], ids=str)
def test_gradients_of_keys_where_threads_help_each_other(case: Case, dtype: torch.dtype) -> None:
    """Eight threads begin with a key head each, and in the end several work on one: its blocks take turns at the sums,
    which are those of one thread.
    """
    sizes = {"batch": 1, "heads": 8 * case.ratio, "key_heads": 8, "queries": 320, "keys": 320, "d": 20}
    problem = build(replace(case, dtype=dtype, is_causal=True, **sizes))
    with using_threads(1):
        alone = solve(problem)
    for threads in (2, 8, 8, 8, 8):
        with using_threads(threads):
            torch.testing.assert_close(solve(problem), alone, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [3, 8])
@pytest.mark.parametrize(("queries", "keys"), [(300, 10), (640, 40), (300, 300)])
def test_a_head_that_many_threads_share(queries: int, keys: int, threads: int) -> None:
    """Its blocks are cut into shares with sums of their own, some of them of blocks that see no keys."""
    problem, expected = prepared(one(queries, keys, is_causal=True))
    with using_threads(threads):
        first = solve(problem)
        expected.check(first)
        for _ in range(5):
            torch.testing.assert_close(solve(problem), first, rtol=0, atol=0)


REQUESTS = random_cases(batch=2, key_heads=2, queries=75, keys=130, d=20, dv=70, window=80, dtypes=DTYPES)


@settings(max_examples=30)
@given(REQUESTS, st.integers(1, 3))
def test_any_request_is_within_budget(case: Case, count: int) -> None:
    problem = build(case)
    with using_threads(count):
        expect(problem).check(solve(problem))


@pytest.mark.parametrize("shift", [-200.0, -89.0, 89.0, 500.0])
def test_logits_far_from_zero_in_a_block_with_lanes_to_spare(shift: float) -> None:
    """A lane without a query must not run into numbers that float32 cannot hold, which 0 times them would not mend."""
    problem = build(one(5, 20))
    q, k = problem.q.clone(), problem.k.clone()
    q[..., 0], k[..., 0] = 2.0, shift
    q[..., -1, 1:] = 0.0  # the last query's logits are all `shift`: 2^128 is e^88.7
    far = replace(problem, q=q, k=k, options={"scale": 0.5})
    expect(far).check(solve(far))
    near = replace(problem, options={"attn_mask": torch.full((5, 20), shift)})
    expect(near).check(solve(near))


@pytest.mark.parametrize("queries", [1, 40])
def test_the_error_does_not_grow_with_the_length(queries: int) -> None:
    """Sums over the keys are made of short sums: one long sum of 32,768 numbers alike would lose two digits more."""
    keys = 1 << 15
    q, k = torch.zeros(1, 1, 2, queries, 4), torch.randn(1, 1, 2, keys, 4)
    v, grad = torch.rand(1, 1, keys, 8) + 0.5, torch.rand(1, 1, queries, 8) + 0.5
    problem = Problem(q, k, v, torch.full((1, 1, queries), -0.5), grad)
    answer = solve(problem) | ({"out": attend(problem)} if queries == 1 else {})
    truth = by_reference(problem.double())
    for name in ("out", "v", "lam"):
        error = (answer[name].double() - truth[name]).abs().max() / truth[name].abs().max()
        assert error < 8 * torch.finfo(torch.float32).eps, name


@pytest.mark.parametrize(
    ("queries", "window", "dtype", "ratio"),
    [
        *itertools.product((3, 20), (None, 69_000), (torch.float32, torch.bfloat16), (1,)),
        (20, None, torch.float32, 3),
        (20, 69_000, torch.float32, 2),
    ],
    ids=str,
)
def test_more_keys_than_a_block_keeps(queries: int, window: int | None, dtype: torch.dtype, ratio: int) -> None:
    """Beyond 65,536 keys the maps of a block are computed twice instead of kept."""
    keys = 70_000
    shapes = ((1, 1, ratio + 1, queries, 4), (1, 1, 2, keys, 4), (1, 1, keys, 8))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    mask[..., 30_000:30_500] = False
    mask[..., 1, 50_000:] = False
    options = {"attn_mask": mask, "is_causal": True, "window": window}
    lam, dout = torch.rand(1, ratio, queries), torch.randn(1, ratio, queries, 8).to(dtype)
    problem = Problem(q, k, v, lam, dout, options)
    truth, plain = by_reference(problem.double()), by_reference(problem)
    for name, value in solve(problem).items():
        error, limit = (value - truth[name]).norm(), (plain[name] - truth[name]).norm()
        assert error <= 2 * limit + 4 * torch.finfo(dtype).eps * truth[name].norm(), name
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (2e-2, 1e-4)
    torch.testing.assert_close(attend(problem).double(), truth["out"], rtol=rtol, atol=atol)


@pytest.mark.parametrize("differentiable", [False, True])
def test_heads_of_a_group_whose_masks_differ(differentiable: bool) -> None:
    """Side by side in a block of queries: one head sees every key, another some of them, a third none."""
    q, k, v = torch.randn(1, 3, 2, 2, 8), torch.randn(1, 1, 2, 9, 8), torch.randn(1, 1, 9, 16)
    mask = torch.ones(3, 1, 9, dtype=torch.bool)
    mask[1, :, 4:], mask[2] = False, False
    q.requires_grad_(differentiable)
    out, expected = (diff_attention(q, k, v, 0.5, attn_mask=mask, backend=name) for name in ("cpu", "reference"))
    assert torch.allclose(out, expected, atol=1e-5)
