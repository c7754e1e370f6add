"""Sums worked out step by step: every solution is right, what is held out is never trained on, streams do not meet."""

import re

import pytest
import torch

from diff_lab.data.arithmetic_task import ArithmeticBatches, is_held_out, solved


def problems_in(batch: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Question and solution of each row, as its labels divide them."""
    problems = []
    for tokens, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        first = int((labels != -100).nonzero()[0])
        end = int((tokens == 256).nonzero()[0])
        assert labels[first : end + 1].tolist() == tokens[first : end + 1].tolist()
        assert (labels[:first] == -100).all()
        assert (labels[end + 1 :] == -100).all()
        assert (tokens[end:] == 256).all()
        problems.append((bytes(tokens[:first].tolist()).decode(), bytes(tokens[first:end].tolist()).decode()))
    return problems


def test_solutions_are_right_step_by_step() -> None:
    batches = ArithmeticBatches(5, 96, largest=30, batch_size=100)
    for question, solution in problems_in(batches.train_batch(1)):
        terms = re.fullmatch(r"(\d+)((?:[+-]\d+)+)=", question)
        assert terms
        total = int(terms[1])
        operations = re.findall(r"([+-])(\d+)", terms[2])
        *steps, result = solution.split(";")
        for (operator, number), step in zip(operations, steps, strict=True):
            following = total + int(f"{operator}{number}")
            assert step == f"{total}{operator}{number}={following}"
            assert following >= 0
            total = following
        assert result == f"#{total}"


def test_a_problem_by_hand() -> None:
    problem = solved([7, 9, 3, 20], ["+", "-", "-"])
    assert (problem.question, problem.solution) == ("7+9-3+20=", "7+9=16;16-3=13;13+20=33;#33")
    assert (problem.result, problem.operations) == (33, 3)


def test_held_out_problems_are_never_trained_on() -> None:
    batches = ArithmeticBatches(2, 64, batch_size=256, validation_problems=300)
    trained = {question for step in range(5) for question, _ in problems_in(batches.train_batch(step))}
    validated = [question for batch in batches.validation_batches() for question, _ in problems_in(batch)]
    assert len(validated) == 300
    assert not trained & set(validated)
    assert all(map(is_held_out, validated))
    assert not any(map(is_held_out, trained))
    # An eighth of all, as near as a hash comes to it.
    every = {solved([a, b], [op]).question for a in range(10) for b in range(10) for op in "+-"}
    assert 0.05 < sum(map(is_held_out, every)) / len(every) < 0.2


def test_every_number_of_operations_is_as_frequent() -> None:
    questions = [question for question, _ in problems_in(ArithmeticBatches(4, batch_size=1000).train_batch(1))]
    counts = [sum(len(re.findall(r"[+-]", question)) == count for question in questions) for count in (1, 2, 3, 4)]
    assert sum(counts) == 1000
    assert min(counts) > 200


def test_samples_are_different_problems() -> None:
    batches = ArithmeticBatches(3)
    sample = batches.sample(50, 3, seed=1)
    assert ArithmeticBatches(1, largest=1).sample(1, 1, seed=0)
    assert len({problem.question for problem in sample}) == 50
    assert {problem.operations for problem in sample} == {3}
    assert all(is_held_out(problem.question) for problem in sample)
    assert sample == batches.sample(50, 3, seed=1) != batches.sample(50, 3, seed=2)
    assert 5 < len(batches.sample(100, 1, seed=0)) < 50  # there are no more
    examples = batches.examples(9, seed=0)
    assert len({problem.question for problem in examples}) == 9
    assert not any(is_held_out(problem.question) for problem in examples)


@pytest.mark.parametrize(("operations", "largest"), [(1, 9), (3, 99)])
def test_the_longest_problem_fits_just(operations: int, largest: int) -> None:
    with pytest.raises(ValueError, match="may take") as caught:
        ArithmeticBatches(operations, 1, largest=largest)
    longest = int(str(caught.value).rpartition("take ")[2].split()[0])
    batches = ArithmeticBatches(operations, longest, largest=largest, batch_size=500)
    worst = solved([largest] * (operations + 1), ["+"] * operations)
    assert len(worst.question + worst.solution) + 1 <= longest
    sizes = [len(question + solution) + 1 for question, solution in problems_in(batches.train_batch(0))]
    assert max(sizes) <= longest
