"""The oracle against numbers worked out by hand, against finite differences, and against automatic differentiation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from budget import DTYPES, Case, build, expect, prepared, solve_by_oracle


def test_equation_1_by_hand() -> None:
    # Two keys, scale 1. Map 1's logits are (ln 3, 0): weights 3/4, 1/4; map 2's are (0, ln 4): weights 1/5, 4/5.
    q = np.array([1.0, 1.0]).reshape(1, 1, 2, 1, 1)
    k = np.array([[math.log(3), 0.0], [0.0, math.log(4)]]).reshape(1, 1, 2, 2, 1)
    v = np.array([[10.0], [100.0]]).reshape(1, 1, 2, 1)
    forward = oracle.attention(q, k, v, 0.5)
    assert forward.difference.ravel() == pytest.approx([3 / 4 - 1 / 10, 1 / 4 - 4 / 10])
    assert forward.out.item() == pytest.approx(10 * (3 / 4 - 1 / 10) + 100 * (1 / 4 - 4 / 10))
    # dP = dO·V = (10, 100); dλ = −Σ P2·dP
    gradients = oracle.gradients(q, k, v, 0.5, np.ones((1, 1, 1, 1)), forward)
    assert gradients["lam"] == pytest.approx(-(10 / 5 + 100 * 4 / 5))
    assert gradients["v"].ravel() == pytest.approx([3 / 4 - 1 / 10, 1 / 4 - 4 / 10])


def test_what_a_query_sees_by_hand() -> None:
    def seen(n: int, s: int, is_causal: bool, window: int | None) -> list[str]:
        return [
            "".join("x" if oracle.position_sees(i, j, n, s, is_causal, window) else "." for j in range(s))
            for i in range(n)
        ]

    assert seen(3, 3, True, None) == ["x..", "xx.", "xxx"]
    assert seen(2, 4, True, None) == ["xxx.", "xxxx"]
    assert seen(4, 2, True, None) == ["..", "..", "x.", "xx"]
    assert seen(3, 3, True, 1) == ["x..", ".x.", "..x"]
    assert seen(2, 4, True, 2) == [".xx.", "..xx"]
    assert seen(3, 3, False, 2) == ["xxx", "xxx", ".xx"]


@pytest.mark.parametrize("name", ["q", "k", "v", "lam"])
@pytest.mark.parametrize(
    "case",
    [
        Case(batch=1, heads=2, key_heads=1, queries=3, keys=4, d=2, dv=3, lam="full", mask="bool (B, H, N, S)"),
        Case(batch=2, heads=2, key_maps=1, queries=4, keys=3, d=2, dv=1, lam="per head", is_causal=True),
    ],
    ids=["grouped and masked", "shared keys and causal"],
)
def test_gradients_are_those_of_finite_differences(case: Case, name: str) -> None:
    problem = build(replace(case, dtype=torch.float64))
    gradient = solve_by_oracle(problem)[0][name]
    inputs = getattr(problem, name)
    for index in np.ndindex(*inputs.shape):
        ends = []
        for step in (-1e-5, 1e-5):
            moved = inputs.clone()
            moved[index] += step
            out = solve_by_oracle(replace(problem, **{name: moved}))[0]["out"]
            ends.append(float((out * problem.dout.numpy()).sum()))
        assert (ends[1] - ends[0]) / 2e-5 == pytest.approx(gradient[index], rel=1e-6, abs=1e-8)


# The budget.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_plain_formula_in_float64_is_the_oracle(dtype: torch.dtype) -> None:
    """Otherwise twice its error would be a licence for anything. In lower dtypes its error is of the dtype's size."""
    case = Case(
        heads=4, queries=7, keys=9, is_causal=True, window=5, mask="add -inf (B, 1, N, S)", lam="full", dtype=dtype
    )
    problem, expected = prepared(case)
    for name, error in expected.plain_errors.items():
        assert error <= 32 * torch.finfo(dtype).eps * np.abs(expected.values[name]).max(), name
    expected.check({name: torch.from_numpy(value) for name, value in expected.values.items()})
    assert set(expected.values) == {"out", "q", "k", "v", "lam"}
    assert problem.q.dtype == dtype


MUTATIONS = {
    "sign of the second map": oracle.Rules(second_map=1.0),
    "maps swapped": oracle.Rules(swap_maps=True),
    "pairing under grouped queries": oracle.Rules(grouped_key=oracle.key_of_the_flattened_heads),
    "causal, one key too many": oracle.Rules(causal_shift=1),
    "causal, one key too few": oracle.Rules(causal_shift=-1),
    "window, one key too many": oracle.Rules(window_shift=1),
    "window, one key too few": oracle.Rules(window_shift=-1),
    "sign of λ's gradient": oracle.Rules(lambda_gradient=1.0),
    "documents that end a key early": oracle.Rules(document_shift=1),
    "documents that end a key late": oracle.Rules(document_shift=-1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_budget_catches(mutation: str, dtype: torch.dtype) -> None:
    case = Case(heads=4, queries=7, keys=9, is_causal=True, window=4, lam="full", dtype=dtype)
    if mutation.startswith("documents"):
        case = replace(case, batch=1, queries=9, documents=(4, 5))
    problem = build(case)
    expected = expect(problem)
    wrong, _ = solve_by_oracle(problem, MUTATIONS[mutation])
    ratios = expected.ratios({name: torch.from_numpy(value).to(dtype) for name, value in wrong.items()})
    affected = {"lam"} if mutation == "sign of λ's gradient" else set(ratios)
    if mutation == "sign of the second map":
        affected = {"out", "q", "k", "v"}  # dλ = −Σ P2 ⊙ dP whatever the sign in front of λ
    for name in affected:
        assert ratios[name] > 1, f"{name} passes: {ratios}"


def test_the_budget_wants_exact_zeros_and_no_nan() -> None:
    _, expected = prepared(Case(queries=5, keys=3, is_causal=True))  # queries 0 and 1 see nothing
    right = {name: torch.from_numpy(value).float() for name, value in expected.values.items()}
    expected.check(right)
    assert not right["out"][:, :, :2].any()
    for name, index in (("out", (0, 0, 1, 0)), ("q", (0, 0, 0, 1, 0))):
        for wrong in (1e-30, float("nan")):
            answer = {**right, name: right[name].clone()}
            answer[name][index] = wrong
            with pytest.raises(AssertionError, match="over budget"):
                expected.check(answer)
