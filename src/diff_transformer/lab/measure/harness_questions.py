"""Reads files of questions for the harness, and makes questions from held-out text where there is no network."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diff_transformer.data import TextBatches
from diff_transformer.lab.results_files import write_text
from diff_transformer.storage.files import parse_json


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The questions of a file, one JSON object to a line; empty lines are skipped, other fields are left alone.

    Fields: ``question`` (asked as "Question: …\\nAnswer:"), ``context`` (text that stands before it, or is itself what
    the choices continue; "" scores the choices alone), ``choices`` (two or more different texts) and ``answer`` (the
    number of the right one, counted from 0). One of ``question`` and ``context`` may be missing. A space comes between
    the prompt and a choice, so those that a context ends with are dropped.

    Returns:
        For each question ``prompt``, ``choices`` and ``answer``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no questions, or a line is wrong; names the line and the field.
    """
    if not path.is_file():
        raise FileNotFoundError(f"The task {str(path)!r} is no file.")
    try:
        # Not splitlines(): JSON may hold other characters that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    questions = [
        _question(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1) if line.strip()
    ]
    if not questions:
        raise ValueError(f"{path} holds no questions.")
    return questions


def _question(line: str, where: str) -> dict[str, Any]:
    fields = parse_json(line, where)
    if not isinstance(fields, dict):
        raise ValueError(f"{where} must be an object with the fields question or context, choices and answer.")
    for name in ("choices", "answer"):
        if name not in fields:
            raise ValueError(f"{where} lacks the field {name!r}.")
    choices, answer = fields["choices"], fields["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(choice) for choice in choices):
        raise ValueError(f"{where}: 'choices' must be a list of two or more texts that are not empty, got {choices!r}.")
    if len(set(choices)) < len(choices):
        raise ValueError(f"{where}: 'choices' must differ from each other, got {choices!r}.")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f"{where}: 'answer' must be the number of a choice, 0 to {len(choices) - 1}, got {answer!r}.")
    return {"prompt": _prompt(fields, where), "choices": choices, "answer": answer}


def _prompt(fields: dict[str, Any], where: str) -> str:
    """What stands before a choice: the context, the question, or one after the other."""
    context, question = fields.get("context"), fields.get("question")
    if context is None and question is None:
        raise ValueError(f"{where} lacks a field 'question' or 'context'.")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"{where}: 'context' must be a text, got {context!r}.")
    if question is None:
        return str(context).rstrip(" ")
    if not _is_text(question):
        raise ValueError(f"{where}: 'question' must be a text that is not empty, got {question!r}.")
    return (f"{context}\n" if context else "") + f"Question: {question}\nAnswer:"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


CHOICES = 4


def write_cloze(path: Path, batches: TextBatches, tokenizer: Any, *, questions: int, characters: int) -> Path:
    """Write a file of questions as :func:`diff_transformer.lab.measure.harness_questions.read_questions` takes it.

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
