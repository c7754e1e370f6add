"""Answers to sums: what counts as right, how long an answer is, and any model with a tokenizer can be asked."""

from dataclasses import replace
from typing import Any

import pytest

from any_model import any_model
from diff_lab.data import ArithmeticBatches, byte_tokenizer
from diff_lab.data.arithmetic_task import is_held_out
from diff_lab.measure.measurement import EvalInput
from diff_lab.measure.standard import ANSWER_LENGTH, EXACT_MATCH, Arithmetic, Standard, is_right
from diff_lab.statistics import mean_interval, proportion_interval
from tiny_model import KINDS, SIZES
from writing_model import WritingModel

MODEL: dict[str, Any] = {**SIZES, "vocab_size": 257, "max_position_embeddings": 300, "initializer_range": 0.4}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("7+9=16;16-3=13;#13", True),
        ("nonsense # 13 ", True),
        ("7+9=16;16-3=14;#14", False),
        ("7+9=16;16-3=13;", False),
        ("#13;#14", False),
        ("#-13", False),
        ("", False),
    ],
)
def test_what_counts_is_the_last_result(text: str, right: bool) -> None:
    assert is_right(text, 13) is right


def test_records_of_problems_that_are_held_out() -> None:
    """A model whose answers are known: endless where the problem has two operations, else right; it goes on after a
    line of three."""
    batches = ArithmeticBatches(3)
    problems = {problem.question: problem for number in (1, 2, 3) for problem in batches.sample(12, number, 0)}
    assert len(problems) == 36
    assert all(map(is_held_out, problems))

    def reply(prompt: str) -> str:
        *examples, question = prompt.split("\n")
        assert len(examples) == 2
        for example in examples:
            asked, equals, solution = example.partition("=")
            assert not is_held_out(asked + equals)
            assert is_right(solution, eval(asked))  # of a sum
        problem = problems[question]
        return ["", problem.solution, "?" * 999, f"{problem.solution}\n2+2="][problem.operations]

    measured = EvalInput(model=WritingModel(reply), variant="it", tokenizer=byte_tokenizer(), batches=batches)
    records = Arithmetic(problems=12, examples=2).run(measured)
    by_name = {(record.name, record.coordinates.label): record for record in records}
    assert list(by_name) == [
        (name, label)
        for label in ("", "1 operation", "2 operations", "3 operations")
        for name in (EXACT_MATCH, ANSWER_LENGTH)
    ]
    assert {(record.variant, record.seed) for record in records} == {("it", None)}
    overall = by_name[EXACT_MATCH, ""]
    assert (overall.value, overall.interval, overall.n) == (24 / 36, proportion_interval(24, 36), 36)
    assert by_name[EXACT_MATCH, "2 operations"].value == 0
    lengths = by_name[ANSWER_LENGTH, ""]
    expected = [
        float(batches.longest_solution if one.operations == 2 else len(one.solution)) for one in problems.values()
    ]
    assert (lengths.value, lengths.interval) == (sum(expected) / 36, mean_interval(expected))
    assert "; 12 answers ran into the limit" in lengths.method
    assert (overall.better, lengths.better) == ("higher", "lower")
    assert len(overall.documents) == 36


@pytest.mark.parametrize("kind", [*KINDS, "llama"])
def test_the_measure_runs_on_any_checkpoint(kind: str) -> None:
    arithmetic = Arithmetic(problems=2, examples=1)
    records = arithmetic.run(EvalInput(model=any_model(kind, 3, **MODEL), variant=kind, tokenizer=byte_tokenizer()))
    assert records[0].n == 8
    assert records[0].value == 0
    with pytest.raises(ValueError, match="this model has no tokenizer"):
        arithmetic.run(EvalInput(model=any_model(kind, 3, **MODEL), variant=kind))


def test_what_a_run_was_trained_on_is_measured_by_default() -> None:
    """On the same problems for the models of all seeds, whose answers are compared document by document."""
    measured = EvalInput(model=any_model("diff", 3, **MODEL), variant="diff", batches=ArithmeticBatches(1))
    records = Standard().run(measured)
    assert {record.name for record in records} == {EXACT_MATCH, ANSWER_LENGTH}
    assert len({count for record in records for count, _ in record.documents}) > 2
    assert Standard().run(replace(measured, seed=1)) == records
