"""Draws chains of additions and subtractions with their solution step by step, a task to reason about (Appendix C).

    7+9-3=7+9=16;16-3=13;#13

A problem is everything up to the first "=". Its solution follows: the steps from left to right, then the result.
"""

import random
import zlib
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from diff_lab.data.batches import SAMPLE, TRAINING, GeneratedBatches, Stream, padded
from diff_lab.data.tokenizers import byte_tokenizer


@dataclass(frozen=True)
class ArithmeticProblem:
    """A chain of operations, its solution as it is taught, and the result."""

    question: str  # "7+9-3="
    solution: str  # "7+9=16;16-3=13;#13"
    result: int  # 13
    operations: int  # 2


@dataclass(eq=False)
class ArithmeticBatches(GeneratedBatches):
    """Problems with solutions, a problem in each sequence; every token is a byte.

    Numbers are drawn from 0 … `largest`, operations from + and −; a difference that would be negative is a sum instead.
    Only the solution and the end of the text are labelled. Problems that are held out are never trained on: their text
    alone decides it, so all models and seeds agree.

    Raises ValueError if a number is out of range, or `length` is too short for the longest problem.
    """

    operations: int = 4  # the most in a problem; as many problems have one, two, … of them
    length: int = 48  # tokens in a sequence
    _: KW_ONLY
    batch_size: int = 64
    largest: int = 9  # number in a problem
    validation_problems: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        digits, total = len(str(self.largest)), len(str((self.operations + 1) * self.largest))
        longest_question = (self.operations + 1) * (digits + 1)
        self.longest_solution = self.operations * (2 * total + digits + 3) + 1 + total + 1
        """Tokens that no solution exceeds, with the end of the text."""
        longest = longest_question + self.longest_solution
        if self.length < longest:
            raise ValueError(
                f"length={self.length} has no room for {self.operations} operations on numbers up to {self.largest}: "
                f"the longest problem with its solution may take {longest} tokens."
            )
        self.validation_size = self.validation_problems
        self.tokenizer = byte_tokenizer()
        self.vocab_size = len(self.tokenizer)

    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        generator, rows = _random(stream), []
        for _ in range(count):
            problem = self._problem(generator, held_out=stream[1] != TRAINING)
            question, solution = [*problem.question.encode()], [*problem.solution.encode(), self.tokenizer.eos_token_id]
            rows.append((question + solution, [False] * len(question) + [True] * len(solution)))
        return padded(rows, self.length)

    def sample(self, n: int, operations: int, seed: int) -> list[ArithmeticProblem]:
        """Return at most `n` different held-out problems of so many operations; fewer if there are no more."""
        return self._different(n, _random((seed, SAMPLE, operations)), held_out=True, operations=operations)

    def examples(self, n: int, seed: int) -> list[ArithmeticProblem]:
        """Return at most `n` different problems of those that may be trained on; fewer if there are no more."""
        return self._different(n, _random((seed, SAMPLE, 0)), held_out=False)

    def _different(self, n: int, generator: random.Random, **kind: Any) -> list[ArithmeticProblem]:
        problems: dict[str, ArithmeticProblem] = {}
        for _ in range(20 * n + 200):
            if len(problems) == n:
                break
            problem = self._problem(generator, **kind)
            problems[problem.question] = problem
        return list(problems.values())

    def _problem(self, generator: random.Random, *, held_out: bool, operations: int | None = None) -> ArithmeticProblem:
        while True:  # a problem is held out of those with numbers up to 1, too
            count = generator.randint(1, self.operations) if operations is None else operations
            numbers = [generator.randint(0, self.largest) for _ in range(count + 1)]
            problem = solved(numbers, [generator.choice("+-") for _ in range(count)])
            if is_held_out(problem.question) == held_out:
                return problem


def _random(stream: Stream) -> random.Random:
    return random.Random("/".join(map(str, stream)))


def solved(numbers: list[int], operators: list[str]) -> ArithmeticProblem:
    """Return the problem of these numbers and operators, one fewer; a "-" that would lead below 0 becomes a "+"."""
    question, total, steps = str(numbers[0]), numbers[0], []
    for number, drawn in zip(numbers[1:], operators, strict=True):
        operator = "+" if drawn == "-" and number > total else drawn
        following = total + number if operator == "+" else total - number
        question += f"{operator}{number}"
        steps.append(f"{total}{operator}{number}={following};")
        total = following
    return ArithmeticProblem(f"{question}=", f"{''.join(steps)}#{total}", total, len(operators))


def is_held_out(question: str) -> bool:
    """Return whether a problem is held out for validation and evaluation: one in eight."""
    return zlib.crc32(question.encode()) % 8 == 0
