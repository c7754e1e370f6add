"""Contextual hallucination (Table 4): whether everything in an answer follows from the document it was given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from diff_transformer.eval.greedy import greedy_answers, prompt_tokens
from diff_transformer.eval.judgements import Judgements
from diff_transformer.eval.sources import Source
from diff_transformer.results import Result, proportion_interval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An answer and what became of it: supported or not, or None where the judge's reply could not be read."""

    answer: str
    supported: bool | None


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
        supported = judgements.of(source, answer).supported if states_something else False
        outcomes.append(Outcome(answer=answer, supported=supported))
    return outcomes


def hallucination_record(outcomes: Sequence[Outcome], arm: str, name: str, judge: str, seed: int | None) -> Result:
    """The share of answers that are free of hallucination, among those whose judgement could be read.

    Args:
        outcomes: from :func:`judged_answers`.
        arm: what to call the model.
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
    return Result(
        name=f"hallucination/{name}",
        arm=arm,
        value=sum(read) / len(read),
        interval=proportion_interval(sum(read), len(read)),
        n=len(read),
        seed=seed,
        better="higher",
        documents=tuple(
            (float(bool(outcome.supported)), float(outcome.supported is not None)) for outcome in outcomes
        ),
        method=(
            f"Wilson's score interval over documents; judge: {judge}; {silent} answers state nothing and count as not "
            f"supported; {len(outcomes) - len(read)} replies without a verdict are left out"
        ),
    )
