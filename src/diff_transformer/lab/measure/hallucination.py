"""Measures contextual hallucination: whether all of an answer follows from the document it is about (Table 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # it ships no types

from diff_transformer.data import Batches
from diff_transformer.lab.measure.decoding import greedy_answers, prompt_tokens
from diff_transformer.lab.measure.hallucination_data import PAPER_SETS, Source, held_out_sources, read_sources
from diff_transformer.lab.measure.judge import Account, Judge, Judgements
from diff_transformer.lab.measure.judge_endpoint import JudgeOptions, judge_of
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Text
from diff_transformer.lab.measure.standard import text_part
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import proportion_interval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An answer and what became of it.

    Attributes:
        answer: as the model wrote it.
        supported: or not, or None where the judge's reply could not be read.
        tokens: read and written by the judge, as far as it tells.
    """

    answer: str
    supported: bool | None
    tokens: int = 0


def prompt_of(source: Source) -> str:
    """What a model is given: the document and the question, or the request to summarise it."""
    if source.question is None:
        return f"Document:\n{source.document}\n\nA summary of the document in a few sentences:\n"
    return f"Document:\n{source.document}\n\nQuestion about the document: {source.question}\nAnswer:"


def answer_of(source: Source, text: str) -> str:
    """The answer in what a model wrote: one line to a question, one paragraph of a summary.

    A model that only ever continues text goes on to the next question or document.
    """
    text = text.strip()
    return (text.split("\n\n") if source.question is None else text.splitlines() or [""])[0].strip()


def judged_answers(
    model: Any,
    tokenizer: Any,
    sources: Sequence[Source],
    judgements: Judgements,
    *,
    new_tokens: int = 128,
    batch_size: int = 16,
) -> list[Outcome]:
    """Have a model answer greedily and its answers judged, a batch after the other.

    An answer without a letter or a digit states nothing. It is not supported, and no judge is asked: a model that
    stays silent would be the best one otherwise.

    Args:
        model: any causal language model of transformers, in evaluation mode.
        tokenizer: its tokenizer.
        sources: the documents.
        judgements: who judges, and what is known already.
        new_tokens: the longest answer.
        batch_size: answers that are written at a time.

    Returns:
        An outcome for each source, in their order.

    Raises:
        ValueError: before anything is written or asked, where a document does not fit the model's context.
        JudgeError: the judge cannot be asked. What it has said is kept; the same call goes on from there.
    """
    rows = prompt_tokens(model, tokenizer, [prompt_of(source) for source in sources], new_tokens)
    outcomes = []
    for source, tokens in zip(sources, greedy_answers(model, tokenizer, rows, new_tokens, batch_size), strict=True):
        answer = answer_of(source, tokenizer.decode(tokens, skip_special_tokens=True))
        states_something = any(character.isalnum() for character in answer)
        if states_something:
            judged = judgements.of(source, answer)
            tokens_judged = judged.prompt_tokens + judged.reply_tokens
            outcomes.append(Outcome(answer=answer, supported=judged.supported, tokens=tokens_judged))
        else:
            outcomes.append(Outcome(answer=answer, supported=False))
    return outcomes


def hallucination_records(
    outcomes: Sequence[Outcome], variant: str, name: str, judge: str, seed: int | None
) -> list[Result]:
    """The share of answers that are free of hallucination, among those whose judgement could be read.

    With it, the share of answers that state nothing, and what the judge read and wrote.

    Args:
        outcomes: from :func:`judged_answers`.
        variant: what to call the model.
        name: of the set of documents.
        judge: who judged.
        seed: of the model.

    Raises:
        ValueError: no judgement could be read.
    """
    read = [outcome.supported for outcome in outcomes if outcome.supported is not None]
    if not read:
        raise ValueError(f"None of the {len(outcomes)} replies of the judge {judge!r} holds a verdict.")
    silent = sum(not any(map(str.isalnum, outcome.answer)) for outcome in outcomes)
    cost = sum(outcome.tokens for outcome in outcomes)
    accuracy = Result(
        name=f"hallucination/{name}",
        variant=variant,
        value=sum(read) / len(read),
        interval=proportion_interval(sum(read), len(read)),
        n=len(read),
        seed=seed,
        better="higher",
        documents=tuple((float(bool(outcome.supported)), float(outcome.supported is not None)) for outcome in outcomes),
        method=(
            f"Wilson's score interval over documents; judge: {judge}; {silent} answers state nothing and count as not "
            f"supported; {len(outcomes) - len(read)} replies without a verdict are left out"
        ),
    )
    shared: dict[str, Any] = {"variant": variant, "n": len(outcomes), "seed": seed}
    records = [accuracy, Result(name=f"{accuracy.name}/silent_answers", value=silent / len(outcomes), **shared)]
    if cost:  # not of a judge that costs nothing, or does not tell
        records.append(Result(name=f"{accuracy.name}/judge_tokens", value=float(cost), unit="tokens", **shared))
    return records


