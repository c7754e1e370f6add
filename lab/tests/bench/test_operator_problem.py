from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diff_lab.bench.benchmark import DECODE, DTYPES, FORWARD, TRAINING
from diff_lab.bench.operator_candidates import AnswerCheck, OperatorProblem, Shape, candidates, compute, draw

CPU = torch.device("cpu")
SEQUENCE = Shape(batch=2, heads=6, width=8, queries=300, keys=300)
STEP = Shape(batch=3, heads=4, width=8, queries=1, keys=70)


@pytest.fixture(scope="module")
def problem() -> OperatorProblem:
    return draw(SEQUENCE, CPU)


@pytest.fixture(scope="module")
def check(problem: OperatorProblem) -> AnswerCheck:
    return AnswerCheck(problem)


@pytest.mark.parametrize("name", ["auto", "reference", "blockwise", "sdpa", "sdpa_full_v", "sdpa_split_v", "DiffLlama"])
@pytest.mark.parametrize("pass_", [FORWARD, TRAINING])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_right_answers_pass(
    problem: OperatorProblem, check: AnswerCheck, name: str, pass_: str, dtype: torch.dtype
) -> None:
    assert check.error(compute(candidates()[name], problem.to(dtype), pass_)) < 1


@pytest.mark.parametrize("name", ["auto", "blockwise", "sdpa", "sdpa_full_v", "sdpa_split_v", "DiffLlama"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_right_decoding_passes(name: str, dtype: torch.dtype) -> None:
    step = draw(STEP, CPU)
    assert AnswerCheck(step).error(compute(candidates()[name], step.to(dtype), DECODE)) < 1


def _scaled(name: str) -> Callable[[dict[str, Tensor]], None]:
    def spoil(answer: dict[str, Tensor]) -> None:
        answer[name] *= 1.00002

    return spoil


def _last_row(answer: dict[str, Tensor]) -> None:
    answer["out"][:, :, -1] *= 1.001


def _hole(answer: dict[str, Tensor]) -> None:
    answer["q"][0, 0, 0, 5, 3] = float("nan")


def _last_head(answer: dict[str, Tensor]) -> None:
    answer["k"][-1, -1] = 0


@pytest.mark.parametrize("spoil", [*map(_scaled, ("out", "q", "k", "v", "lam")), _last_row, _hole, _last_head])
def test_wrong_answers_do_not(
    problem: OperatorProblem, check: AnswerCheck, spoil: Callable[[dict[str, Tensor]], None]
) -> None:
    answer = compute(candidates()["reference"], problem, TRAINING)
    assert check.error(answer) < 1
    spoil(answer)
    assert not check.error(answer) <= 1


def test_another_lambda_is_seen_in_bfloat16(problem: OperatorProblem, check: AnswerCheck) -> None:
    changed = OperatorProblem(problem.q, problem.k, problem.v, problem.lam * 1.2, problem.grad).to(torch.bfloat16)
    assert check.error(compute(candidates()["reference"], changed, FORWARD)) > 1


def test_all_dtypes_get_the_same_numbers(problem: OperatorProblem) -> None:
    for name in ("q", "k", "v", "grad"):
        assert torch.equal(getattr(problem.to(torch.bfloat16), name).float(), getattr(problem, name))


def test_decoding_reads_the_keys_as_the_cache_holds_them() -> None:
    step = draw(STEP, CPU)
    cache = step.k.transpose(2, 3).flatten(3)
    assert cache.is_contiguous()
    assert cache.data_ptr() == step.k.data_ptr()
