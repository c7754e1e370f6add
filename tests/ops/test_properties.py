"""Every backend against the float64 oracle on requests that hypothesis makes up."""

import pytest
import torch
from hypothesis import given, settings

from budget import BACKENDS, Case, build, expect, random_cases, takes
from diff_transformer import diff_attention


@settings(max_examples=100)
@given(random_cases())
def test_every_backend_is_within_budget(case: Case) -> None:
    problem = build(case)
    expected = expect(problem)
    for backend in (name for name in BACKENDS if name != "triton" and takes(name, case.dtype)):
        expected.check(problem.solve(diff_attention, backend=backend))


@pytest.mark.all  # the interpreter takes a second for each example
@pytest.mark.skipif(not takes("triton", torch.float32), reason="triton does not run here on the CPU")
@settings(max_examples=25)
@given(random_cases(dtypes=(torch.float32, torch.float16)))
def test_triton_is_within_budget(case: Case) -> None:
    """And without gradients, which other kernels compute."""
    problem = build(case)
    expected = expect(problem)
    answer = problem.solve(diff_attention, backend="triton")
    expected.check(answer)
    with torch.no_grad():
        out = diff_attention(problem.q, problem.k, problem.v, problem.lam, **problem.options, backend="triton")
    expected.check({**answer, "out": out})
