"""Measures how many hidden needles are found, and the attention to them, in text and among tokens (Tables 2 and 3)."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diff_transformer.data import NeedleBatches, NeedleDocument, NeedleTask, RetrievalBatches, TextBatches
from diff_transformer.data.needle_task import padded
from diff_transformer.lab.coordinates import NOWHERE, Coordinates
from diff_transformer.lab.measure.accuracy import joint, share_record
from diff_transformer.lab.measure.decoding import greedy_answers
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options, Text
from diff_transformer.lab.measure.retrieval import AttentionMass, AttentionSpans, attention_of_spans, retrieval_answers
from diff_transformer.lab.record import Result
from diff_transformer.lab.statistics import mean_interval

# Where the first queried needle lies, as in the paper.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ACCURACY, JOINT, BY_DEPTH = "needles/accuracy", "needles/joint_accuracy", "needles/accuracy_by_depth"
ATTENTION_METHOD = "Student's t over sequences; mean over heads, layers and queries"

Cell = tuple[int, int]  # needles in the context, and how many of them are asked for


def cell_place(cell: Cell) -> Coordinates:
    """The coordinates of a cell's records."""
    return Coordinates(needles=cell[0], queries=cell[1])


def needle_answers(
    model: Any, tokenizer: Any, documents: Sequence[NeedleDocument], batch_size: int = 16
) -> list[list[bool]]:
    """Which numbers stand in the greedy answers: for each document, one for each queried city.

    An answer has as many tokens as the right one and a few more: no room to list what was not asked for.

    Args:
        model: a causal language model of transformers in evaluation mode.
        tokenizer: what the documents were tokenised with.
        documents: with prompts that the model is to go on from.
        batch_size: prompts at a time.

    Raises:
        ValueError: a document is longer than the model's positions.
    """
    longest = max(len(document.tokens) for document in documents)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"A document has {longest} tokens and the model {model.config.max_position_embeddings} positions; "
            "ask for shorter ones."
        )
    room = max(len(document.tokens) - document.prompt_length for document in documents) + 4
    prompts = [document.tokens[: document.prompt_length] for document in documents]
    answers = greedy_answers(model, tokenizer, prompts, room, batch_size)
    texts = (tokenizer.decode(answer) for answer in answers)
    return [[number in text for number in document.numbers] for document, text in zip(documents, texts, strict=True)]


def needle_records(
    model: Any,
    tokenizer: Any,
    task: NeedleTask,
    variant: str,
    *,
    samples: int = 50,
    depths: Sequence[float] = DEPTHS,
    coordinates: Coordinates = NOWHERE,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Result]:
    """Accuracy over all depths, for each city and for all of a question's jointly, and by depth.

    Args:
        model: a causal language model of transformers in evaluation mode.
        tokenizer: what `task` was made with.
        task: draws the documents.
        variant: what to call the model in the records.
        samples: documents at each depth.
        depths: where the first queried needle lies.
        coordinates: of the records; the numbers of needles and of queries by default.
        seed: of the documents.
        batch_size: documents at a time.
    """
    place = coordinates or cell_place((task.needles, task.queried))
    by_depth = {
        depth: torch.tensor(needle_answers(model, tokenizer, task.sample(samples, seed, depth), batch_size))
        for depth in depths
    }
    return _table_records(torch.cat(list(by_depth.values())), place, variant, seed) + [
        share_record(BY_DEPTH, right, variant=variant, coordinates=Coordinates(place, depth=depth), seed=seed)
        for depth, right in by_depth.items()
    ]


def token_needle_records(
    model: Any,
    task: RetrievalBatches,
    variant: str,
    *,
    sequences: int = 512,
    coordinates: Coordinates = NOWHERE,
    seed: int = 0,
) -> list[Result]:
    """As `needle_records`, of tokens: needles lie anywhere, and each depth is the fifth of the context around it.

    Given the right answers before it, an answer is right under teacher forcing exactly if greedy decoding gives it; the
    joint accuracy is therefore that of greedy decoding.
    """
    place = coordinates or cell_place((task.num_pairs, task.num_queries))
    sample = task.sample(sequences, seed)
    right = retrieval_answers(model, sample)
    records = _table_records(right, place, variant, seed)
    fifth = (sample.depth[:, 0] * len(DEPTHS)).long().clamp(max=len(DEPTHS) - 1)
    for number, depth in enumerate(DEPTHS):
        here = right[fifth == number, :1]
        if len(here):
            records.append(
                share_record(BY_DEPTH, here, variant=variant, coordinates=Coordinates(place, depth=depth), seed=seed)
            )
    return records


def _table_records(right: Tensor, coordinates: Coordinates, variant: str, seed: int) -> list[Result]:
    return [
        share_record(ACCURACY, right, variant=variant, coordinates=coordinates, seed=seed),
        share_record(JOINT, joint(right), variant=variant, coordinates=coordinates, seed=seed),
    ]


