"""Reads documents to answer about or to summarise, from a .jsonl file or the paper's sets by name (Table 4)."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.data import TextBatches
from diff_transformer.storage.files import parse_json

FIELDS = ("document", "question", "reference")
# LongBench publishes four of the six sets, 200 documents of each, in one archive.
LONG_BENCH = "https://huggingface.co/datasets/zai-org/LongBench/resolve/main/data.zip"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A document, what is asked about it (None: a summary), and what a person answered, if that is known."""

    document: str
    question: str | None = None
    reference: str | None = None


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """Where the `datasets` library finds one of the paper's sets, and what its columns are called.

    `load` is what `datasets.load_dataset` is called with; `columns` names the columns of a document, a question
    (None: a summary is asked for) and a reference.
    """

    load: Mapping[str, Any]
    columns: tuple[str, str | None, str]


def _long_bench(name: str, question: str | None = "input") -> HubSet:
    return HubSet(
        load={"path": "json", "data_files": f"zip://data/{name}.jsonl::{LONG_BENCH}", "split": "train"},
        columns=("context", question, "answers"),
    )


# Table 4's sets, by the paper's names. The paper does not say which of the published forms it took.
PAPER_SETS: dict[str, HubSet] = {
    "xsum": HubSet(
        load={"path": "EdinburghNLP/xsum", "revision": "refs/convert/parquet", "split": "test"},
        columns=("document", None, "summary"),
    ),
    "cnn_dm": HubSet(
        load={"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"},
        columns=("article", None, "highlights"),
    ),
    "multi_news": _long_bench("multi_news", None),
    "qasper": _long_bench("qasper"),
    "hotpotqa": _long_bench("hotpotqa"),
    "2wikimqa": _long_bench("2wikimqa"),
}


def read_sources(name: str, *, limit: int = 100, characters: int | None = None, seed: int = 0) -> list[Source]:
    """Documents of a file or of one of the paper's sets, drawn at random where there are more than are wanted.

    Args:
        name: a .jsonl file with the fields "document", "question" (left out: a summary is asked for) and "reference"
            (may be left out), or one of :data:`PAPER_SETS`, which the `datasets` library fetches.
        limit: at most so many documents (the paper takes 100), in the order of the set.
        characters: longer documents are cut to so many, at the end of a sentence where there is one. Everybody reads
            the document that was cut: the models that are compared, and the judge.
        seed: of the draw.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown name, a set that cannot be had, a line that is wrong, or no documents.
    """
    if limit < 1 or (characters is not None and characters < 1):
        raise ValueError(f"limit and characters are at least 1, got limit={limit}, characters={characters}.")
    if name in PAPER_SETS:
        sources = _from_hub(name, limit, seed)
    elif name.endswith(".jsonl"):
        lines = list(_read_lines(Path(name)))
        sources = [lines[place] for place in _drawn(len(lines), limit, seed)]
    else:
        raise ValueError(
            f"There are no documents called {name!r}; name a .jsonl file, or one of {', '.join(PAPER_SETS)}."
        )
    return [
        Source(document=_cut(source.document, characters), question=source.question, reference=source.reference)
        for source in sources
    ]


def held_out_sources(batches: TextBatches, tokenizer: Any, *, limit: int, characters: int) -> list[Source]:
    """Documents to summarise from validation text: what needs no data but the text that a model was trained on.

    Args:
        batches: the text.
        tokenizer: what it was tokenised with.
        limit: at most so many, the first whole documents or their parts that stand in the validation blocks.
        characters: as in `read_sources`; shorter ones than half of it are left out.
    """
    found: list[Source] = []
    end = tokenizer.eos_token_id
    for batch in batches.validation_batches():
        for row in batch["input_ids"].tolist():
            start = row.index(end) + 1 if end in row else 0
            stop = row.index(end, start) if end in row[start:] else len(row)
            text = str(tokenizer.decode(row[start:stop], skip_special_tokens=True)).strip()
            if len(text) >= characters / 2:
                found.append(Source(document=_cut(text, characters)))
            if len(found) == limit:
                return found
    if not found:
        raise ValueError(f"No document of the validation text has {characters // 2} characters in its block.")
    return found


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


def _read_lines(path: Path) -> Iterator[Source]:
    if not path.is_file():
        raise FileNotFoundError(f"The documents {str(path)!r} are no file.")
    try:
        # Not splitlines(): JSON may hold other characters that it takes for the end of a line.
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    found = False
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = True
            yield _source_of_line(line, f"{path}, line {number}")
    if not found:
        raise ValueError(f"{path} holds no documents.")


def _source_of_line(line: str, where: str) -> Source:
    fields = parse_json(line, where)
    if not isinstance(fields, dict) or "document" not in fields:
        raise ValueError(f"{where} must be an object with the field 'document'.")
    for name in FIELDS:
        value = fields.get(name)
        if (name == "document" or value is not None) and not (isinstance(value, str) and value.strip()):
            raise ValueError(f"{where}: {name!r} must be a text that is not empty, got {value!r:.60}.")
    return Source(document=fields["document"], question=fields.get("question"), reference=fields.get("reference"))


def _from_hub(name: str, limit: int, seed: int) -> list[Source]:
    found = PAPER_SETS[name]
    rows = _load(name, found.load)
    document, question, reference = found.columns
    for column in (document, question, reference):
        if column is not None and column not in rows.column_names:
            raise ValueError(f"The set {name!r} has no column {column!r}, only {', '.join(rows.column_names)}.")
    chosen: Iterable[Mapping[str, Any]] = rows.select(_drawn(len(rows), limit, seed))
    return [
        Source(
            document=str(row[document]),
            question=None if question is None else str(row[question]),
            reference=_first(row[reference]),
        )
        for row in chosen
        if row[document].strip()  # some articles of CNN/DM are empty
    ]


def _load(name: str, arguments: Mapping[str, Any]) -> Any:
    from datasets import load_dataset  # takes a second to import, and a local file does without

    load: Callable[..., Any] = load_dataset
    try:
        return load(**arguments)
    except Exception as error:  # the network, the Hub, a changed set: `datasets` raises what its parts raise
        raise ValueError(
            f"The set {name!r} cannot be had through the datasets library; write its documents to a .jsonl file with "
            f"the fields document, question and reference, and name that file: {' '.join(str(error).split())}"
        ) from error


def _first(reference: Any) -> str | None:
    """One text: of several answers that count as right, the first."""
    if isinstance(reference, list | tuple):
        return str(reference[0]) if reference else None
    return None if reference is None else str(reference)
