"""Measures how many hidden needles are found, and the attention to them, in text and among tokens (Tables 2 and 3)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import Batches, NeedleBatches, NeedleDocument, NeedleTask, RetrievalBatches, TextBatches
from diff_lab.data.batches import padded
from diff_lab.measure.accuracy import joint_levels, share_record, text_levels, token_levels
from diff_lab.measure.decoding import greedy_answers
from diff_lab.measure.measurement import Count, Counts, EvalInput, Measurement, Text
from diff_lab.measure.retrieval import (
    ATTENTION,
    DEFINITIONS,
    AttentionMass,
    AttentionSpans,
    attention_mass,
    attention_of_spans,
    fifth_of,
    retrieval_answers,
)
from diff_lab.record import Baseline, Result
from diff_lab.statistics import mean_interval

# Where the first queried needle lies, as in the paper; among tokens, which fifth of the context it lies in.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ACCURACY, JOINT, BY_DEPTH = "needles/accuracy", "needles/joint_accuracy", "needles/accuracy_by_depth"
# The accuracy in the task whose attention is measured, under a name of its own: both may be measured in one cell.
ATTENTION_ACCURACY = "needles/attention_task_accuracy"
ATTENTION_METHOD = "Student's t over sequences; mean over heads, layers and queries"
ALL_LENGTHS = Coordinates(length="all lengths")
DIGITS = 7  # of a number in the paper's template


def needle_answers(
    model: Any, tokenizer: Any, documents: Sequence[NeedleDocument], batch_size: int = 16
) -> list[list[bool]]:
    """Which numbers stand in the greedy answers: for each document, one for each queried city.

    An answer has as many tokens as the right one and a few more: no room to list what was not asked for. Raises
    ValueError for a document that is longer than the model's positions.
    """
    longest = max(len(document.tokens) for document in documents)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"A document has {longest} tokens and the model {model.config.max_position_embeddings} positions; "
            "ask for shorter ones."
        )
    new_tokens = max(len(document.tokens) - document.prompt_length for document in documents) + 4
    prompts = [document.tokens[: document.prompt_length] for document in documents]
    answers = greedy_answers(model, tokenizer, prompts, new_tokens, batch_size)
    texts = (tokenizer.decode(answer) for answer in answers)
    return [[number in text for number in document.numbers] for document, text in zip(documents, texts, strict=True)]


# Which cities are answered right: of all documents, (documents, queried) boolean, and of those at each depth.
Answers = tuple[Tensor, dict[float, Tensor]]


def text_answers(measured: EvalInput, task: NeedleTask, samples: int, batch_size: int) -> Answers:
    """Of so many documents at each depth."""
    by_depth = {}
    for depth in DEPTHS:
        documents = task.sample(samples, measured.seed, depth)
        by_depth[depth] = torch.tensor(needle_answers(measured.model, measured.tokenizer, documents, batch_size))
    return torch.cat(list(by_depth.values())), by_depth


def token_answers(measured: EvalInput, task: RetrievalBatches, sequences: int) -> Answers:
    """Return the same of tokens: needles lie anywhere, and each depth is the fifth of the context around it.

    Given the right answers before it, an answer is right under teacher forcing exactly if greedy decoding gives it; the
    joint accuracy is therefore that of greedy decoding.
    """
    sample = task.sample(sequences, measured.seed)
    right, fifths = retrieval_answers(measured.model, sample), fifth_of(sample.depth[:, 0])
    return right, {depth: right[fifths == number, :1] for number, depth in enumerate(DEPTHS)}


def answer_records(measured: EvalInput, answers: Answers, coordinates: Coordinates) -> list[Result]:
    """Accuracy over all depths, for each city and for all of a question's jointly, and by depth."""
    right, by_depth = answers
    return [
        share_record(measured, ACCURACY, right, coordinates),
        share_record(measured, JOINT, right.all(1, keepdim=True), coordinates),
        *(
            share_record(measured, BY_DEPTH, at_depth, Coordinates(coordinates, depth=depth))
            for depth, at_depth in by_depth.items()
            if len(at_depth)
        ),
    ]


def document_attention(model: Any, documents: Sequence[NeedleDocument], batch_size: int = 4) -> AttentionMass:
    """Attention of the tokens that predict the first token of each number, the right answer before them given.

    On the answer is the attention on all tokens of the number; the needle's other words are neither answer nor noise.
    """
    length = max(len(document.tokens) for document in documents)
    spans = AttentionSpans(
        input_ids=padded(((document.tokens, document.learned) for document in documents), length)["input_ids"],
        query_positions=torch.tensor([document.query_positions for document in documents]),
        answer_spans=torch.tensor([document.answer_spans for document in documents]),
        needle_spans=torch.tensor([document.needle_spans for document in documents]),
        context_lengths=torch.tensor([document.context_length for document in documents]),
    )
    return attention_of_spans(model, spans, batch_size)


