"""Which backend answers: seen from the operators that torch runs, so that no comparison is of a thing with itself."""

import textwrap
from typing import Any

import pytest
import torch

import fresh
from budget import Case, Problem, build, expect
from counted_operators import Operators
from diff_transformer import diff_attention, diff_attention_maps
from diff_transformer.ops import backends
from diff_transformer.ops.cpu.cpu_build import is_faster


def operators(problem: Problem, **options: Any) -> Operators:
    """The operators of one forward and backward pass; its answer is held to the budget too."""
    with Operators() as seen:
        answer = problem.solve(diff_attention, **options)
    expect(problem).check(answer)
    return seen


REQUESTS = {
    "plain": Case(is_causal=True),
    "dv = d": Case(is_causal=True, dv=4),
    "masked": Case(mask="bool (B, 1, 1, S)", is_causal=True, window=3),
    "decoding": Case(queries=1, is_causal=True, key_heads=1),
    "shared keys": Case(key_maps=1, dtype=torch.float64),
    "half": Case(is_causal=True, dtype=torch.bfloat16),
    "documents": Case(batch=1, documents=(4, 5), is_causal=True),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_the_backend_that_was_named_runs_alone(request_: str) -> None:
    problem = build(REQUESTS[request_])

    reference = operators(problem, backend="reference")
    assert reference.named("diff_transformer::") == 0
    assert reference.named("scaled_dot_product") == 0
    assert reference.named("aten::_softmax") == 2  # once forward, once backward

    blockwise = operators(problem, backend="blockwise")
    assert blockwise.count["diff_transformer::blockwise"] == 1
    assert blockwise.count["diff_transformer::blockwise_backward"] == 1
    assert blockwise.named("scaled_dot_product") == 0
    assert blockwise.named("softmax") == 0  # all of it is inside the operator

    sdpa = operators(problem, backend="sdpa")
    assert sdpa.named("diff_transformer::") == 0
    assert sdpa.named("aten::_scaled_dot_product") >= 2 or sdpa.named("aten::_safe_softmax") >= 2

    if problem.q.dtype != torch.float64:
        cpu = operators(problem, backend="cpu")
        assert cpu.count["diff_transformer_cpu::forward"] == 1
        assert cpu.count["diff_transformer_cpu::backward"] == 1
        assert cpu.named("diff_transformer::") == 0
        assert cpu.named("scaled_dot_product") == 0
        assert cpu.named("softmax") == 0


@pytest.mark.parametrize("request_", REQUESTS)
def test_auto_on_the_cpu_is_the_fused_kernel_where_it_takes_the_dtype(request_: str) -> None:
    seen = operators(build(REQUESTS[request_]))
    fused = REQUESTS[request_].dtype != torch.float64 and is_faster()  # not on x86 without vectors
    assert seen.count["diff_transformer_cpu::forward"] == fused
    assert seen.count["diff_transformer::blockwise"] == (not fused)
    assert seen.named("scaled_dot_product") == 0


def test_auto_with_a_learned_mask_is_a_backend_that_has_its_gradient() -> None:
    problem = build(Case(mask="add (H, N, S)"))
    mask = problem.options["attn_mask"].requires_grad_()
    with Operators() as seen:
        diff_attention(problem.q, problem.k, problem.v, problem.lam, attn_mask=mask).sum().backward()
    assert seen.named("diff_transformer") == 0
    assert mask.grad is not None


def test_names() -> None:
    here = ("reference", "blockwise", "sdpa", "cpu")  # on every CPU with a compiler
    for dtype in (torch.float32, torch.bfloat16):
        reasons = backends.explain(dtype=dtype)
        assert tuple(reasons) == backends.BACKENDS
        assert [reasons[name] for name in here] == [None] * 4
    reasons = backends.explain(dtype=torch.float64)
    assert "torch.float64" in str(reasons["cpu"])
    assert "torch.float64" in str(reasons["flex"])
    assert [reasons[name] for name in here[:3]] == [None] * 3


def test_the_operator_needs_neither_triton_nor_transformers() -> None:
    """Every backend that says so answers without them; torch would compile "flex" for half a minute."""
    program = """
        import sys
        for name in ("triton", "transformers", "accelerate", "datasets"):
            sys.modules[name] = None
        import torch
        from diff_transformer.ops import backends, diff_attention
        q, k, v = torch.randn(1, 2, 2, 5, 4), torch.randn(1, 2, 2, 5, 4), torch.randn(1, 2, 5, 8)
        first = diff_attention(q, k, v, 0.5, is_causal=True, backend="reference")
        for backend in [name for name, reason in backends.explain().items() if reason is None and name != "flex"]:
            torch.testing.assert_close(diff_attention(q, k, v, 0.5, is_causal=True, backend=backend), first)
            print(backend)
    """
    done = fresh.run(textwrap.dedent(program), warnings_are_errors=True)
    assert {"reference", "blockwise", "sdpa", "cpu"} <= set(done.stdout.split()), done.stderr


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_loads_the_kernel_while_it_traces(dynamic: bool) -> None:
    """Also where it begins anew after that: with lengths left open it does where a number is made of one."""
    program = """
        import sys, torch
        from diff_transformer.ops import diff_attention
        def call(q, v, backend="auto"):
            lam = q.shape[3] * 0.01 if "True" in sys.argv else 0.05
            return diff_attention(q, q, v, lam, is_causal=True, backend=backend).sum()
        q, v = torch.randn(1, 2, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 5, 8)
        compiled = torch.compile(call, fullgraph=True, dynamic="True" in sys.argv, backend="aot_eager")(q, v)
        print(hasattr(torch.ops.diff_transformer_cpu, "forward"))
        torch.testing.assert_close(compiled, call(q, v, "reference"))
        compiled.backward()
        print(q.grad.isfinite().all().item())
    """
    done = fresh.run(textwrap.dedent(program), dynamic, warnings_are_errors=True)
    assert done.stdout.split() == [str(is_faster()), "True"], done.stderr


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise", "sdpa"])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32], ids=str)
def test_shapes_alone(backend: str, mask: torch.dtype | None) -> None:
    """The meta device, which has no values, and no autocast."""
    torch.manual_seed(0)
    with torch.device("meta"):
        q, k, v = torch.randn(2, 4, 2, 5, 6), torch.randn(2, 2, 2, 7, 6), torch.randn(2, 2, 7, 12)
        options: dict[str, Any] = {"is_causal": True, "norm_weight": torch.ones(12), "backend": backend}
        attn_mask = None if mask is None else torch.ones(5, 7, dtype=mask)
    for lam in (0.5, torch.tensor(0.5), torch.empty(4, 1, device="meta")):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = diff_attention(*leaves, lam, attn_mask=attn_mask, **options)
        assert (out.shape, out.device.type) == ((2, 4, 5, 12), "meta")
        assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]
    maps = diff_attention_maps(q, k, 0.5, attn_mask=attn_mask)
    assert {(a.shape, a.device.type) for a in maps} == {((2, 4, 5, 7), "meta")}
