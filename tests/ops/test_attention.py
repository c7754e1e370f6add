"""diff_attention: outputs and every gradient of every backend against the float64 oracle, by error budget."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from budget import (
    DTYPES,
    Case,
    Problem,
    build,
    dtypes_of,
    expect,
    prepared,
    skip_unless_it_takes,
    solve_by_oracle,
    solve_plainly,
)
from cases import CASES, REPRESENTATIVE, case
from diff_transformer import diff_attention, diff_attention_maps
from diff_transformer.ops import blockwise, sdpa

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BACKENDS = (
    "reference",
    "blockwise",
    "blockwise, 3 rows a block",
    "sdpa, whole values",
    "sdpa, values in pieces",
    "cpu",
    "triton",
)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each backend; blockwise also in blocks so small that tiny inputs have several, and with few heads at a time."""
    name, _, variant = request.param.partition(", ")
    skip_unless_it_takes(name, request.node.callspec.params.get("dtype", torch.float32))
    if variant == "3 rows a block":
        for constant, value in {"MIN_ROWS": 3, "MAX_ROWS": 3, "CORE_SCORES": 162}.items():
            monkeypatch.setattr(blockwise, constant, value)
    elif name == "sdpa":
        plan = partial(sdpa.SdpaPlan, variant == "whole values")
        monkeypatch.setattr(sdpa, "sdpa_plan", lambda *fields: plan(repeat_keys=sdpa.SdpaCase(*fields).heads > 1))
    return name


def is_short(backend: str, name: str, dtype: torch.dtype) -> bool:
    """Whether `make test` runs a case, too: all in float32, some in the oracle's float64 and in bfloat16.

    float16 goes the way of bfloat16, but in the kernel for the CPU and in "sdpa", whose gradients in float16 have tests
    of their own. Triton's interpreter takes four fifths of the time of all backends. It runs every other of the short
    sequences in float32; tests/ops/triton has more, in blocks that are as small.
    """
    if backend == "triton":
        is_long = max(case(name).queries, case(name).keys) > 50
        return name in REPRESENTATIVE[::2] and dtype == torch.float32 and not is_long
    if dtype == torch.float32:
        return True
    return name in REPRESENTATIVE and (dtype != torch.float16 or backend == "cpu")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("backend", "name", "dtype"),
    [
        pytest.param(backend, name, dtype, marks=() if is_short(backend, name, dtype) else pytest.mark.all)
        for backend in BACKENDS
        for name in CASES
        for dtype in dtypes_of(backend.partition(", ")[0])
    ],
    indirect=["backend"],
    ids=str,
)
def test_output_and_gradients(backend: str, name: str, dtype: torch.dtype) -> None:
    problem, expected = prepared(case(name, dtype))
    expected.check(problem.solve(diff_attention, backend=backend))


