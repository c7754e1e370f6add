"""What a query may not see cannot change its output, nor a gradient: with NaN and infinity where it may not look."""

import itertools

import pytest
import torch
from torch import Tensor

from budget import BACKENDS, Problem, dtypes_of, forward, prepared, skip_unless_it_takes
from cases import CASES, case
from diff_transformer import diff_attention, diff_attention_maps
from diff_transformer.ops.attention_request import zero_nonfinite_rows
from full_run import short_run
from nonfinite_problems import check_output, check_pair, spoil

# What triton's interpreter has numpy compute of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

HIDING = [
    name
    for name, one in CASES.items()
    if (one.is_causal or one.window or one.documents or one.mask) and one.queries < 100
]
# Triton's interpreter takes seconds for each.
INTERPRETED = (
    "decoding one token, padded",
    "decoding one token, additive mask, window",
    "additive mask, causal, window, grouped, cache",
    "decoding three tokens",
    "causal and mask bool (B, H, N, S)",
    "documents, grouped, mask, window, projection",
)


@pytest.mark.parametrize("tensor", ["keys", "values"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((backend, name) for backend in BACKENDS if backend != "triton" for name in HIDING),
        ("triton", INTERPRETED[0]),
        *(pytest.param("triton", name, marks=pytest.mark.all) for name in INTERPRETED[1:]),
    ],
)
def test_what_is_hidden_changes_nothing(backend: str, name: str, tensor: str) -> None:
    """With gradients and without them, which other kernels may compute."""
    skip_unless_it_takes(backend, torch.float32)
    pair = spoil(prepared(case(name))[0], tensor)
    check_pair(pair, diff_attention, backend)
    check_output(*(forward(x, backend=backend) for x in (pair.spoilt, pair.zeros)), pair.seeing)


@pytest.mark.parametrize(
    ("backend", "dtype", "name"),
    [
        pytest.param(backend, dtype, name, marks=pytest.mark.all if backend == "triton" else ())
        for backend in BACKENDS
        for dtype in dtypes_of(backend)
        for name in ("causal and mask bool (B, 1, 1, S)", "causal and mask add -inf (B, 1, N, S)")
        if dtype != torch.float32
    ],
    ids=str,
)
def test_in_every_dtype(backend: str, dtype: torch.dtype, name: str) -> None:
    skip_unless_it_takes(backend, dtype)
    for tensor in ("keys", "values"):
        check_pair(spoil(prepared(case(name, dtype))[0], tensor), diff_attention, backend)


@pytest.mark.parametrize("backend", short_run(BACKENDS, ["blockwise", "sdpa", "cpu"]))
def test_compiled(backend: str) -> None:
    """Where nothing can be looked at beforehand."""
    skip_unless_it_takes(backend, torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    check_pair(spoil(prepared(case("causal and mask bool (B, 1, 1, S)"))[0], "values"), compiled, backend)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_under_transformations_of_torch() -> None:
    """vmap over the batch, and derivatives in forward mode, which "auto" has the reference compute."""
    problem = prepared(case("causal and mask bool (N, S)"))[0]
    pair = spoil(problem, "values")

    def of_sequence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {**problem.options, "backend": "reference"}
        return diff_attention(q[None], k[None], v[None], problem.lam, **options)[0]

    for x, expected in ((pair.spoilt, pair.zeros), (pair.zeros, pair.zeros)):
        out = torch.func.vmap(of_sequence)(x.q, x.k, x.v)
        usual = forward(expected, backend="reference")
        seeing = pair.seeing if x is pair.spoilt else torch.zeros_like(pair.seeing)
        assert out[seeing].isnan().all()
        torch.testing.assert_close(out[~seeing], usual[~seeing])

        def attend(q: Tensor, x: Problem = x) -> Tensor:
            return diff_attention(q, x.k, x.v, problem.lam, **problem.options)

        _, tangent = torch.func.jvp(attend, (x.q,), (torch.ones_like(x.q),))
        assert tangent.isfinite().all()


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_visible_nan_stays_where_nothing_is_hidden(backend: str, queries: int) -> None:
    """A broken input must show, not be averaged away."""
    skip_unless_it_takes(backend, torch.float32)
    for tensor, differentiable in itertools.product(("queries", "keys", "values"), (False, True)):
        q, k, v = torch.randn(2, 2, 2, queries, 4), torch.randn(2, 2, 2, 9, 4), torch.randn(2, 2, 9, 8)
        {"queries": q[0], "keys": k[0, :, :, 3], "values": v[0, :, 3]}[tensor][..., :] = float("nan")
        out = diff_attention(q.requires_grad_(differentiable), k, v, 0.7, is_causal=queries == 1, backend=backend)
        assert out[0].isnan().all(), tensor
        assert out[1].isfinite().all(), tensor


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("keys", [1, 9])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_are_all_nan_give_no_number(backend: str, keys: int, queries: int) -> None:
    """Torch's own kernels make a 0 of a row whose scores are all NaN."""
    skip_unless_it_takes(backend, torch.float32)
    q, k, v = torch.randn(1, 2, 2, queries, 4), torch.full((1, 2, 2, keys, 4), torch.nan), torch.randn(1, 2, keys, 8)
    assert diff_attention(q, k, v, 0.7, backend=backend).isnan().all()


@pytest.mark.parametrize("name", HIDING)
def test_maps(name: str) -> None:
    """With the gradients that come through them."""
    pair = spoil(prepared(case(name))[0], "keys")
    answers = []
    for x in (pair.zeros, pair.spoilt):
        q, k = x.q.detach().requires_grad_(), x.k.detach().requires_grad_()
        first, second, difference = diff_attention_maps(q, k, x.lam, **x.options)
        loss = (first[~pair.seeing] * second[~pair.seeing].cos()).sum()
        answers.append((first, second, difference, torch.autograd.grad(loss, [q, k])))
    *zeros, gradients = answers[0]
    *spoilt, same = answers[1]
    for before, after in zip(zeros, spoilt, strict=True):
        check_output(after, before, pair.seeing)
    torch.testing.assert_close(gradients, same, rtol=0, atol=0)


def test_finite_rows_are_left_alone() -> None:
    """Not even copied; numbers whose sum overflows are finite."""
    for value in (1.0, 3e38):
        k, v = torch.full((1, 2, 2, 5, 4), value), torch.full((1, 2, 5, 8), value)
        (same_k, same_v), nonfinite = zero_nonfinite_rows(k, v)
        assert torch.equal(same_k, k)
        assert torch.equal(same_v, v)
        assert nonfinite is None or not nonfinite.any()
        assert (same_k is k) == (value == 1.0)
