"""Measures contextual hallucination: whether all of an answer follows from the document it is about (Table 4)."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

from diff_lab.data import Batches
from diff_lab.measure.accuracy import proportion_record
from diff_lab.measure.decoding import greedy_answers, prompt_tokens
from diff_lab.measure.judge import FORM, TASK, Judge, Judgement, JudgeOptions, evidence, judge_of
from diff_lab.measure.measurement import Count, EvalInput, Measurement, Text
from diff_lab.measure.question_files import Source, held_out_sources, read_sources
from diff_lab.measure.standard import text_part
from diff_lab.record import Result
from diff_transformer.utils.files import parse_json


class Judgements:
    """A judge with a memory: each judgement is written down, so that none is asked for twice.

    The .jsonl file `path` may exist: each judgement is added, and on the disk, as soon as it is made. A line holds the
    judge's name, the key of the judged answer and the reply. Without a path nothing is written. Two processes that use
    one file at once lose nothing but may ask the same. Raises FileNotFoundError if the file's folder does not exist,
    and ValueError, which names the line, if the file holds something else.
    """

    def __init__(self, judge: Judge, path: Path | None = None) -> None:
        self.judge, self.path = judge, path
        self._known: dict[str, Judgement] = {}
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"The folder of the file of judgements {str(path)!r} does not exist.")
        if path is None or not path.exists():
            return
        data = path.read_bytes()
        complete = data.rfind(b"\n") + 1
        if complete < len(data):  # a kill in the middle of a line: that judgement is asked for again
            with path.open("r+b") as file:
                file.truncate(complete)
        for number, line in enumerate(data[:complete].split(b"\n")[:-1], start=1):
            try:
                kept = parse_json(line, str(path))
                self._known[kept["key"]] = Judgement.model_validate(kept)
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{path}, line {number} is no judgement; name a new file, or one that this command has written."
                ) from None

    def of(self, source: Source, answer: str) -> Judgement:
        """Return the judgement of one answer, asked for if it is not known. Raises JudgeError as the judge."""
        # Who judges, and all that it reads.
        key = hashlib.sha256(json.dumps([self.judge.name, TASK, FORM, evidence(source, answer)]).encode()).hexdigest()
        if key not in self._known:
            judgement = self._known[key] = self.judge.judge(source, answer)
            if self.path is not None:
                line = {"key": key, "judge": self.judge.name, "question": source.question, "answer": answer}
                with self.path.open("ab") as file:
                    file.write(json.dumps(line | judgement.model_dump(), ensure_ascii=True).encode() + b"\n")
        return self._known[key]


def prompt_of(source: Source) -> str:
    """Return the prompt of a model: the document and the question, or the request to summarise it."""
    if source.question is None:
        return f"Document:\n{source.document}\n\nA summary of the document in a few sentences:\n"
    return f"Document:\n{source.document}\n\nQuestion about the document: {source.question}\nAnswer:"


def answer_of(source: Source, text: str) -> str:
    """Return the answer in a model's text: one line to a question, one paragraph of a summary.

    A model that only ever continues text goes on to the next question or document.
    """
    text = text.strip()
    return (text.split("\n\n") if source.question is None else text.splitlines() or [""])[0].strip()


def states_nothing(answer: str) -> bool:
    """Return whether an answer has no letter and no digit."""
    return not any(map(str.isalnum, answer))


def hallucination_records(
    measured: EvalInput, judged: Sequence[tuple[str, Judgement]], name: str, judge: str
) -> list[Result]:
    """Return the share of answers that are free of hallucination, among those whose judgement could be read.

    With it, the share of answers that state nothing, and the judge's tokens read and written. Raises ValueError if no
    judgement could be read.
    """
    verdicts = [judgement.supported for _, judgement in judged]
    readable = [verdict for verdict in verdicts if verdict is not None]
    if not readable:
        raise ValueError(f"None of the {len(judged)} replies of the judge {judge!r} holds a verdict.")
    silent = sum(states_nothing(answer) for answer, _ in judged)
    cost = sum(judgement.tokens for _, judgement in judged)
    name = f"hallucination/{name}"
    accuracy = proportion_record(
        measured,
        name,
        readable,
        seed=None,
        documents=tuple((float(bool(verdict)), float(verdict is not None)) for verdict in verdicts),
        method=(
            f"Wilson's score interval over documents; judge: {judge}; {silent} answers state nothing and count as not "
            f"supported; {len(judged) - len(readable)} replies without a verdict are left out"
        ),
    )
    shared: dict[str, Any] = {"seed": None, "n": len(judged)}
    records = [accuracy, measured.record(f"{name}/silent_answers", silent / len(judged), **shared)]
    if cost:  # not of a judge that costs nothing, or does not tell
        records.append(measured.record(f"{name}/judge_tokens", float(cost), unit="tokens", **shared))
    return records


class Hallucination(JudgeOptions, Measurement):
    """The share of answers about documents that a judge finds supported by them (Table 4).

    An answer without a letter or a digit states nothing. It is not supported, and no judge is asked: a model that stays
    silent would be the best one otherwise.
    """

    needs = None

    sources: Text = Field(
        default="", description=".jsonl files, separated by commas; nothing for an experiment's held-out text"
    )
    documents: Count = Field(default=100, description="documents of each set, at most")
    characters: Count = Field(default=8000, description="characters of a document, at most")
    new_tokens: Count = Field(default=128, description="tokens of an answer, at most")
    judgements: Text = Field(default="judgements.jsonl", description="the file of all judgements; nothing for none")

    def check(self, batches: Batches | None, tokenizer: Any) -> tuple[Judge, dict[str, list[Source]]]:
        """Return the judge, and the documents by the name of their set: the stem of a file, or "held_out" for pieces of
        an experiment's text. Raises ValueError if there are none, or two sets of one name.
        """
        judge = judge_of(self)
        if not self.sources and batches is not None:
            pieces = held_out_sources(text_part(batches), tokenizer, self.documents, self.characters)
            return judge, {"held_out": pieces}
        paths = [Path(path.strip()) for path in self.sources.split(",") if path.strip()]
        if not paths or len({path.stem for path in paths}) < len(paths):
            raise ValueError(f"Name .jsonl files of documents, each once, separated by commas; got {self.sources!r}.")
        return judge, {path.stem: read_sources(path, self.documents, self.characters) for path in paths}

    def run(self, measured: EvalInput) -> list[Result]:
        if measured.tokenizer is None:
            raise ValueError("Documents are read as text, and this model has no tokenizer.")
        model, tokenizer = measured.model, measured.tokenizer
        judge, sets = self.check(measured.batches, tokenizer)
        folder = Path() if measured.training is None else measured.training.folder
        judgements = Judgements(judge, folder / self.judgements if self.judgements else None)
        records = []
        for name, sources in sets.items():
            rows = prompt_tokens(model, tokenizer, [prompt_of(source) for source in sources], self.new_tokens)
            answers = greedy_answers(model, tokenizer, rows, self.new_tokens)
            judged = []
            for source, tokens in zip(tqdm(sources, f"judging {name}", disable=None), answers, strict=True):
                answer = answer_of(source, tokenizer.decode(tokens, skip_special_tokens=True))
                silence = Judgement(supported=False, reply="")
                judged.append((answer, silence if states_nothing(answer) else judgements.of(source, answer)))
            records += hallucination_records(measured, judged, name, judge.name)
        return records
