"""The backward that adds up dQ with atomics, interpreted: its gradients, and where it is taken."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from budget import Case, build, expect, prepared, random_cases
from diff_transformer import diff_attention
from diff_transformer.ops.triton import kernel_arguments, triton_backend
from diff_transformer.ops.triton.kernel_arguments import Blocks
from full_run import in_turn, short_run

pytest.importorskip("triton")
if not triton_backend.interpreted():
    pytest.skip("there is a GPU: the kernels run natively in test_on_gpu.py", allow_module_level=True)

from diff_transformer.ops.triton.launch import Launch
from kernel_launches import names, recorded_launches, set_blocks

# Lengths that no block divides, in three or more blocks of keys, whose parts of dQ have to be added up.
BASE = Case(batch=1, heads=2, key_heads=1, queries=51, keys=51, d=8, dv=16, lam="full", is_causal=True)
CASES = {
    "causal": replace(BASE, batch=2),
    "not causal, d and dv odd": replace(BASE, d=13, dv=27, is_causal=False, layout="projection"),
    "window": replace(BASE, queries=67, keys=67, window=21),
    "window, not causal": replace(BASE, window=30, is_causal=False),
    "35 of 67": replace(BASE, queries=35, keys=67, window=40),
    "67 of 35": replace(BASE, queries=67, keys=35),
    "whole blocks": replace(BASE, queries=64, keys=64),
    "grouped": replace(BASE, heads=6, key_heads=2, queries=35, keys=35, layout="cache"),
    "shared keys": replace(BASE, heads=4, key_maps=1, dv=4, layout="projection"),
    "documents": replace(BASE, documents=(20, 1, 17, 0, 13)),
    "documents and window, not causal": replace(BASE, documents=(33, 18), window=15, is_causal=False),
    "padding": replace(BASE, batch=2, mask="bool (B, 1, 1, S)"),
    "mask for each head": replace(BASE, queries=35, mask="bool (B, H, N, S)", window=40),
    "additive mask": replace(BASE, batch=2, mask="add -inf (B, 1, N, S)", is_causal=False),
    "expanded": replace(BASE, batch=2, key_heads=2, queries=35, keys=35, layout="expanded"),
    "wide": replace(BASE, d=72, dv=24, key_maps=1, queries=35, keys=35, window=20),
    "wide, two maps": replace(BASE, heads=1, d=20, dv=132, queries=35, keys=35),
}
DTYPES = (torch.float32, torch.float16)
SMALL = {"32 × 16": Blocks(32, 16, 4, 1), "16 × 32": Blocks(16, 32, 4, 1)}
NARROW_KERNELS = ["forward_kernel", "rows_kernel", "keys_kernel"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Every launch of a kernel, in order."""
    return recorded_launches(monkeypatch)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass wherever it is possible, without a record, also where memory is filled with NaN."""
    monkeypatch.setattr(triton_backend, "takes_one_pass", lambda *_, in_groups, **__: not in_groups)


def check_one_pass(launches: list[Launch], *, is_wide: bool) -> None:
    """One launch adds up dQ, float32, and dK, and dV where heads are narrow; and there is none for dQ alone."""
    assert names(launches) == [*NARROW_KERNELS, *(["keys_kernel"] if is_wide else [])]
    of = [[each.arguments[f"OF_{what}"] for what in ("QUERIES", "KEYS", "VALUES")] for each in launches[2:]]
    assert of == ([[True, True, False], [False, False, True]] if is_wide else [[True, True, True]])
    assert launches[2].arguments["grad_q"].dtype == torch.float32


@pytest.mark.usefixtures("poisoned_memory", "taken")
@pytest.mark.parametrize(
    ("request_", "dtype", "blocks"), in_turn(CASES, [torch.float32, torch.float16], SMALL), ids=str
)
def test_gradients(
    monkeypatch: pytest.MonkeyPatch, launched: list[Launch], request_: str, dtype: torch.dtype, blocks: str
) -> None:
    problem, expected = prepared(replace(CASES[request_], dtype=dtype))
    set_blocks(monkeypatch, SMALL[blocks])
    expected.check(problem.solve(diff_attention, backend="triton"))
    check_one_pass(launched, is_wide="wide" in request_)


@pytest.mark.usefixtures("poisoned_memory", "taken")
@pytest.mark.parametrize("examples", short_run([6, 40], [6]))
def test_requests_that_hypothesis_makes_up(monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    set_blocks(monkeypatch, Blocks(16, 16, 4, 1))

    @settings(max_examples=examples)
    @given(random_cases(queries=24, keys=40, dtypes=DTYPES))
    def check(case: Case) -> None:
        problem = build(case)
        expect(problem).check(problem.solve(diff_attention, backend="triton"))

    check()


@pytest.mark.usefixtures("poisoned_memory", "taken")
@pytest.mark.parametrize("request_", short_run(["causal", "mask for each head", "wide"], ["causal", "wide"]))
def test_blocks_as_they_are_on_a_device(launched: list[Launch], request_: str) -> None:
    problem, expected = prepared(replace(CASES[request_], queries=150, keys=150, heads=1, dtype=torch.float16))
    expected.check(problem.solve(diff_attention, backend="triton"))
    check_one_pass(launched, is_wide="wide" in request_)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_it_is_the_same_operator(monkeypatch: pytest.MonkeyPatch, norm: bool) -> None:
    """torch is told the layout of its gradients, and they are those of the other backward but for the order of sums."""
    case = replace(CASES["grouped"], queries=20, keys=35, layout="projection", dtype=torch.float16)
    problem, weight = build(case), torch.linspace(-1, 1, case.dv)
    more = {"norm_weight": weight, "norm_eps": 0.1} if norm else {}
    set_blocks(monkeypatch, SMALL["16 × 32"])
    answer = problem.solve(diff_attention, backend="triton", **more)
    hidden = problem.q, problem.k, problem.v, problem.lam, None, True, case.d**-0.5, None, None
    of_norm = (weight if norm else None, 0.1, 1.0)
    out, plain, *saved = torch.ops.diff_transformer.triton_forward(*hidden, *of_norm, True)
    inputs = (*hidden[:4], None, None, of_norm[0], plain if norm else out, *saved)
    torch.library.opcheck(
        torch.ops.diff_transformer.triton_backward, (problem.dout, *inputs, *hidden[5:8], *of_norm[1:])
    )  # fmt: skip
    monkeypatch.undo()
    for name, value in problem.solve(diff_attention, backend="triton", **more).items():
        torch.testing.assert_close(answer[name], value, rtol=4e-3, atol=4e-3, msg=name)


# Where it is taken.

FASTER, SLOWER = ({kernel_arguments.IN_ONE_PASS: one, kernel_arguments.IN_LAUNCHES: 1.0} for one in (0.9, 0.99))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Writes what was timed on devices of compute capability 8.0, for which the interpreter's kernels are."""
    path = tmp_path / "measured_backward.json"
    monkeypatch.setattr(kernel_arguments, "MEASURED_BACKWARD", path)
    kernel_arguments.measured_backwards.cache_clear()

    def write(times: dict[str, Any], capability: str = "80") -> None:
        path.write_text(json.dumps({capability: times}), encoding="utf-8")
        kernel_arguments.measured_backwards.cache_clear()

    yield write
    kernel_arguments.measured_backwards.cache_clear()


