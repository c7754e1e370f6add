"""Retrieval of needles as measures that run on a checkpoint alone; see `measures.py`."""

from typing import Any

from diff_transformer.data import NeedleBatches, NeedleTask, RetrievalBatches, TextBatches
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.eval.needles import (
    DEPTHS,
    attention_records,
    depth_name,
    document_attention,
    needle_records,
    token_needle_records,
)
from diff_transformer.results import Result


def haystack(batches: TextBatches, tokenizer: Any) -> str:
    """The text of validation data, put together from its blocks, which overlap by a token."""
    rows = [row for batch in batches.validation_batches() for row in batch["input_ids"].tolist()]
    tokens = [token for number, row in enumerate(rows) for token in (row if number == 0 else row[1:])]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def _task(subject: Subject) -> NeedleTask:
    options, batches = subject.options, subject.batches
    if isinstance(batches, NeedleBatches):
        text, length = batches.validation.haystack, batches.validation.length
    elif isinstance(batches, TextBatches):
        text, length = haystack(batches, subject.tokenizer), batches.length
    else:
        raise ValueError("Needles are hidden in text, and the model was not trained on any; measure needle_tokens.")
    return NeedleTask(
        subject.tokenizer,
        text,
        length=options["length"] or length,
        needles=options["needles"],
        queried=options["queried"],
        digits=options["digits"],
        lead=options["lead"],
    )


def _needles(subject: Subject) -> list[Result]:
    samples = subject.options["samples"]
    return needle_records(
        subject.model, subject.tokenizer, _task(subject), subject.arm, samples=samples, seed=subject.seed
    )


def _attention(subject: Subject) -> list[Result]:
    task, samples = _task(subject), subject.options["samples"]
    masses = (
        (depth_name(depth), document_attention(subject.model, task.sample(samples, subject.seed, depth), batch_size=1))
        for depth in DEPTHS
    )
    return attention_records(masses, subject.arm, subject.seed)


def _tokens(subject: Subject) -> list[Result]:
    options = subject.options
    if not isinstance(subject.batches, RetrievalBatches):
        raise ValueError("needle_tokens is measured on the retrieval task alone; of a model of text, measure needles.")
    task = subject.batches.asking(options["needles"], options["queried"])
    return token_needle_records(subject.model, task, subject.arm, sequences=options["sequences"], seed=subject.seed)


_TEMPLATE = {"needles": 4, "queried": 2, "digits": 7, "length": None, "lead": ""}

NEEDLES = Measure(
    shows="numbers of cities hidden in a text and found again, by generation, for five depths (Table 2, Figure 5)",
    measure=_needles,
    needs="text",
    any_model=True,
    options={**_TEMPLATE, "samples": 50},
)
NEEDLE_ATTENTION = Measure(
    shows="attention to such a number and attention noise, by both definitions (Table 3)",
    measure=_attention,
    needs="text",
    any_model=True,
    options={**_TEMPLATE, "needles": 8, "queried": 1, "samples": 10},
)
NEEDLE_TOKENS = Measure(
    shows="needles found among noise tokens, as many and as many asked for as the options say",
    measure=_tokens,
    needs="recipe",
    options={"needles": 4, "queried": 2, "sequences": 512},
)
