"""Under torch's other machinery: opcheck, compile, autocast, checkpointing, second derivatives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from budget import BACKENDS, Case, Problem, build, operator_arguments, prepared, skip_unless_it_takes
from diff_transformer import diff_attention
from diff_transformer.ops import flex
from diff_transformer.ops.attention_request import constant_when_compiled
from full_run import short_run

OPERATORS = {
    "blockwise": ("diff_transformer::blockwise", "diff_transformer::blockwise_backward"),
    "cpu": ("diff_transformer_cpu::forward", "diff_transformer_cpu::backward"),
}

CASES = {
    "causal": Case(is_causal=True, queries=7),
    "grouped, masked, windowed": Case(
        heads=4, mask="bool (B, 1, 1, S)", is_causal=True, window=4, lam="full", layout="projection"
    ),
    "documents": Case(batch=1, heads=4, ratio=2, documents=(3, 0, 6), is_causal=True, lam="full", layout="projection"),
    "shared keys, additive mask, blind queries": Case(
        key_maps=1, mask="add -inf (B, 1, N, S)", queries=11, lam="per head", is_causal=True, dv=4, layout="cache"
    ),
}


# What is left open between calls is for the operators to say; test_sdpa.py has lengths that change under "sdpa".
# Triton's interpreter takes long for every compilation, which is left to `make test-all`.


def test_the_mark_of_a_constant_is_torchs() -> None:
    def ours() -> None: ...

    def torchs() -> None: ...

    assert vars(constant_when_compiled(ours)) == vars(torch.compiler.assume_constant_result(torchs)) != {}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    skip_unless_it_takes(request.param, torch.float32)
    return request.param


# The registered operators.


def test_every_registered_operator_is_checked_below() -> None:
    """Or with Triton, FlashAttention, eight bits; without tensors, or answering nobody who traces, unchecked."""
    checked = {name for pair in OPERATORS.values() for name in pair}
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("diff_transformer")}
    untraced = ("bfloat16_products", "decode_fast_path", "use")
    untraced += ("appended", "known_lambda", "multiplied_int8", "normed", "rotated")  # by `token_step` alone
    names -= {f"diff_transformer_cpu::{name}" for name in untraced}
    elsewhere = ("::triton_", "::flash", "::int8_product")
    assert {name for name in names if not any(part in name for part in elsewhere)} == checked


def operator(name: str) -> Any:
    namespace, _, name = name.partition("::")
    return getattr(getattr(torch.ops, namespace), name)


# opcheck compiles an operator for some seconds, in any dtype alike.
CHECKED = [
    pytest.param(case, dtype, marks=() if case in in_short_run else pytest.mark.all)
    for dtype, in_short_run in (
        (torch.float32, ("grouped, masked, windowed",)),
        (torch.bfloat16, ("shared keys, additive mask, blind queries",)),
    )
    for case in CASES
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.14's own check
@pytest.mark.parametrize("backend", OPERATORS)
@pytest.mark.parametrize(("case", "dtype"), CHECKED, ids=str)
def test_opcheck(backend: str, case: str, dtype: torch.dtype) -> None:
    skip_unless_it_takes(backend, torch.float32)
    forward, backward = map(operator, OPERATORS[backend])
    q, k, v, lam, *others = arguments = operator_arguments(replace(CASES[case], dtype=dtype))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, lam)]
    differentiable = (True,) if backend == "cpu" else ()
    torch.library.opcheck(forward, (*leaves, *others, *differentiable))
    signal_weight = torch.ones_like(lam).requires_grad_()
    torch.library.opcheck(forward, (*leaves, *others, *differentiable, signal_weight))
    *tensors, is_causal, scale, window, documents = arguments
    saved = forward(*arguments, True)[1:] if backend == "cpu" else ()
    grad_out = build(replace(CASES[case], dtype=dtype)).dout
    inputs = (grad_out, *tensors, *saved, is_causal, scale, window, documents)
    torch.library.opcheck(backward, (*inputs, *(torch.zeros_like(x) for x in saved), torch.ones_like(lam)))


# torch.compile.


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(
    ("backend", "case"),
    [
        pytest.param(
            backend,
            case,
            marks=pytest.mark.all
            if backend not in ("cpu", "reference") or (backend != "cpu" and case != "grouped, masked, windowed")
            else (),
        )
        for backend in (*BACKENDS, "auto")
        for case in CASES
    ],
    indirect=["backend"],
)
def test_compiled_in_one_graph(backend: str, case: str) -> None:
    problem, expected = prepared(CASES[case])
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    expected.check(problem.solve(compiled, backend=backend))


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("backend", short_run(BACKENDS, ["cpu"]), indirect=True)
def test_compiled_for_changing_lengths(backend: str) -> None:
    """The second length makes torch compile once more, with the length left open; the third has to fit that."""
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    for length in (9, 12, 17):
        problem, expected = prepared(Case(queries=length, keys=length, is_causal=True, dv=4))
        expected.check(problem.solve(compiled, backend=backend))


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.all)])
@pytest.mark.parametrize("backend", short_run(BACKENDS, ["cpu"]), indirect=True)
def test_compiled_for_changing_documents(backend: str, dynamic: bool | None) -> None:
    """Other borders, then another number of them, then another length."""
    compiled = torch.compile(diff_attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for documents in ((4, 5), (2, 7), (1, 2, 6), (3, 1, 0, 4, 1), (9,), (5, 7), (17,)):
        n = sum(documents)
        problem, expected = prepared(Case(batch=1, queries=n, keys=n, documents=documents, is_causal=True, dv=4))
        expected.check(problem.solve(compiled, backend=backend))


@pytest.mark.usefixtures("cold")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
@pytest.mark.parametrize("backend", short_run(["blockwise", "cpu", "reference", "sdpa"], ["cpu"]), indirect=True)
def test_compiled_to_machine_code(backend: str) -> None:
    problem, expected = prepared(CASES["causal"])
    compiled = torch.compile(diff_attention, fullgraph=True)
    expected.check(problem.solve(compiled, backend=backend))


# Autocast and checkpointing.


def under_autocast(problem: Problem, backend: str) -> dict[str, Tensor]:
    """The problem posed in float32 and solved under bfloat16 autocast; gradients arrive in float32."""
    wide = {name: getattr(problem, name).float() for name in ("q", "k", "v")}

    def attend(*tensors: Tensor, **options: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return diff_attention(*tensors, **options)

    answer = replace(problem, **wide).solve(attend, backend=backend)
    assert all(answer[name].dtype == torch.float32 for name in ("q", "k", "v", "lam"))
    return answer


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"], indirect=True)
def test_autocast(backend: str, case: str) -> None:
    skip_unless_it_takes(backend, torch.bfloat16)
    problem, expected = prepared(replace(CASES[case], dtype=torch.bfloat16))
    if case == "shared keys, additive mask, blind queries":  # a mask made outside autocast stays float32
        problem = replace(problem, options={**problem.options, "attn_mask": problem.options["attn_mask"].float()})
    answer = under_autocast(problem, backend)
    expected.check(answer)
    # Autocast chooses the dtype of what goes in and nothing else: inside, the softmax stays in float32.
    torch.testing.assert_close(
        answer, problem.solve(diff_attention, backend=backend), rtol=0, atol=0, check_dtype=False
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"], indirect=True)
def test_checkpointing_changes_nothing(backend: str, case: str) -> None:
    problem = build(CASES[case])

    def checkpointed(*tensors: Tensor, **options: Any) -> Tensor:
        return checkpoint(diff_attention, *tensors, use_reentrant=False, **options)

    plain, again = (problem.solve(attend, backend=backend) for attend in (diff_attention, checkpointed))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


# Second derivatives.


@pytest.mark.parametrize("backend", [*OPERATORS, "triton"], indirect=True)
def test_second_derivatives_are_refused(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in operator_arguments(CASES["causal"])[:3])
    out = diff_attention(q, k, v, 0.5, backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), [q], create_graph=True)
    with pytest.raises(RuntimeError, match=rf"'{backend}' cannot be differentiated twice.*'reference'"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
@pytest.mark.parametrize("backend", [*OPERATORS, "triton"], indirect=True)
def test_forward_mode_is_refused_or_done(backend: str) -> None:
    """A registered operator would drop the derivatives without a word."""
    q, k, v, *_ = operator_arguments(CASES["causal"])
    tangent = torch.ones_like(q)

    def derivative(name: str) -> Tensor:
        return torch.func.jvp(lambda x: diff_attention(x, k, v, 0.5, backend=name), (q,), (tangent,))[1]

    with pytest.raises(ValueError, match=rf"'{backend}' cannot run.*forward mode.*'reference'"):
        derivative(backend)
    assert derivative("auto").norm() > 0
    torch.testing.assert_close(derivative("auto"), derivative("reference"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own
def test_a_graph_in_forward_mode_keeps_derivatives() -> None:
    q, k, v, *_ = operator_arguments(CASES["causal"])
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    compiled(q, k, v, 0.5)  # a graph of its own
    with forward_ad.dual_level():
        try:
            out = compiled(forward_ad.make_dual(q, q), k, v, 0.5)
        except torch._dynamo.exc.Unsupported:  # torch as of 2.14, which drops no tangent either
            return
        outs = out, diff_attention(forward_ad.make_dual(q, q), k, v, 0.5)
        tangent, expected = (forward_ad.unpack_dual(out).tangent for out in outs)
        torch.testing.assert_close(tangent, expected)


def test_reference_has_second_derivatives() -> None:
    problem = build(
        Case(batch=1, heads=2, key_heads=1, queries=2, keys=3, d=2, dv=2, is_causal=True, dtype=torch.float64)
    )
    inputs = tuple(getattr(problem, name).requires_grad_() for name in ("q", "k", "v", "lam"))

    def call(*tensors: Tensor) -> Tensor:
        return diff_attention(*tensors, is_causal=True, backend="reference")

    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize("backend", short_run([*BACKENDS, "flex"], ["cpu"]))
def test_numbers_may_change_between_calls(backend: str) -> None:
    """λ, scale and window as plain numbers: from the second value on, torch.compile leaves them open."""
    if backend == "flex" and not flex._cpu_has_vectors():
        pytest.skip("torch compiles FlexAttention for the CPU with AVX2")
    skip_unless_it_takes(backend, torch.float32)
    torch._dynamo.reset()
    q, k, v = torch.randn(1, 2, 2, 9, 4), torch.randn(1, 2, 2, 9, 4), torch.randn(1, 2, 9, 8)
    compiled = torch.compile(diff_attention, fullgraph=True, backend="aot_eager")
    for lam, scale, window in [(0.5, 0.5, 3), (0.7, 0.3, 4), (1.25, 0.9, 5)]:
        settings = {"is_causal": True, "scale": scale, "window": window, "backend": backend}
        expected = diff_attention(q, k, v, lam, **{**settings, "backend": "reference"})
        torch.testing.assert_close(compiled(q, k, v, lam, **settings), expected)
