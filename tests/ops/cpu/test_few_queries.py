"""The one step in which the CPU kernel answers the few queries of decoding, and what it leaves to the usual way."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from budget import Case, Problem, forward, prepared
from diff_transformer import diff_attention
from diff_transformer.ops import operator, rms_norm
from diff_transformer.ops.cpu import cpu_backend
from diff_transformer.ops.cpu.cpu_backend import decode_fast_path, reason_against_cpu_kernel

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler, so no kernel"),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = {
    "one query": Case(queries=1, keys=70, is_causal=True),
    "three queries, grouped": Case(heads=6, key_heads=2, queries=1, keys=40, is_causal=True, lam="full"),
    "a chunk": Case(heads=2, key_heads=2, queries=4, keys=300, d=16, dv=32, is_causal=True, layout="projection"),
    "shared keys": Case(heads=4, key_heads=2, key_maps=1, queries=2, keys=33, is_causal=True, lam="per token"),
    "window": Case(queries=2, keys=90, window=17, is_causal=True, lam="per head"),
    "mask": Case(queries=2, keys=50, mask="bool (B, 1, 1, S)", is_causal=True),
    "mask of fewer axes": Case(queries=2, keys=50, mask="bool (N, S)"),
    "additive mask": Case(queries=2, keys=50, mask="add -inf (B, 1, N, S)", scale=0.3),
    "two signal heads to a noise map": Case(
        heads=4, key_heads=1, ratio=2, queries=1, keys=40, mask="bool (B, 1, 1, S)"
    ),
    "three signal heads, several parts": Case(
        batch=1, heads=3, key_heads=1, ratio=3, queries=1, keys=700, is_causal=True, lam="full"
    ),
    "several parts": Case(batch=1, heads=1, key_heads=1, queries=1, keys=1500, dv=20, is_causal=True),
}


def request(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    arguments = {
        "q": torch.randn(1, 2, 2, 1, 8),
        "k": torch.randn(1, 2, 2, 5, 8),
        "v": torch.randn(1, 2, 5, 16),
        "lam": torch.tensor(0.5),
        "is_causal": True,
    }
    return arguments | changes


@pytest.fixture(autouse=True)
def _loaded() -> None:
    assert reason_against_cpu_kernel() is None
    assert "cpu" in cpu_backend._loaded


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """What the one step has answered to each call of the operator."""
    given: list[Tensor | None] = []

    def recorded(*arguments: Any) -> Tensor | None:
        given.append(decode_fast_path(*arguments))
        return given[-1]

    monkeypatch.setattr(operator, "decode_fast_path", recorded)
    return given


def tensor_lam(problem: Problem) -> Tensor:
    return torch.as_tensor(problem.lam, dtype=torch.float32)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_norm(name: str, dtype: torch.dtype, weight_dtype: torch.dtype, answers: list[Tensor | None]) -> None:
    """As the norm of the same heads before they are rounded to their dtype; and these heads, in float32."""
    problem, expected = prepared(replace(CASES[name], dtype=torch.float32))
    q, k, v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
    weight = torch.linspace(0.5, 1.5, v.shape[-1]).to(weight_dtype)
    settings: dict[str, Any] = {**problem.options, "backend": "cpu"}
    with torch.no_grad():
        out = diff_attention(
            q, k, v, tensor_lam(problem), **settings, norm_weight=weight, norm_eps=1e-3, norm_scale=0.7
        )
        heads = diff_attention(q.float(), k.float(), v.float(), tensor_lam(problem), **settings)
    assert answers[0] is out
    assert answers[1] is heads
    assert out.dtype == dtype
    expected.check_output(forward(problem, "cpu"))
    assert answers[-1] is not None
    due = rms_norm(heads.double(), weight.double(), 1e-3) * 0.7
    allowed = torch.finfo(dtype).eps * due.abs() + 1e-5
    assert torch.all((out.double() - due).abs() <= allowed)


def named(value: Any) -> str:
    """The name of a parameter, the same in every process."""
    return ", ".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lam": 0.5},
        {"lam": torch.tensor(0.5, dtype=torch.bfloat16)},
        {"scale": 1},
        {"backend": "reference"},
        {"cu_seqlens": torch.tensor([0, 5]), "q": torch.randn(1, 2, 2, 5, 8)},
        {"q": torch.randn(1, 2, 2, 40, 8)},
        {"q": torch.randn(1, 2, 3, 1, 8), "attn_mask": torch.rand(4, 1, 5) < 0.7},
        {name: x.double() for name, x in request().items() if name in ("q", "k", "v")},
    ],
    ids=named,
)
def test_other_requests_take_the_usual_way(changes: dict[str, Any], answers: list[Tensor | None]) -> None:
    arguments = request(**changes)
    with torch.no_grad():
        out = diff_attention(**arguments)
        due = diff_attention(**{**arguments, "backend": "reference"})
    assert not any(answer is not None for answer in answers)
    torch.testing.assert_close(out, due)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
def test_gradients_transformations_and_traces_take_the_usual_way(answers: list[Tensor | None]) -> None:
    """Whatever follows what the operator computes, rather than its values."""
    arguments = request()
    q = arguments.pop("q")
    plain = diff_attention(q, **arguments)  # gradients are enabled, though nothing needs one
    assert answers == [None]
    with torch.no_grad():
        mapped = torch.vmap(lambda x: diff_attention(x, **arguments))(q.unsqueeze(0))[0]
        _, tangent = torch.func.jvp(lambda x: diff_attention(x, **arguments), (q,), (torch.ones_like(q),))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert diff_attention(q, **arguments).dtype == torch.bfloat16
        with FlopCounterMode(display=False):
            counted = diff_attention(q, **arguments)
        traced = torch.jit.trace(lambda x: diff_attention(x, **arguments), (q,), check_trace=False)
        graph = make_fx(lambda x: diff_attention(x, **arguments))(q)
    assert answers == [None] * len(answers)
    assert tangent.abs().sum() > 0
    for out in (mapped, counted, graph(q), traced(q)):
        torch.testing.assert_close(out, plain)
