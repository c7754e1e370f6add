"""Questions from held-out text, which of four pieces goes on from a beginning: for the harness without a network."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diff_transformer.data import TextBatches
from diff_transformer.results import write_text

CHOICES = 4


def write_cloze(path: Path, batches: TextBatches, tokenizer: Any, *, questions: int, characters: int) -> Path:
    """Write a file of questions as :func:`diff_transformer.eval.questions.read_questions` takes it.

    A question is the beginning of a block of validation text; its choices are what follows there and what stands at
    the same place of other blocks, in random order.

    Args:
        path: of the .jsonl file.
        batches: the text.
        tokenizer: what it was tokenised with.
        questions: at most so many.
        characters: of a question with its answer; two thirds of them are the beginning.

    Raises:
        ValueError: the text has fewer pieces than a question has choices.
    """
    pieces = list(dict(_pieces(batches, tokenizer, characters, questions)).items())
    if len(pieces) < CHOICES:
        raise ValueError(f"The validation text has {len(pieces)} pieces of {characters} characters, too few to choose.")
    stream, lines = random.Random(0), []
    for beginning, right in pieces:
        others = sorted({other for _, other in pieces} - {right})
        if len(others) < CHOICES - 1:
            continue
        choices = [right, *stream.sample(others, CHOICES - 1)]
        stream.shuffle(choices)
        lines.append(json.dumps({"context": beginning, "choices": choices, "answer": choices.index(right)}))
    return write_text(path, "\n".join(lines) + "\n")


def _pieces(batches: TextBatches, tokenizer: Any, characters: int, count: int) -> Iterator[tuple[str, str]]:
    """Beginnings with what follows, divided at a blank: the harness puts one between a question and its answer."""
    found = 0
    for batch in batches.validation_batches():
        for row in batch["input_ids"].tolist():
            text = " ".join(str(tokenizer.decode(row, skip_special_tokens=True)).split())[:characters]
            beginning, _, rest = text[: characters * 2 // 3].rpartition(" ")
            right = rest + text[characters * 2 // 3 :]
            if len(text) == characters and beginning and right.strip():
                found += 1
                yield beginning, right.strip()
            if found == count:
                return