def kernels_of(launched: list[Launch], case: Case) -> list[str]:
    launched.clear()
    build(case).solve(diff_attention, backend="triton")
    return names(launched)


HALF = replace(BASE, queries=5, keys=5, dtype=torch.float16)
IN_LAUNCHES = [*NARROW_KERNELS, "queries_kernel"]


def test_a_record_decides(launched: list[Launch], record: Any) -> None:
    assert kernels_of(launched, HALF) == IN_LAUNCHES  # nothing was measured
    record({"narrow heads": FASTER})
    assert kernels_of(launched, HALF) == NARROW_KERNELS
    check_one_pass(launched, is_wide=False)
    record({"narrow heads": SLOWER})
    assert kernels_of(launched, HALF) == IN_LAUNCHES
    record({"narrow heads": FASTER}, capability="90")
    assert kernels_of(launched, HALF) == IN_LAUNCHES


def test_only_what_was_measured_is_taken(launched: list[Launch], record: Any) -> None:
    masked, wide = replace(HALF, mask="bool (B, 1, 1, S)"), replace(HALF, d=72)
    record({"narrow heads": FASTER, "wide heads, masked": FASTER})
    assert "queries_kernel" in kernels_of(launched, masked)
    assert "queries_kernel" in kernels_of(launched, wide)
    assert "queries_kernel" in kernels_of(launched, replace(HALF, dtype=torch.float32))
    assert "queries_kernel" in kernels_of(launched, replace(HALF, ratio=2))
    record({"narrow heads, masked": FASTER, "wide heads": FASTER})
    assert "queries_kernel" not in kernels_of(launched, masked)
    assert "queries_kernel" not in kernels_of(launched, wide)
    assert "queries_kernel" in kernels_of(launched, HALF)


def test_deterministic_algorithms_switch_it_off(launched: list[Launch], record: Any) -> None:
    record({"narrow heads": FASTER})
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert kernels_of(launched, HALF) == IN_LAUNCHES
        finally:
            torch.use_deterministic_algorithms(False)
    assert kernels_of(launched, HALF) == NARROW_KERNELS
