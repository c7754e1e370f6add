"""Chains of additions and subtractions with their solution step by step: a task to reason about, in small (Appendix C).

    7+9-3=7+9=16;16-3=13;#13

A problem is everything up to the first "=". Its solution follows: the steps from left to right, then the result.
"""

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.packing import IGNORED
from diff_transformer.data.tokenizers import byte_tokenizer

# One problem in so many, chosen by a hash of its text, is held out for validation and evaluation.
HELD_OUT = 8
# Draws after which a kind of problem is taken for one that does not exist.
_ATTEMPTS = 1000
# Streams of random numbers that never meet: (seed, stream, step).
_TRAIN, _VALIDATION, _SAMPLE = range(3)


@dataclass(frozen=True)
class Problem:
    """A chain of operations, its solution as it is taught, and the result.

    Attributes:
        question: "7+9-3=".
        solution: "7+9=16;16-3=13;#13".
        result: 13.
        operations: 2.
    """

    question: str
    solution: str
    result: int
    operations: int


class ArithmeticBatches:
    """Problems with solutions, a problem in each sequence; every token is a byte.

    Numbers are drawn from 0 … `largest`, operations from + and −; where a difference would be negative, it is a sum
    instead. Only the solution and the end of the text are labelled. Problems that are held out are never trained on:
    which ones is decided by their text alone, so all models and seeds agree.

    Args:
        operations: the most in a problem; as many problems have one, two, … of them.
        length: tokens in a sequence.
        batch_size: problems in a batch.
        seed: of the training problems; the validation problems do not depend on it.
        largest: number in a problem.
        validation_problems: in `validation_batches`.

    Attributes:
        source: there is none but the settings.

    Raises:
        ValueError: a number is out of range, or `length` has no room for the longest problem.
    """

    source = ""

    def __init__(
        self,
        operations: int = 4,
        length: int = 48,
        *,
        batch_size: int = 64,
        seed: int = 0,
        largest: int = 9,
        validation_problems: int = 512,
    ) -> None:
        if min(operations, batch_size, largest, validation_problems) < 1:
            raise ValueError(
                "All numbers of an arithmetic task (operations, batch size, largest, problems) are at least 1."
            )
        digits, total = len(str(largest)), len(str((operations + 1) * largest))
        longest_question = (operations + 1) * digits + operations + 1
        self.longest_solution = operations * (2 * total + digits + 3) + 1 + total + 1
        """Tokens that no solution exceeds, with the end of the text."""
        longest = longest_question + self.longest_solution
        if length < longest:
            raise ValueError(
                f"length={length} has no room for {operations} operations on numbers up to {largest}: the longest "
                f"problem with its solution may take {longest} tokens."
            )
        self.operations, self.length, self.largest = operations, length, largest
        self.batch_size, self.seed, self.validation_problems = batch_size, seed, validation_problems
        self.tokenizer: PreTrainedTokenizerFast = byte_tokenizer()
        self.vocab_size = len(self.tokenizer)
        for count in (1, operations):
            self._draw(self._stream(0, _SAMPLE, 0), held_out=True, operations=count)

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The problems of a step; see `Batches.train_batch`."""
        stream = self._stream(self.seed, _TRAIN, step)
        return self._batch([self._draw(stream, held_out=False) for _ in range(self.batch_size)])

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """`validation_problems` fixed problems that are held out; the last batch may be smaller."""
        for start in range(0, self.validation_problems, self.batch_size):
            stream = self._stream(0, _VALIDATION, start)
            size = min(self.batch_size, self.validation_problems - start)
            yield self._batch([self._draw(stream, held_out=True) for _ in range(size)])

    def sample(self, n: int, operations: int, seed: int) -> list[Problem]:
        """At most `n` different problems that are held out, of so many operations; fewer where there are no more."""
        stream = self._stream(seed, _SAMPLE, operations)
        problems: dict[str, Problem] = {}
        for _ in range(20 * n + 200):
            problem = self._draw(stream, held_out=True, operations=operations)
            problems[problem.question] = problem
            if len(problems) == n:
                break
        return list(problems.values())

    def examples(self, n: int, seed: int) -> list[Problem]:
        """`n` different problems of those that may be trained on."""
        stream = self._stream(seed, _SAMPLE, 0)
        problems: dict[str, Problem] = {}
        while len(problems) < n:
            problem = self._draw(stream, held_out=False)
            problems[problem.question] = problem
        return list(problems.values())

    def _stream(self, *names: int) -> random.Random:
        return random.Random("/".join(map(str, names)))

    def _draw(self, stream: random.Random, *, held_out: bool, operations: int | None = None) -> Problem:
        for _ in range(_ATTEMPTS):
            count = stream.randint(1, self.operations) if operations is None else operations
            numbers = [stream.randint(0, self.largest) for _ in range(count + 1)]
            problem = solved(numbers, [stream.choice("+-") for _ in range(count)])
            if is_held_out(problem.question) == held_out:
                return problem
        raise ValueError(
            f"There are so few problems with numbers up to {self.largest} that none is left "
            f"{'to hold out' if held_out else 'to train on'}."
        )

    def _batch(self, problems: list[Problem]) -> dict[str, Tensor]:
        end = self.tokenizer.eos_token_id
        input_ids = torch.full((len(problems), self.length), end)
        labels = torch.full_like(input_ids, IGNORED)
        for row, problem in enumerate(problems):
            text = torch.tensor([*f"{problem.question}{problem.solution}".encode(), end])
            input_ids[row, : len(text)] = text
            labels[row, len(problem.question) : len(text)] = text[len(problem.question) :]
        return {"input_ids": input_ids, "labels": labels}


def solved(numbers: list[int], operators: list[str]) -> Problem:
    """The problem of these numbers and operators, one fewer; a "-" that would lead below 0 becomes a "+"."""
    question, total, steps = str(numbers[0]), numbers[0], []
    for number, drawn in zip(numbers[1:], operators, strict=True):
        operator = "+" if drawn == "-" and number > total else drawn
        following = total + number if operator == "+" else total - number
        question += f"{operator}{number}"
        steps.append(f"{total}{operator}{number}={following};")
        total = following
    return Problem(f"{question}=", f"{''.join(steps)}#{total}", total, len(operators))


def is_held_out(question: str) -> bool:
    """Whether a problem is held out for validation and evaluation."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0
