"""Asks for sums worked out step by step: how often the result is right, and how long the answer is (Appendix C)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from diff_transformer.data.arithmetic_task import ArithmeticBatches, Problem
from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.measure.decoding import greedy_answers, prompt_tokens
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import mean_interval, proportion_interval

EXACT_MATCH = "arithmetic/exact_match"
ANSWER_LENGTH = "arithmetic/answer_length"
_RESULT = re.compile(r"#\s*(-?\d+)\s*$")


@dataclass(frozen=True)
class Solved:
    """What a model made of a problem.

    Attributes:
        problem: which.
        text: all that the model wrote, up to a line break.
        tokens: of that text, the one that ends it left out.
        ended: whether the model ended it, by the end of the text or of the line; if not, it ran into the limit.
    """

    problem: Problem
    text: str
    tokens: int
    ended: bool

    @property
    def right(self) -> bool:
        """Whether the text ends with the right result behind a "#"."""
        found = _RESULT.search(self.text)
        return found is not None and int(found[1]) == self.problem.result


def solve(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    *,
    examples: Sequence[Problem] = (),
    new_tokens: int = 64,
    batch_size: int = 64,
) -> list[Solved]:
    """Have a model answer problems greedily.

    Args:
        model: any causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        problems: what is asked.
        examples: solved problems that stand before each, a line for each, for a model that was not trained on them.
        new_tokens: the longest answer.
        batch_size: answers that are written at a time.

    Raises:
        ValueError: a problem with its examples does not fit the model's context.
    """
    before = "".join(f"{example.question}{example.solution}\n" for example in examples)
    rows = prompt_tokens(model, tokenizer, [before + problem.question for problem in problems], new_tokens)
    found = []
    for problem, tokens in zip(problems, greedy_answers(model, tokenizer, rows, new_tokens, batch_size), strict=True):
        ended = len(tokens) < new_tokens
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        line, broken, _ = text.partition("\n")
        count = len(tokenizer(line, add_special_tokens=False)["input_ids"]) if broken else len(tokens)
        found.append(Solved(problem, line, count, ended or bool(broken)))
    return found


def arithmetic_records(
    model: Any,
    tokenizer: Any,
    batches: ArithmeticBatches,
    variant: str,
    *,
    problems: int = 256,
    examples: int = 0,
    new_tokens: int | None = None,
    seed: int = 0,
    model_seed: int | None = None,
) -> list[Result]:
    """Exact match and answer length on problems that are held out, in all and by the number of operations.

    Args:
        model: any causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        batches: where the problems come from.
        variant: what to call the model.
        problems: at most so many of each number of operations, all different.
        examples: solved problems before each; 0 for a model that was trained on them.
        new_tokens: the longest answer; as long as a solution can be unless given.
        seed: of the draw.
        model_seed: of the model, for the records.
    """
    shown = batches.examples(examples, seed)
    asked = [
        problem
        for operations in range(1, batches.operations + 1)
        for problem in batches.sample(problems, operations, seed)
    ]
    found = solve(model, tokenizer, asked, examples=shown, new_tokens=new_tokens or batches.longest_solution)
    records = _records(found, variant, NOWHERE, model_seed)
    for operations in range(1, batches.operations + 1):
        part = [solved for solved in found if solved.problem.operations == operations]
        records += _records(part, variant, Coordinates(operations=operations), model_seed)
    return records


def _records(found: Sequence[Solved], variant: str, coordinates: Coordinates, seed: int | None) -> list[Result]:
    right = [float(solved.right) for solved in found]
    lengths = [float(solved.tokens) for solved in found]
    endless = sum(not solved.ended for solved in found)
    shared: dict[str, Any] = {"variant": variant, "coordinates": coordinates, "seed": seed, "n": len(found)}
    return [
        Result(
            name=EXACT_MATCH,
            value=sum(right) / len(right),
            interval=proportion_interval(int(sum(right)), len(right)),
            better="higher",
            method="Wilson's score interval over problems",
            documents=tuple((value, 1.0) for value in right),
            **shared,
        ),
        Result(
            name=ANSWER_LENGTH,
            value=sum(lengths) / len(lengths),
            interval=mean_interval(lengths),
            unit="tokens",
            better="lower",
            method=f"Student's t over problems; {endless} answers ran into the limit and count with it",
            documents=tuple((value, 1.0) for value in lengths),
            **shared,
        ),
    ]


class ArithmeticOptions(Options):
    """Which sums are asked, and how. A run that was trained on sums is asked its own kind."""

    operations: Count = Field(default=4, description="operations of the longest sums")
    largest: Count = Field(default=9, description="the largest number in a sum")
    problems: Count = Field(default=256, description="problems of each number of operations, at most")
    examples: int = Field(default=0, ge=0, description="solved problems before each")
    new_tokens: Count | None = Field(default=None, description="tokens of an answer; a solution's unless given")


def _run(measured: EvalInput, options: ArithmeticOptions) -> list[Result]:
    if measured.tokenizer is None:
        raise ValueError("Arithmetic is asked in text, and this model has no tokenizer.")
    settings = dict(options)
    operations, largest = settings.pop("operations"), settings.pop("largest")
    own = measured.batches
    batches = own if isinstance(own, ArithmeticBatches) else ArithmeticBatches(operations, 1 << 20, largest=largest)
    # The same problems for all seeds, which the documents of the records need.
    return arithmetic_records(measured.model, measured.tokenizer, batches, measured.variant, **settings)


ARITHMETIC = Measurement(
    name="arithmetic",
    description="exact match and answer length on sums worked out step by step (Appendix C in small)",
    options=ArithmeticOptions,
    run=_run,
    needs=None,
    any_model=True,
)
