"""Reads documents and multiple-choice questions from .jsonl files and the paper's sets, or makes them from text.

Models answer about the documents or summarise them, and a judge decides (Table 4); lm-evaluation-harness asks the
questions (Tables 1 and 8). Without a network, both come from held-out text.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from diff_lab.data import TextBatches
from diff_lab.measure.measurement import refusal
from diff_transformer.utils.files import parse_json
from diff_transformer.utils.suggestions import quoted, some

# LongBench publishes four of the six sets, 200 documents of each, in one archive.
LONG_BENCH = "https://huggingface.co/datasets/zai-org/LongBench/resolve/main/data.zip"
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
    """A multiple-choice question, asked as "Question: …\\nAnswer:" after a context, or the context alone to continue.

    A space comes between the prompt and a choice, so those that a context ends with are dropped; the context "" scores
    the choices alone.
    """

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
        """The text before a choice."""
        if self.question is None:
            return str(self.context).rstrip(" ")
        return (f"{self.context}\n" if self.context else "") + f"Question: {self.question}\nAnswer:"


class HubSet(NamedTuple):
    """The arguments of `datasets` to load one of the paper's sets, and the names of its columns."""

    load: Mapping[str, Any]  # what `datasets.load_dataset` is called with
    columns: tuple[str, str | None, str]  # of a document, a question (None: a summary is asked for) and a reference


# Table 4's sets, by the paper's names. The paper does not say which of the published forms it took.
PAPER_SETS = {
    "xsum": HubSet(
        {"path": "EdinburghNLP/xsum", "revision": "refs/convert/parquet", "split": "test"},
        ("document", None, "summary"),
    ),
    "cnn_dm": HubSet(
        {"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"}, ("article", None, "highlights")
    ),
    **{
        name: HubSet(
            {"path": "json", "data_files": f"zip://data/{name}.jsonl::{LONG_BENCH}", "split": "train"},
            ("context", question, "answers"),
        )
        for name, question in {"multi_news": None, "qasper": "input", "hotpotqa": "input", "2wikimqa": "input"}.items()
    },
}


def read_lines(path: Path, kind: type[L], name: str) -> list[L]:
    """Read the lines of a .jsonl file that are not empty.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line, which is named, is not of that kind, or there is none. `name` is the name of the lines in
            messages.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of {name} at {str(path)!r}.")
    # Not splitlines(): JSON may hold other characters that it takes for the end of a line.
    lines = {number: line for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()}
    if not lines:
        raise ValueError(f"{path} holds no {name}.")
    read = []
    for number, line in lines.items():
        fields = parse_json(line, f"{path}, line {number}")
        if not isinstance(fields, dict):
            first = next(iter(kind.model_fields))
            raise ValueError(f"{path}, line {number} must be an object with fields such as {first!r}.")
        try:
            read.append(kind.model_validate(fields))
        except ValidationError as error:
            raise ValueError(f"{path}, line {number} {refusal(error, kind, fields)}") from None
    return read


def read_sources(name: str, *, limit: int = 100, characters: int | None = None, seed: int = 0) -> list[Source]:
    """Read documents of a file or of one of the paper's sets, drawn at random if there are more than the limit.

    The name is that of a .jsonl file with the fields "document", "question" (left out: a summary is asked for) and
    "reference" (may be left out), or one of `PAPER_SETS`, which the `datasets` library fetches. Documents keep the
    order of the set. Longer ones are cut to so many characters, at the end of a sentence if there is one. Raises
    FileNotFoundError, or ValueError for an unknown name, a set that cannot be had, a wrong line, or no documents.
    """
    if name in PAPER_SETS:
        sources = _from_hub(name, limit, seed)
    elif name.endswith(".jsonl"):
        lines = read_lines(Path(name), Source, "documents")
        sources = [lines[number] for number in _drawn(len(lines), limit, seed)]
    else:
        raise ValueError(
            f"There are no documents called {name!r}; name a .jsonl file, or one of {', '.join(PAPER_SETS)}."
        )
    return [source.model_copy(update={"document": _cut(source.document, characters)}) for source in sources]


def held_out_sources(batches: TextBatches, tokenizer: Any, *, limit: int, characters: int) -> list[Source]:
    """Make documents to summarise of the first ones, or their parts, in the validation blocks of a text.

    Documents are cut to so many characters as in `read_sources`; shorter ones than half of it are left out.
    """
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


def _drawn(count: int, limit: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(count), min(limit, count)))


def _cut(document: str, characters: int | None) -> str:
    if characters is None or len(document) <= characters:
        return document
    beginning = document[:characters]
    last = max(beginning.rfind(end) for end in (". ", "! ", "? ", ".\n", "\n"))
    # A sentence that ends in the first half would leave too little of the document.
    return beginning[: last + 1].rstrip() if last >= characters // 2 else beginning


def _from_hub(name: str, limit: int, seed: int) -> list[Source]:
    from datasets import load_dataset  # takes a second to import, and a local file does without

    load: Callable[..., Any] = load_dataset
    try:
        rows = load(**PAPER_SETS[name].load)
    except Exception as error:  # the network, the Hub, a changed set: `datasets` raises what its parts raise
        raise ValueError(
            f"The set {name!r} cannot be had through the datasets library; write its documents to a .jsonl file with "
            f"the fields document, question and reference, and name that file: {' '.join(str(error).split())}"
        ) from error
    document, question, reference = PAPER_SETS[name].columns
    for column in (document, question, reference):
        if column is not None and column not in rows.column_names:
            raise ValueError(f"The set {name!r} has no column {column!r}, only {some(map(quoted, rows.column_names))}.")
    sources = []
    for row in rows.select(_drawn(len(rows), limit, seed)):
        if row[document].strip():  # some articles of CNN/DM are empty
            # Of several answers that count as right, the first.
            answers = row[reference] if isinstance(row[reference], list) else [row[reference]]
            asked = None if question is None else row[question]
            sources.append(Source(document=row[document], question=asked, reference=next(iter(answers), None) or None))
    if not sources:
        raise ValueError(f"The set {name!r} holds no documents.")
    return sources


def cloze_questions(batches: TextBatches, tokenizer: Any, *, count: int, characters: int) -> list[Question]:
    """Make at most so many questions from the validation blocks of a text.

    A question is the beginning of a block; its choices are the text that follows and the texts at the same place of
    other blocks, in random order. Of the characters of a question with its answer two thirds are the beginning. Raises
    ValueError if the text has fewer pieces than a question has choices.
    """
    endings: dict[str, str] = {}  # of each beginning
    blocks = 0
    for block in _blocks(batches):
        text = " ".join(str(tokenizer.decode(block, skip_special_tokens=True)).split())[:characters]
        # Divided at a blank: the harness puts one between a question and its answer.
        beginning, _, word = text[: characters * 2 // 3].rpartition(" ")
        ending = (word + text[characters * 2 // 3 :]).strip()
        if len(text) == characters and beginning and ending:
            endings[beginning] = ending
            blocks += 1
        if blocks == count:
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