def document_attention(model: Any, documents: Sequence[NeedleDocument], batch_size: int = 4) -> AttentionMass:
    """Attention of the tokens that predict the first token of each number, the right answer before them given.

    On the answer is the attention on all tokens of the number; the needle's other words are neither answer nor noise.

    Args:
        model: as `applied_maps` takes it, in evaluation mode.
        documents: with answers.
        batch_size: documents at a time; all maps of a batch are held at once.
    """
    length = max(len(document.tokens) for document in documents)
    spans = AttentionSpans(
        input_ids=padded(documents, length)["input_ids"],
        query_positions=torch.tensor([document.query_positions for document in documents]),
        answer_spans=torch.tensor([document.answer_spans for document in documents]),
        needle_spans=torch.tensor([document.needle_spans for document in documents]),
        context_lengths=torch.tensor([document.context_length for document in documents]),
    )
    return attention_of_spans(model, spans, batch_size)


def attention_records(masses: Iterable[tuple[float, AttentionMass]], variant: str, seed: int) -> list[Result]:
    """Table 3's two measures by both definitions, at each depth: "needles/attention_to_answer_share" and so on."""
    records = []
    for depth, mass in masses:
        for kind, part, better in (("attention_to_answer", "answer", "higher"), ("attention_noise", "noise", "lower")):
            for definition in ("signed", "share"):
                values = getattr(mass, f"{part}_{definition}").double().mean(1)
                records.append(
                    Result(
                        name=f"needles/{kind}_{definition}",
                        variant=variant,
                        value=values.mean().item(),
                        interval=mean_interval(values.tolist()),
                        n=len(values),
                        seed=seed,
                        better=better,  # type: ignore[arg-type]  # mypy sees a str
                        coordinates=Coordinates(depth=depth),
                        method=ATTENTION_METHOD,
                    )
                )
    return records


def haystack(batches: TextBatches, tokenizer: Any) -> str:
    """The text of validation data, put together from its blocks, which overlap by a token."""
    rows = [row for batch in batches.validation_batches() for row in batch["input_ids"].tolist()]
    tokens = [token for number, row in enumerate(rows) for token in (row if number == 0 else row[1:])]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


class NeedleOptions(Options):
    """Which needles are hidden in text, and how many are asked for."""

    needles: Count = Field(default=4, description="cities with a number each in a document")
    queried: Count = Field(default=2, description="cities that a question asks for")
    digits: Count = Field(default=7, description="digits of a number")
    length: Count | None = Field(default=None, description="tokens of a document; as in training unless given")
    lead: Text = Field(default="", description="what stands before a document")
    samples: Count = Field(default=50, description="documents at each depth")


class NeedleAttentionOptions(NeedleOptions):
    """The same, where attention is looked at."""

    needles: Count = Field(default=8, description="cities with a number each in a document")
    queried: Count = Field(default=1, description="cities that a question asks for")
    samples: Count = Field(default=10, description="documents at each depth")


class TokenOptions(Options):
    """How many needles are hidden among noise tokens, and how many are asked for."""

    needles: Count = Field(default=4, description="pairs of tokens in a sequence")
    queried: Count = Field(default=2, description="pairs that are asked for")
    sequences: Count = Field(default=512, description="sequences")


def _task(measured: EvalInput, options: NeedleOptions) -> NeedleTask:
    batches = measured.batches
    if isinstance(batches, NeedleBatches):
        text, length = batches.validation.haystack, batches.validation.length
    elif isinstance(batches, TextBatches):
        text, length = haystack(batches, measured.tokenizer), batches.length
    else:
        raise ValueError("Needles are hidden in text, and the model was not trained on any; measure needle_tokens.")
    return NeedleTask(
        measured.tokenizer,
        text,
        length=options.length or length,
        needles=options.needles,
        queried=options.queried,
        digits=options.digits,
        lead=options.lead,
    )


def _run_needles(measured: EvalInput, options: NeedleOptions) -> list[Result]:
    task = _task(measured, options)
    return needle_records(
        measured.model, measured.tokenizer, task, measured.variant, samples=options.samples, seed=measured.seed
    )


def _run_attention(measured: EvalInput, options: NeedleOptions) -> list[Result]:
    task = _task(measured, options)
    masses = (
        (
            depth,
            document_attention(measured.model, task.sample(options.samples, measured.seed, depth), batch_size=1),
        )
        for depth in DEPTHS
    )
    return attention_records(masses, measured.variant, measured.seed)


def _run_tokens(measured: EvalInput, options: TokenOptions) -> list[Result]:
    if not isinstance(measured.batches, RetrievalBatches):
        raise ValueError("needle_tokens is measured on the retrieval task alone; of a model of text, measure needles.")
    task = measured.batches.asking(options.needles, options.queried)
    return token_needle_records(measured.model, task, measured.variant, sequences=options.sequences, seed=measured.seed)


NEEDLES = Measurement(
    name="needles",
    description="numbers of cities hidden in a text and found again, by generation, at five depths (Table 2, Figure 5)",
    options=NeedleOptions,
    run=_run_needles,
    needs="text",
    any_model=True,
)
NEEDLE_ATTENTION = Measurement(
    name="needle_attention",
    description="attention to such a number and attention noise, by both definitions (Table 3)",
    options=NeedleAttentionOptions,
    run=_run_attention,
    needs="text",
    any_model=True,
)
NEEDLE_TOKENS = Measurement(
    name="needle_tokens",
    description="needles found among noise tokens, as many and as many asked for as the options say",
    options=TokenOptions,
    run=_run_tokens,
    needs="recipe",
)