def attention_by_depth(measured: EvalInput, task: NeedleTask | RetrievalBatches, samples: int) -> Iterator[Any]:
    """Each depth, and the attention in about so many sequences whose first queried needle lies there."""
    if isinstance(task, NeedleTask):
        for depth in DEPTHS:
            yield depth, document_attention(measured.model, task.sample(samples, measured.seed, depth), batch_size=1)
        return
    sample = task.sample(len(DEPTHS) * samples, measured.seed)
    mass = attention_mass(measured.model, sample, task.context_length)
    fifths = fifth_of(sample.depth[:, 0])
    for number, depth in enumerate(DEPTHS):
        if (fifths == number).any():
            yield depth, AttentionMass(**{name: values[fifths == number] for name, values in vars(mass).items()})


def attention_records(measured: EvalInput, masses: Iterable[tuple[float, AttentionMass]]) -> list[Result]:
    """Table 3's two measures by both definitions, at each depth: "needles/attention_to_answer_share" and so on."""
    records = []
    for (depth, mass), (kind, part, better), definition in product(masses, ATTENTION, DEFINITIONS):
        values = getattr(mass, f"{part}_{definition}").double().mean(1)
        name, interval = f"needles/{kind}_{definition}", mean_interval(values.tolist())
        fields = {"n": len(values), "better": better, "coordinates": Coordinates(depth=depth), "interval": interval}
        records.append(measured.record(name, values.mean().item(), method=ATTENTION_METHOD, **fields))
    return records


def haystack(batches: TextBatches, tokenizer: Any) -> str:
    """Return the text of validation data, put together from its blocks, which overlap by a token."""
    rows = [row for batch in batches.validation_batches() for row in batch["input_ids"].tolist()]
    tokens = [token for number, row in enumerate(rows) for token in (row if number == 0 else row[1:])]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def baselines_at(needles: int, queried: int, recipe: Any, coordinates: Coordinates = NO_COORDINATES) -> list[Baseline]:
    """Return what the accuracies of `answer_records` come to without retrieval, at the cell of Table 2 unless said."""
    data, coordinates = recipe.data, coordinates or Coordinates(needles=needles, queries=queried)
    if data.kind == "retrieval":
        of_each = token_levels(needles, queried, data.num_values)
        of_all = joint_levels(needles, queried, data.num_values)
        # The first needle that is asked for is the one whose depth is known, and no answer stands before it.
        first = token_levels(needles, 1, data.num_values)
    else:
        digits = getattr(data, "digits", DIGITS)
        of_each, of_all = text_levels(needles, queried, digits), text_levels(needles, queried, digits, joint=True)
        first = of_each
    shared: dict[str, Any] = {"steps": recipe.train.steps, "accuracy": ACCURACY, "accuracy_coordinates": coordinates}
    depths = [Coordinates(coordinates, depth=depth) for depth in DEPTHS]
    return [
        Baseline(name=ACCURACY, coordinates=coordinates, steps=recipe.train.steps, **of_each),
        Baseline(name=JOINT, coordinates=coordinates, steps=recipe.train.steps, **of_all),
        *(Baseline(name=BY_DEPTH, coordinates=depth, **shared, **first) for depth in depths),
    ]


class NeedleMeasurement(Measurement):
    """Which needles are hidden, and how many are asked for. A run that was trained on tokens is asked for tokens."""

    needles: Count = Field(default=4, description="cities with a number each in a document, or pairs of tokens")
    queried: Count = Field(default=2, description="cities or pairs that are asked for")
    digits: Count | None = Field(default=None, description=f"digits of a number; as in training, or {DIGITS}")
    length: Count | None = Field(
        default=None, description="tokens of a document, or before the first query; as in training unless given"
    )
    lead: Text = Field(default="", description="what stands before a document")
    samples: Count = Field(default=50, description="documents at each depth")
    batch_size: Count = Field(default=16, description="documents at a time")

    def check(self, batches: Batches | None, tokenizer: Any) -> NeedleTask | RetrievalBatches:
        """Return the task that the options and the data make."""
        if isinstance(batches, RetrievalBatches):
            return batches.asking(self.needles, self.queried, self.length)
        if isinstance(batches, NeedleBatches):
            trained = batches.validation
            text, length, digits = trained.haystack, trained.length, trained.digits
        elif isinstance(batches, TextBatches):
            text, length, digits = haystack(batches, tokenizer), batches.length, DIGITS
        else:
            raise ValueError(
                "Needles are hidden in text or among the tokens of the retrieval task, and the model was trained on "
                "neither; name a text with --text."
            )
        return NeedleTask(
            tokenizer,
            text,
            length=self.length or length,
            needles=self.needles,
            queried=self.queried,
            digits=self.digits or digits,
            lead=self.lead,
        )

    def answers(self, measured: EvalInput, task: NeedleTask | RetrievalBatches) -> Answers:
        """Which of the cities or pairs the model finds."""
        if isinstance(task, RetrievalBatches):
            return token_answers(measured, task, len(DEPTHS) * self.samples)
        return text_answers(measured, task, self.samples, self.batch_size)


