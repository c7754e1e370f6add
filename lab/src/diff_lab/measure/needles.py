"""Measures how many hidden needles are found, and the attention to them, in text and among tokens (Tables 2 and 3)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import (
    Batches,
    NeedleBatches,
    NeedleDocument,
    NeedleTask,
    RetrievalBatches,
    RetrievalSample,
    TextBatches,
)
from diff_lab.data.batches import padded
from diff_lab.measure.accuracy import joint_levels, share_record, text_levels, token_levels
from diff_lab.measure.decoding import greedy_answers
from diff_lab.measure.measurement import Count, Counts, EvalInput, Measurement
from diff_lab.measure.retrieval import ATTENTION, attention_mass, attention_of_spans, fifth_of, retrieval_answers
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


def document_attention(model: Any, documents: Sequence[NeedleDocument]) -> Tensor:
    """Measure attention of the tokens that predict the first token of each number, the right answer before them given.

    On the answer is the attention on all tokens of the number; the needle's other words are neither answer nor noise.
    """
    length = max(len(document.tokens) for document in documents)
    return attention_of_spans(
        model,
        padded(((document.tokens, document.learned) for document in documents), length)["input_ids"],
        torch.tensor([document.query_positions for document in documents]),
        torch.tensor([document.answer_spans for document in documents]),
        torch.tensor([document.needle_spans for document in documents]),
        torch.tensor([document.context_length for document in documents]),
        batch_size=1,
    )


def haystack(batches: TextBatches, tokenizer: Any) -> str:
    """Return the text of validation data, put together from its blocks, which overlap by a token."""
    rows = [row for batch in batches.validation_batches() for row in batch["input_ids"].tolist()]
    tokens = [token for number, row in enumerate(rows) for token in (row if number == 0 else row[1:])]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


def baselines_at(needles: int, queried: int, recipe: Any, coordinates: Coordinates) -> list[Baseline]:
    """Return what the accuracies of `Needles` come to without retrieval."""
    data = recipe.data
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
    length: Count | None = Field(
        default=None, description="tokens of a document, or before the first query; as in training unless given"
    )
    samples: Count = Field(default=50, description="documents at each depth")
    batch_size: Count = Field(default=16, description="documents at a time")

    @property
    def coordinates(self) -> Coordinates:
        """Of the accuracy."""
        return Coordinates(needles=self.needles, queries=self.queried)

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
        length = self.length or length
        return NeedleTask(tokenizer, text, length=length, needles=self.needles, queried=self.queried, digits=digits)

    def by_depth(
        self,
        measured: EvalInput,
        of_tokens: Callable[[RetrievalBatches, RetrievalSample], Tensor],
        of_documents: Callable[[list[NeedleDocument]], Tensor],
    ) -> dict[float, Tensor]:
        """Return what is measured of the sequences (n, …) at each depth.

        Needles among tokens lie anywhere, and each depth is the fifth of the context around the first queried one.
        """
        task = self.check(measured.batches, measured.tokenizer)
        if not isinstance(task, RetrievalBatches):
            return {depth: of_documents(task.sample(self.samples, measured.seed, depth)) for depth in DEPTHS}
        sample = task.sample(len(DEPTHS) * self.samples, measured.seed)
        found, fifths = of_tokens(task, sample), fifth_of(sample.depth[:, 0])
        parts = {depth: found[fifths == number] for number, depth in enumerate(DEPTHS)}
        return {depth: part for depth, part in parts.items() if len(part)}

    def answers(self, measured: EvalInput) -> dict[float, Tensor]:
        """Return which of the cities or pairs the model finds, at each depth: (n, queried) boolean.

        Given the right answers before it, an answer among tokens is right under teacher forcing exactly if greedy
        decoding gives it; the joint accuracy is therefore that of greedy decoding.
        """
        model, tokenizer = measured.model, measured.tokenizer
        return self.by_depth(
            measured,
            lambda _, sample: retrieval_answers(model, sample),
            lambda documents: torch.tensor(needle_answers(model, tokenizer, documents, self.batch_size)),
        )


class Needles(NeedleMeasurement):
    """Numbers of cities hidden in a text and found again, by generation, at five depths (Table 2, Figure 5)."""

    def run(self, measured: EvalInput) -> list[Result]:
        return self.records(measured, self.coordinates)

    def records(self, measured: EvalInput, coordinates: Coordinates) -> list[Result]:
        """Return the accuracy over all depths, for each city and for all of a question's jointly, and by depth."""
        answers = self.answers(measured)
        right = torch.cat(list(answers.values()))
        if isinstance(measured.batches, RetrievalBatches):
            # No answer stands before the first one, whose depth is known.
            answers = {depth: at_depth[:, :1] for depth, at_depth in answers.items()}
        return [
            share_record(measured, ACCURACY, right, coordinates),
            share_record(measured, JOINT, right.all(1, keepdim=True), coordinates),
            *(
                share_record(measured, BY_DEPTH, at_depth, Coordinates(coordinates, depth=depth))
                for depth, at_depth in answers.items()
            ),
        ]

    def baselines(self, recipe: Any) -> list[Baseline]:
        return baselines_at(self.needles, self.queried, recipe, self.coordinates)


class NeedleAttention(NeedleMeasurement):
    """The attention to such a number and attention noise, by both definitions (Table 3)."""

    any_model = False

    needles: Count = Field(default=8, description="cities with a number each in a document, or pairs of tokens")
    queried: Count = Field(default=1, description="cities or pairs that are asked for")
    samples: Count = Field(default=10, description="documents at each depth")

    def run(self, measured: EvalInput) -> list[Result]:
        right = torch.cat(list(self.answers(measured).values()))
        records = [share_record(measured, ATTENTION_ACCURACY, right, self.coordinates)]
        masses = self.by_depth(
            measured,
            lambda task, sample: attention_mass(measured.model, sample, task.context_length),
            lambda documents: document_attention(measured.model, documents),
        )
        for depth, mass in masses.items():
            for (name, better), values in zip(ATTENTION.items(), mass.double().mean(1).unbind(-1), strict=True):
                interval = mean_interval(values.tolist())
                fields = {"interval": interval, "n": len(values), "better": better, "method": ATTENTION_METHOD}
                coordinates = Coordinates(depth=depth)
                value = values.mean().item()
                records.append(measured.record(f"needles/{name}", value, coordinates=coordinates, **fields))
        return records

    def baselines(self, recipe: Any) -> list[Baseline]:
        levels = baselines_at(self.needles, self.queried, recipe, self.coordinates)
        accuracy = replace(levels[0], name=ATTENTION_ACCURACY)
        # Where a model looks that does not find the answer means nothing. Signed sums are fixed by construction.
        follows: dict[str, Any] = {"accuracy": accuracy.name, "accuracy_coordinates": self.coordinates}
        names = [f"needles/{name}" for name in ATTENTION if name.endswith("share")]
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
