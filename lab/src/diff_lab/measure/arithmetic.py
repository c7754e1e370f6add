"""Asks for sums worked out step by step: how often the result is right, and how long the answer is (Appendix C)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data.arithmetic_task import ArithmeticBatches, ArithmeticProblem
from diff_lab.measure.accuracy import proportion_record
from diff_lab.measure.decoding import greedy_answers, prompt_tokens
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.record import Result
from diff_lab.statistics import mean_interval

EXACT_MATCH = "arithmetic/exact_match"
ANSWER_LENGTH = "arithmetic/answer_length"
_RESULT = re.compile(r"#\s*(-?\d+)\s*$")


@dataclass(frozen=True)
class Solved:
    """A model's answer to a problem, up to a line break, and its number of tokens without the one that ends it. `ended`
    is false if it ran into the limit.
    """

    problem: ArithmeticProblem
    text: str
    tokens: int
    ended: bool

    @property
    def right(self) -> bool:
        """Whether the text ends with the right result behind a "#"."""
        result = _RESULT.search(self.text)
        return result is not None and int(result[1]) == self.problem.result


def solve(
    model: Any,
    tokenizer: Any,
    problems: Sequence[ArithmeticProblem],
    *,
    examples: Sequence[ArithmeticProblem] = (),
    new_tokens: int = 64,
) -> list[Solved]:
    """Have a model answer problems greedily, in at most `new_tokens` tokens each.

    Solved examples stand before each problem, a line for each, for a model that was not trained on them. Raises
    ValueError if a problem with its examples does not fit the model's context.
    """
    before = "".join(f"{example.question}{example.solution}\n" for example in examples)
    rows = prompt_tokens(model, tokenizer, [before + problem.question for problem in problems], new_tokens)
    answers = greedy_answers(model, tokenizer, rows, new_tokens, batch_size=64)
    solved = []
    for problem, tokens in zip(problems, answers, strict=True):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        line, broken, _ = text.partition("\n")
        count = len(tokenizer(line, add_special_tokens=False)["input_ids"]) if broken else len(tokens)
        solved.append(Solved(problem, line, count, ended=bool(broken) or len(tokens) < new_tokens))
    return solved


class Arithmetic(Measurement):
    """Exact match and answer length on sums worked out step by step (Appendix C in small); a run that was trained on
    sums is asked its own kind."""

    needs = None

    problems: Count = Field(default=256, description="problems of each number of operations, at most")
    examples: int = Field(default=0, ge=0, description="solved problems before each")
    new_tokens: Count | None = Field(default=None, description="tokens of an answer; a solution's unless given")

    def run(self, measured: EvalInput) -> list[Result]:
        """Measure the accuracy on held-out problems, in all and by the number of operations, even of models trained on
        others.
        """
        if measured.tokenizer is None:
            raise ValueError("Arithmetic is asked in text, and this model has no tokenizer.")
        batches = measured.batches
        if not isinstance(batches, ArithmeticBatches):
            batches = ArithmeticBatches()
        seed = 0  # the same problems for the models of all seeds, which the documents of the records need
        numbers = range(1, batches.operations + 1)
        solved = solve(
            measured.model,
            measured.tokenizer,
            [problem for number in numbers for problem in batches.sample(self.problems, number, seed)],
            examples=batches.examples(self.examples, seed),
            new_tokens=self.new_tokens or batches.longest_solution,
        )
        parts = {NO_COORDINATES: solved}
        for number in numbers:
            parts[Coordinates(operations=number)] = [one for one in solved if one.problem.operations == number]
        records = []
        for coordinates, answers in parts.items():
            right, lengths = [one.right for one in answers], [float(one.tokens) for one in answers]
            endless = sum(not one.ended for one in answers)
            # Without a seed: the problems are the same, and models of different seeds are compared by problem.
            shared: dict[str, Any] = {"seed": None, "coordinates": coordinates}
            records += [
                proportion_record(
                    measured,
                    EXACT_MATCH,
                    right,
                    method="Wilson's score interval over problems",
                    documents=tuple((float(value), 1.0) for value in right),
                    **shared,
                ),
                measured.record(
                    ANSWER_LENGTH,
                    sum(lengths) / len(lengths),
                    interval=mean_interval(lengths),
                    n=len(lengths),
                    unit="tokens",
                    better="lower",
                    method=f"Student's t over problems; {endless} answers ran into the limit and count with it",
                    documents=tuple((value, 1.0) for value in lengths),
                    **shared,
                ),
            ]
        return records