def measure_hallucination(
    model: Any,
    tokenizer: Any,
    sets: Mapping[str, Sequence[Source]],
    judge: Judge,
    variant: str,
    *,
    journal: Path | None,
    new_tokens: int,
    seed: int | None = None,
) -> list[Result]:
    """Table 4's protocol on sets of documents; what it costs is shown while it runs.

    Args:
        model, tokenizer, new_tokens: as in :func:`judged_answers`.
        sets: name → documents.
        judge: who judges.
        variant: what to call the model.
        journal: the file of all judgements, see `Judgements`; None forgets them.
        seed: of the model, for the records.

    Raises:
        ValueError, JudgeError: as :func:`judged_answers`.
    """
    records = []
    with tqdm(total=sum(map(len, sets.values())), desc=f"judging {variant}", disable=None) as bar:

        def tell(account: Account) -> None:
            bar.update(account.asked + account.kept - bar.n)
            bar.set_postfix_str(str(account))

        judgements = Judgements(judge, journal, tell)
        for name, sources in sets.items():
            outcomes = judged_answers(model, tokenizer, sources, judgements, new_tokens=new_tokens)
            records += hallucination_records(outcomes, variant, name, judge.name, seed)
    return records


def read_sets(names: str, *, documents: int, characters: int) -> dict[str, list[Source]]:
    """The sets in a list of names, separated by commas: :func:`read_sources` of each; a file is called by its stem.

    Raises:
        ValueError: there are none, or two of one name.
    """
    listed = [name.strip() for name in names.split(",") if name.strip()]
    called = [Path(name).stem if name.endswith(".jsonl") else name for name in listed]
    if not listed or len(set(called)) < len(called):
        raise ValueError(
            f"Name documents, each once: .jsonl files or {', '.join(PAPER_SETS)}, separated by commas; got {names!r}."
        )
    return {
        name: read_sources(place, limit=documents, characters=characters)
        for name, place in zip(called, listed, strict=True)
    }


class HallucinationOptions(JudgeOptions):
    """Which documents are answered about, and who judges the answers."""

    sources: Text = Field(
        default="",
        description=f".jsonl files or {', '.join(PAPER_SETS)}, separated by commas; nothing for an experiment's text",
    )
    documents: Count = Field(default=100, description="documents of each set, at most")
    characters: Count = Field(default=8000, description="characters of a document, at most")
    new_tokens: Count = Field(default=128, description="tokens of an answer, at most")
    judgements: Text = Field(default="judgements.jsonl", description="the file of all judgements; nothing for none")


def _sets(options: HallucinationOptions, batches: Batches | None, tokenizer: Any) -> dict[str, list[Source]]:
    """The documents that the options name; of an experiment's run, pieces of its held-out text unless they do."""
    if options.sources or batches is None:
        return read_sets(options.sources, documents=options.documents, characters=options.characters)
    text = text_part(batches)
    return {"held_out": held_out_sources(text, tokenizer, limit=options.documents, characters=options.characters)}


def _run(measured: EvalInput, options: HallucinationOptions) -> list[Result]:
    if measured.tokenizer is None:
        raise ValueError("Documents are read as text, and this model has no tokenizer.")
    folder = Path() if measured.training is None else measured.training.folder
    return measure_hallucination(
        measured.model,
        measured.tokenizer,
        _sets(options, measured.batches, measured.tokenizer),
        judge_of(options, str(measured.model.device)),
        measured.variant,
        journal=folder / options.judgements if options.judgements else None,
        new_tokens=options.new_tokens,
    )


HALLUCINATION = Measurement(
    name="hallucination",
    description="the share of answers about documents that a judge finds supported by them (Table 4)",
    options=HallucinationOptions,
    run=_run,
    needs=None,
    any_model=True,
    check=lambda options, *data: (judge_of(options), _sets(options, *data)),
)
