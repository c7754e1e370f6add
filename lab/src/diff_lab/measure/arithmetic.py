"""Asks for sums worked out step by step: how often the result is right, and how long the answer is (Appendix C)."""

import re
from typing import Any

from pydantic import Field

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data.arithmetic_task import ArithmeticBatches
from diff_lab.measure.accuracy import proportion_record
from diff_lab.measure.decoding import greedy_answers, prompt_tokens
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.record import Result
from diff_lab.statistics import mean_interval

EXACT_MATCH = "arithmetic/exact_match"
ANSWER_LENGTH = "arithmetic/answer_length"
_RESULT = re.compile(r"#\s*(-?\d+)\s*$")


def is_right(text: str, result: int) -> bool:
    """Return whether an answer ends with the right result behind a "#"."""
    found = _RESULT.search(text)
    return found is not None and int(found[1]) == result


class Arithmetic(Measurement):
    """Exact match and answer length on sums worked out step by step (Appendix C in small); a run that was trained on
    sums is asked its own kind."""

    needs = None

    problems: Count = Field(default=256, description="problems of each number of operations, at most")
    examples: int = Field(default=0, ge=0, description="solved problems before each")
    new_tokens: Count | None = Field(default=None, description="tokens of an answer; a solution's unless given")

    def run(self, measured: EvalInput) -> list[Result]:
        if measured.tokenizer is None:
            raise ValueError("Arithmetic is asked in text, and this model has no tokenizer.")
        model, tokenizer, batches = measured.model, measured.tokenizer, measured.batches
        if not isinstance(batches, ArithmeticBatches):
            batches = ArithmeticBatches()
        new_tokens = self.new_tokens or batches.longest_solution
        seed = 0  # the same problems for the models of all seeds, which the documents of the records need
        numbers = range(1, batches.operations + 1)
        problems = [problem for number in numbers for problem in batches.sample(self.problems, number, seed)]
        # A line for each, for a model that was not trained on them.
        examples = "".join(f"{one.question}{one.solution}\n" for one in batches.examples(self.examples, seed))
        rows = prompt_tokens(model, tokenizer, [examples + problem.question for problem in problems], new_tokens)
        # Whether each answer, up to a line break, is right, how many tokens it has, and whether it ran into the limit.
        parts: dict[Coordinates, list[tuple[bool, float, bool]]] = {NO_COORDINATES: []}
        answers = greedy_answers(model, tokenizer, rows, new_tokens, batch_size=64)
        for problem, tokens in zip(problems, answers, strict=True):
            line, broken, _ = tokenizer.decode(tokens, skip_special_tokens=True).partition("\n")
            length = len(tokenizer(line, add_special_tokens=False)["input_ids"]) if broken else len(tokens)
            endless = not broken and len(tokens) == new_tokens
            for coordinates in (NO_COORDINATES, Coordinates(operations=problem.operations)):
                answer = (is_right(line, problem.result), float(length), endless)
                parts.setdefault(coordinates, []).append(answer)
        records = []
        for coordinates, found in parts.items():
            right, lengths, limited = zip(*found, strict=True)
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
                    method=f"Student's t over problems; {sum(limited)} answers ran into the limit and count with it",
                    documents=tuple((value, 1.0) for value in lengths),
                    **shared,
                ),
            ]
        return records