def test_lambda_in_the_inputs_dtype(backend: str) -> None:
    """DIFF V2 under bfloat16 makes its λ in bfloat16."""
    skip_unless_it_takes(backend, torch.bfloat16)
    problem = build(case("λ full", torch.bfloat16))
    assert isinstance(problem.lam, Tensor)
    problem = replace(problem, lam=problem.lam.bfloat16())
    answer = problem.solve(diff_attention, backend=backend)
    assert answer["lam"].dtype == torch.bfloat16
    expect(problem).check(answer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_additive_mask_in_float32_for_half_precision(backend: str, dtype: torch.dtype) -> None:
    problem = build(case("mask add (B, H, N, S)", dtype))
    mask = problem.options["attn_mask"].float() + 0.001
    problem = replace(problem, options={**problem.options, "attn_mask": mask})
    expect(problem).check(problem.solve(diff_attention, backend=backend))


@pytest.mark.parametrize("name", ["q", "k", "v", "lam"])
def test_each_gradient_alone(backend: str, name: str) -> None:
    """A frozen projection asks for some of the gradients only."""
    problem, expected = prepared(case("grouped, causal, decoding"))
    inputs = {name: getattr(problem, name).detach() for name in ("q", "k", "v", "lam")}
    inputs[name].requires_grad_()
    out = diff_attention(*inputs.values(), **problem.options, backend=backend)
    (gradient,) = torch.autograd.grad(out, [inputs[name]], problem.dout)
    error = np.abs(gradient.double().numpy() - expected.values[name])
    assert np.all(error <= expected.limits[name])


def test_inputs_are_left_alone(backend: str) -> None:
    problem = build(case("additive mask, causal, window, grouped, cache"))
    tensors = [problem.q, problem.k, problem.v, problem.lam, problem.dout, problem.options["attn_mask"]]
    copies = [x.clone() for x in tensors]
    problem.solve(diff_attention, backend=backend)
    torch.testing.assert_close(tensors, copies, rtol=0, atol=0)


def test_where_all_is_hidden_all_is_0(backend: str) -> None:
    problem = replace(build(case("causal")), options={"attn_mask": torch.zeros(9, 9, dtype=torch.bool)})
    for name, x in problem.solve(diff_attention, backend=backend).items():
        assert not x.any(), name


@pytest.mark.parametrize("mask_dtype", ["the inputs'", "float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_row_of_the_smallest_number_is_a_mean(backend: str, dtype: torch.dtype, mask_dtype: str) -> None:
    """transformers' eager masks hide with finfo.min, and a padding row is full of it; under autocast, of float32's.

    A mask that somebody makes of numpy's numbers is float64, whose smallest number float32 does not have.
    Such a number is finite: by Equation 1 the logits vanish beside it, and the query attends to all alike.
    """
    problem = build(case("causal", dtype))
    mask = torch.zeros(2, 1, 9, 9, dtype=dtype if mask_dtype == "the inputs'" else getattr(torch, mask_dtype))
    mask[1, :, :, :4] = torch.finfo(mask.dtype).min
    mask[1, :, 2, :] = torch.finfo(mask.dtype).min
    answer = replace(problem, options={"attn_mask": mask, "is_causal": True}).solve(diff_attention, backend=backend)
    for name, x in answer.items():
        assert x.isfinite().all(), name
    if torch.float16 not in (dtype, mask.dtype):  # a logit is not negligible beside float16's −65,504
        values = problem.v[1, :, :3].double()
        mean = (1 - float(problem.lam)) * values.mean(1)
        limit = 4 * torch.finfo(dtype).eps * (1 + float(problem.lam)) * values.abs().amax()
        assert (answer["out"][1, :, 2].double() - mean).abs().max() <= limit


def test_gradients_beside_large_addends_are_those_of_a_mean(backend: str) -> None:
    """exp(score − log-sum), as torch's kernels recompute the weights, would be 1 for each of the five keys."""
    q, k, v = (torch.randn(1, 1, *sizes, requires_grad=True) for sizes in ((2, 3, 4), (2, 5, 4), (5, 4)))
    options = {"attn_mask": torch.full((3, 5), torch.finfo(torch.float32).min), "backend": backend}
    (of_values,) = torch.autograd.grad(diff_attention(q, k, v, 0.5, **options).sum(), v)
    torch.testing.assert_close(of_values, torch.full_like(v, 3 * (1 - 0.5) / 5))
    (of_queries,) = torch.autograd.grad(diff_attention(q, k, v, 0.5, **options, return_lse=True)[1].sum(), q)
    torch.testing.assert_close(of_queries[:, :, 0], k[:, :, 0].mean(2, keepdim=True).expand(-1, -1, 3, -1) / 2)


def test_few_queries_take_the_smallest_number_of_float64_for_a_finite_one(backend: str) -> None:
    """Decoding has a path of its own, without gradients."""
    problem, lam = build(case("causal")), torch.tensor(0.5)
    mask = torch.full((1, 1, 1, problem.k.shape[3]), torch.finfo(torch.float64).min, dtype=torch.float64)
    mask[..., 0] = -math.inf
    with torch.no_grad():
        out = diff_attention(problem.q[:, :, :, -1:], problem.k, problem.v, lam, attn_mask=mask, backend=backend)
    mean = 0.5 * problem.v[:, :, 1:].mean(2, keepdim=True)
    torch.testing.assert_close(out, mean.repeat_interleave(out.shape[1] // mean.shape[1], dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_softmax_runs_in_float32_at_least(backend: str, dtype: torch.dtype) -> None:
    """Logits around 128 are off by 1/2 in bfloat16; a backend that holds them so is far outside the rounding band."""
    base = build(replace(Case(gain=1.0, is_causal=True, heads=4, lam="full"), dtype=dtype))
    q, k = base.q.clone(), base.k.clone()
    q[..., 0], k[..., 0] = 16.0, 16.0
    problem = replace(base, q=q, k=k)
    expected = expect(problem)
    by_rounding_alone = replace(expected, limits=expected.bands)
    _, forward = solve_by_oracle(problem)
    assert min(by_rounding_alone.ratios(solve_plainly(problem, forward)).values()) > 1.5
    by_rounding_alone.check(problem.solve(diff_attention, backend=backend))


def test_logits_too_large_for_exp(backend: str) -> None:
    """Logits around ±30,000 that differ by little: only a softmax that subtracts the row's maximum survives."""
    base = build(case("causal"))
    q, k = base.q.clone(), base.k.clone()
    q[..., 0], k[..., 0] = 256.0, 256.0  # the same large amount, exactly representable, in every logit
    for sign in (1, -1):
        problem = replace(base, q=q, k=k * torch.tensor([sign, 1, 1, 1]))
        expect(problem).check(problem.solve(diff_attention, backend=backend))


def test_empty_batch(backend: str) -> None:
    problem = Problem(
        torch.randn(0, 2, 2, 3, 4), torch.randn(0, 2, 2, 3, 4), torch.randn(0, 2, 3, 8), 0.5, torch.randn(0, 2, 3, 8)
    )
    for x in problem.solve(diff_attention, backend=backend).values():
        assert x.numel() == 0


# diff_attention_maps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "grouped, causal, decoding",
        "shared keys, grouped",
        "documents, grouped, mask, window, projection",
        "more queries than keys, causal",
        "mask, causal, window, grouped, shared keys",
        "additive mask, causal, window, grouped, cache",
        "λ float",
        "λ full",
        "scale 0.9",
    ],
)
def test_maps(name: str, dtype: torch.dtype) -> None:
    problem, _ = prepared(case(name, dtype))
    _, forward = solve_by_oracle(problem)
    maps = diff_attention_maps(problem.q, problem.k, problem.lam, **problem.options)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    logit = np.abs(problem.q.double().numpy()).max() * np.abs(problem.k.double().numpy()).max() * problem.q.shape[-1]
    tolerance = torch.finfo(result).eps * (4 + 2 * abs(forward.scale) * logit)
    for attention_map, value in zip(maps, (forward.first, forward.second, forward.difference), strict=True):
        assert attention_map.dtype == result
        assert attention_map.shape == value.shape
        assert np.abs(attention_map.double().numpy() - value).max() <= tolerance
        assert not attention_map.numpy()[~forward.visible].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lambda_is_not_rounded_to_half_precision(backend: str, dtype: torch.dtype) -> None:
    """Where both maps are the same the output is (1 − λ) A V, which is 0 if a λ of 1 + eps / 4 is rounded to 1."""
    torch.manual_seed(0)
    eps = torch.finfo(dtype).eps
    q, k = (torch.randn(1, 2, 1, 7, 4).expand(-1, -1, 2, -1, -1).to(dtype) for _ in range(2))
    v = torch.randn(1, 2, 7, 8).to(dtype)
    out = diff_attention(q, k, v, 1 + eps / 4, backend=backend).float()
    expected = -eps / 4 * diff_attention(q, k, v, 0.0, backend=backend).float()
    assert out.abs().max() > 0
    assert (out - expected).abs().max() <= eps * expected.abs().max()
