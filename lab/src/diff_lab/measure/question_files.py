"""Reads documents (Table 4) and questions (Tables 1 and 8) from .jsonl files, or makes them from held-out text."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from diff_lab.data import TextBatches
from diff_lab.measure.measurement import refusal
from diff_transformer.utils.files import parse_json
from diff_transformer.utils.suggestions import quoted

CHOICES = 4  # of a question that is made from text

Words = Annotated[str, Field(pattern=r"\S")]


class Line(BaseModel):
    """A line of a .jsonl file; other fields of it are left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


L = TypeVar("L", bound=Line)


class Source(Line):
    """A document, with a question about it and a person's answer."""

    document: Words = Field(description="a text that is not empty")
    question: Words | None = Field(default=None, description="a text that is not empty; a summary unless given")
    reference: Words | None = Field(default=None, description="a text that is not empty")


class Question(Line):
    """A multiple-choice question, asked as "Question: …\\nAnswer:" after a context, or a context to continue."""

    choices: list[Words] = Field(min_length=2, description="two or more texts that are not empty")
    answer: int = Field(ge=0, description="the number of the right choice, from 0")
    question: Words | None = Field(default=None, description="a text that is not empty")
    context: str | None = Field(default=None, description="a text")

    @model_validator(mode="after")
    def _check(self) -> "Question":
        if self.question is None and self.context is None:
            raise ValueError("it lacks a field 'question' or 'context'")
        if len(set(self.choices)) < len(self.choices):
            raise ValueError(f"'choices' must differ from each other, got {quoted(self.choices)}")
        if self.answer >= len(self.choices):
            raise ValueError(
                f"'answer' must be the number of a choice, 0 to {len(self.choices) - 1}, got {self.answer}"
            )
        return self

    @property
    def prompt(self) -> str:
        """The text before a choice, from which a space divides it."""
        if self.question is None:
            return str(self.context).rstrip(" ")
        return (f"{self.context}\n" if self.context else "") + f"Question: {self.question}\nAnswer:"


def read_lines(path: Path, kind: type[L], name: str) -> list[L]:
    """Read the lines of a .jsonl file that are not empty. Raises ValueError naming a line that is not of that kind."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of {name} at {str(path)!r}.")
    # Not splitlines(): JSON may hold other characters that it takes for the end of a line.
    lines = {number: line for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()}
    if not lines:
        raise ValueError(f"{path} holds no {name}.")
    read = []
    for number, line in lines.items():
        fields = parse_json(line, f"{path}, line {number}")
        try:
            read.append(kind.model_validate(fields))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number} {refusal(error, kind, fields)}") from None
    return read


def read_sources(path: Path, limit: int, characters: int) -> list[Source]:
    """Read documents of a file, drawn at random if there are more than the limit, each cut to so many characters."""
    sources = read_lines(path, Source, "documents")
    drawn = sorted(random.Random(0).sample(range(len(sources)), min(limit, len(sources))))
    return [
        source.model_copy(update={"document": _cut(source.document, characters)})
        for source in (sources[number] for number in drawn)
    ]


def held_out_sources(batches: TextBatches, tokenizer: Any, limit: int, characters: int) -> list[Source]:
    """Make documents of half so many characters or more of the first ones, or their parts, in a text's blocks."""
    sources: list[Source] = []
    end = tokenizer.eos_token_id
    for block in _blocks(batches):
        start = block.index(end) + 1 if end in block else 0
        stop = block.index(end, start) if end in block[start:] else len(block)
        text = str(tokenizer.decode(block[start:stop], skip_special_tokens=True)).strip()
        if len(text) >= characters / 2:
            sources.append(Source(document=_cut(text, characters)))
        if len(sources) == limit:
            break
    if not sources:
        raise ValueError(
            f"No sequence of the validation text holds {characters // 2} characters of one document: ask for fewer "
            "characters, or give longer text or sequences."
        )
    return sources


def _blocks(batches: TextBatches) -> Iterator[list[int]]:
    for batch in batches.validation_batches():
        yield from batch["input_ids"].tolist()


def _cut(document: str, characters: int) -> str:
    if len(document) <= characters:
        return document
    beginning = document[:characters]
    last = max(beginning.rfind(end) for end in (". ", "! ", "? ", ".\n", "\n"))
    # A sentence that ends in the first half would leave too little of the document.
    return beginning[: last + 1].rstrip() if last >= characters // 2 else beginning


def cloze_questions(batches: TextBatches, tokenizer: Any, *, count: int, characters: int) -> list[Question]:
    """Make at most so many questions from the validation blocks of a text.

    A question is the beginning of a block, two thirds of its characters; its choices are the text that follows and the
    texts at the same place of other blocks. Raises ValueError if there are fewer than a question has choices.
    """
    endings: dict[str, str] = {}  # of each beginning
    for block in _blocks(batches):
        text = " ".join(str(tokenizer.decode(block, skip_special_tokens=True)).split())[:characters]
        # Divided at a blank: the harness puts one between a question and its answer.
        beginning, _, word = text[: characters * 2 // 3].rpartition(" ")
        ending = (word + text[characters * 2 // 3 :]).strip()
        if len(text) == characters and beginning and ending:
            endings[beginning] = ending
        if len(endings) == count:
            break
    stream, questions = random.Random(0), []
    for beginning, ending in endings.items():
        wrong = sorted(set(endings.values()) - {ending})
        if len(wrong) >= CHOICES - 1:
            choices = [ending, *stream.sample(wrong, CHOICES - 1)]
            stream.shuffle(choices)
            questions.append(Question(context=beginning, choices=choices, answer=choices.index(ending)))
    if not questions:
        raise ValueError(
            f"The validation text has {len(endings)} pieces of {characters} characters, and the choices of a "
            f"question are {CHOICES} of them: give more text."
        )
    return questions
