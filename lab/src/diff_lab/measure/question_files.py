"""Reads documents and multiple-choice questions from .jsonl files and the paper's sets, or makes them from text.

Models answer about the documents or summarise them, and a judge decides (Table 4); lm-evaluation-harness asks the
questions (Tables 1 and 8). Where there is no network, both come from held-out text.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from diff_lab.data import TextBatches
from diff_transformer.utils.files import parse_json
from diff_transformer.utils.suggestions import quoted, some

# LongBench publishes four of the six sets, 200 documents of each, in one archive.
LONG_BENCH = "https://huggingface.co/datasets/zai-org/LongBench/resolve/main/data.zip"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document, what is asked about it (None: a summary), and what a person answered, if that is known."""

    document: str
    question: str | None = None
    reference: str | None = None


class HubSet(NamedTuple):
    """Where the `datasets` library finds one of the paper's sets, and what its columns are called."""

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


def read_sources(name: str, *, limit: int = 100, characters: int | None = None, seed: int = 0) -> list[Source]:
    """Documents of a file or of one of the paper's sets, drawn at random where there are more than the limit.

    The name is that of a .jsonl file with the fields "document", "question" (left out: a summary is asked for) and
    "reference" (may be left out), or one of `PAPER_SETS`, which the `datasets` library fetches. Documents keep the
    order of the set. Longer ones are cut to so many characters, at the end of a sentence where there is one. Raises
    FileNotFoundError, or ValueError for an unknown name, a set that cannot be had, a wrong line, or no documents.
    """
    if name in PAPER_SETS:
        sources = _from_hub(name, limit, seed)
    elif name.endswith(".jsonl"):
        lines = [_source(fields, line) for line, fields in _objects(Path(name), "documents", "the field 'document'")]
        sources = [lines[number] for number in _drawn(len(lines), limit, seed)]
    else:
        raise ValueError(
            f"There are no documents called {name!r}; name a .jsonl file, or one of {', '.join(PAPER_SETS)}."
        )
    return [replace(source, document=_cut(source.document, characters)) for source in sources]


def held_out_sources(batches: TextBatches, tokenizer: Any, *, limit: int, characters: int) -> list[Source]:
    """Documents to summarise: the first ones, or their parts, that stand in the validation blocks of a text.

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


def _objects(path: Path, kind: str, fields: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON object of each line that is not empty, with the name of the line."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of {kind} at {str(path)!r}.")
    # Not splitlines(): JSON may hold other characters that it takes for the end of a line.
    lines = {number: line for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line.strip()}
    if not lines:
        raise ValueError(f"{path} holds no {kind}.")
    for number, line in lines.items():
        line_name = f"{path}, line {number}"
        parsed = parse_json(line, line_name)
        if not isinstance(parsed, dict):
            raise ValueError(f"{line_name} must be an object with {fields}.")
        yield line_name, parsed


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _source(fields: Mapping[str, Any], line: str) -> Source:
    if "document" not in fields:
        raise ValueError(f"{line} must be an object with the field 'document'.")
    for name in ("document", "question", "reference"):
        value = fields.get(name)
        if (name == "document" or value is not None) and not _is_text(value):
            raise ValueError(f"{line}: {name!r} must be a text that is not empty, got {quoted(value)}.")
    return Source(document=fields["document"], question=fields.get("question"), reference=fields.get("reference"))


def _drawn(count: int, limit: int, seed: int) -> list[int]:
    if count == 0:
        raise ValueError("There are no documents.")
    return sorted(random.Random(seed).sample(range(count), min(limit, count)))


def _cut(document: str, characters: int | None) -> str:
    if characters is None or len(document) <= characters:
        return document
    beginning = document[:characters]
    ends = [beginning.rfind(end) for end in (". ", "! ", "? ", ".\n", "\n")]
    # A sentence that ends in the first half would leave too little of the document.
    return beginning[: max(ends) + 1].rstrip() if max(ends) >= characters // 2 else beginning


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
            sources.append(
                Source(
                    document=str(row[document]),
                    question=None if question is None else str(row[question]),
                    reference=str(answers[0]) if answers and answers[0] is not None else None,
                )
            )
    return sources


def read_questions(path: Path) -> list[dict[str, Any]]:
    """The ``prompt``, ``choices`` and ``answer`` of each question of a file, one JSON object to a line.

    Fields: ``question`` (asked as "Question: …\\nAnswer:"), ``context`` (text that stands before it, or is itself what
    the choices continue; "" scores the choices alone), ``choices`` (two or more different texts) and ``answer`` (the
    number of the right one, counted from 0). One of ``question`` and ``context`` may be missing. A space comes between
    the prompt and a choice, so those that a context ends with are dropped. Empty lines are skipped, other fields are
    left alone. Raises FileNotFoundError, or ValueError that names the line and the field that is wrong.
    """
    lines = _objects(path, "questions", "the fields question or context, choices and answer")
    return [_question(fields, line) for line, fields in lines]


def _question(fields: Mapping[str, Any], line: str) -> dict[str, Any]:
    if missing := [name for name in ("choices", "answer") if name not in fields]:
        raise ValueError(f"{line} lacks the field {missing[0]!r}.")
    choices, answer = fields["choices"], fields["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(_is_text(choice) for choice in choices):
        raise ValueError(
            f"{line}: 'choices' must be a list of two or more texts that are not empty, got {quoted(choices)}."
        )
    if len(set(choices)) < len(choices):
        raise ValueError(f"{line}: 'choices' must differ from each other, got {quoted(choices)}.")
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(
            f"{line}: 'answer' must be the number of a choice, 0 to {len(choices) - 1}, got {quoted(answer)}."
        )
    context, question = fields.get("context"), fields.get("question")
    if context is None and question is None:
        raise ValueError(f"{line} lacks a field 'question' or 'context'.")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"{line}: 'context' must be a text, got {quoted(context)}.")
    if question is not None and not _is_text(question):
        raise ValueError(f"{line}: 'question' must be a text that is not empty, got {quoted(question)}.")
    prompt = (f"{context}\n" if context else "") + f"Question: {question}\nAnswer:"
    return {"prompt": str(context).rstrip(" ") if question is None else prompt, "choices": choices, "answer": answer}


CHOICES = 4


def cloze_questions(batches: TextBatches, tokenizer: Any, *, count: int, characters: int) -> list[dict[str, Any]]:
    """At most so many questions as `read_questions` gives them, from the validation blocks of a text.

    A question is the beginning of a block; its choices are what follows there and what stands at the same place of
    other blocks, in random order. Of the characters of a question with its answer two thirds are the beginning. Raises
    ValueError where the text has fewer pieces than a question has choices.
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
            questions.append({"prompt": beginning, "choices": choices, "answer": choices.index(ending)})
    if not questions:
        raise ValueError(
            f"The validation text has {len(endings)} pieces of {characters} characters, and the choices of a "
            f"question are {CHOICES} of them: give more text."
        )
    return questions