class Needles(NeedleMeasurement):
    """Numbers of cities hidden in a text and found again, by generation, at five depths (Table 2, Figure 5)."""

    def run(self, measured: EvalInput) -> list[Result]:
        return self.records(measured, Coordinates(needles=self.needles, queries=self.queried))

    def records(self, measured: EvalInput, coordinates: Coordinates) -> list[Result]:
        """Return the accuracies, at these coordinates."""
        task = self.check(measured.batches, measured.tokenizer)
        return answer_records(measured, self.answers(measured, task), coordinates)

    def baselines(self, recipe: Any) -> list[Baseline]:
        return baselines_at(self.needles, self.queried, recipe)


class NeedleAttention(NeedleMeasurement):
    """The attention to such a number and attention noise, by both definitions (Table 3)."""

    needles: Count = Field(default=8, description="cities with a number each in a document, or pairs of tokens")
    queried: Count = Field(default=1, description="cities or pairs that are asked for")
    samples: Count = Field(default=10, description="documents at each depth")

    @property
    def coordinates(self) -> Coordinates:
        """Of the accuracy in the same task."""
        return Coordinates(needles=self.needles, queries=self.queried)

    def run(self, measured: EvalInput) -> list[Result]:
        task = self.check(measured.batches, measured.tokenizer)
        right, _ = self.answers(measured, task)
        masses = attention_by_depth(measured, task, self.samples)
        return [
            share_record(measured, ATTENTION_ACCURACY, right, self.coordinates),
            *attention_records(measured, masses),
        ]

    def baselines(self, recipe: Any) -> list[Baseline]:
        accuracy = replace(baselines_at(self.needles, self.queried, recipe)[0], name=ATTENTION_ACCURACY)
        # Where a model looks that does not find the answer means nothing. Signed sums are fixed by construction.
        follows: dict[str, Any] = {"accuracy": accuracy.name, "accuracy_coordinates": self.coordinates}
        names = [f"needles/{kind}_share" for kind, *_ in ATTENTION]
        shares = (
            replace(accuracy, name=name, coordinates=Coordinates(depth=depth), is_accuracy=False, **follows)
            for name, depth in product(names, DEPTHS)
        )
        return [accuracy, *shares]


class NeedleLengths(Measurement):
    """One needle of several found, by the length of the context and the needle's depth (Figure 5)."""

    needles: Count = Field(default=4, description="needles in a document")
    samples: Count = Field(default=100, description="documents at each depth")
    lengths: Counts = Field(default=(1024,), description="tokens of a document, or before the first query")
    batch_size: Count = Field(default=64, description="documents at a time")

    def at_each(self) -> dict[int, Needles]:
        """Return what is measured at each length."""
        shared = {**self.model_dump(exclude={"lengths"}), "queried": 1}
        return {length: Needles(length=length, **shared) for length in self.lengths}

    def check(self, batches: Batches, tokenizer: Any) -> None:
        for needles in self.at_each().values():
            needles.check(batches, tokenizer)

    def run(self, measured: EvalInput) -> list[Result]:
        records = [
            record
            for length, needles in self.at_each().items()
            for record in needles.records(measured, Coordinates(length=length))
            if record.name != JOINT  # of one needle that is the accuracy
        ]
        accuracies = [record for record in records if record.name == ACCURACY]
        mean, count = fmean(record.value for record in accuracies), sum(record.n or 0 for record in accuracies)
        averaged: dict[str, Any] = {"value": mean, "interval": None, "n": count, "method": "mean over lengths"}
        return [replace(accuracies[0], coordinates=ALL_LENGTHS, **averaged), *records]

    def baselines(self, recipe: Any) -> list[Baseline]:
        lengths = [ALL_LENGTHS, *(Coordinates(length=length) for length in self.lengths)]
        return [baseline for length in lengths for baseline in baselines_at(self.needles, 1, recipe, length)]
