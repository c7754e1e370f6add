"""Measures the standard numbers of every model: the loss on text, the answers of a synthetic task, sums."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import ArithmeticBatches, Batches, MaskedTextBatches, RetrievalBatches, TextBatches
from diff_lab.data.batches import IGNORED, flattened
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE
from diff_lab.measure.answers import greedy_answers, prompt_tokens, proportion_record
from diff_lab.measure.many_shot import guessing
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.retrieval import (
    FIRST_QUERY,
    recall_level,
    retrieval_answers,
    retrieval_baselines,
    retrieval_records,
)
from diff_lab.record import Baseline, Better, Result
from diff_lab.results_files import number_of
from diff_lab.statistics import mean_interval
from diff_transformer.model import DiffTransformerForCausalLM, attends_by_document

LANGUAGE_LOSS = "language/validation_loss"
LABEL_ACCURACY = "validation/accuracy"
MASKED_LOSS = "masked/loss"
VALIDATION_LOSS = "validation/loss"
GUESS = "sensitivity/loss_of_a_guess"
EXACT_MATCH = "arithmetic/exact_match"
ANSWER_LENGTH = "arithmetic/answer_length"
_RESULT = re.compile(r"#\s*(-?\d+)\s*$")
VALIDATION_SEQUENCES = 1024  # of the retrieval task, in training
# What training logs → the name of the curve, its direction and unit.
_LOGGED: dict[str, tuple[str, Better, str]] = {
    LABEL_ACCURACY: (ACCURACY_CURVE, "higher", ""),
    VALIDATION_LOSS: (LOSS_CURVE, "lower", "nats/token"),
}

# For one pass, unless a sequence has more: the logits of all of them are held at once.
_AT_A_TIME = 1 << 14


def first_tokens(batches: Batches, tokens: int) -> Iterator[dict[str, Tensor]]:
    """Yield the validation batches up to so many tokens, in parts of 16,384 tokens or one sequence."""
    for batch in batches.validation_batches():
        count, length = batch["input_ids"].shape
        complete = min(count, tokens // length)
        rows = max(1, _AT_A_TIME // length)
        for start in range(0, complete, rows):
            yield {name: values[start : min(complete, start + rows)] for name, values in batch.items()}
        tokens -= complete * length
        if complete < count:
            if tokens:
                yield {name: values[complete : complete + 1, :tokens] for name, values in batch.items()}
            return


@dataclass(frozen=True)
class LanguageLoss:
    """Negative log-likelihood of a text: the sum over all targets in nats, how many they are, and the bytes of text."""

    nats: float
    targets: int
    bytes: int

    @property
    def per_token(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte: does not depend on how the text is cut into tokens. NaN if only ends of text are predicted."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


def _placed(model: Any, batch: dict[str, Tensor], *, by_document: bool) -> dict[str, Any]:
    """Put a batch on the model's device, flattened for one that attends by document."""
    device = next(model.parameters()).device
    row = flattened(batch) if by_document and attends_by_document(model.config) else batch
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in row.items()}


@torch.no_grad()
def language_loss(model: Any, batches: TextBatches) -> LanguageLoss:
    """Return the loss of a causal language model of transformers on the validation windows."""
    nats, targets = 0.0, 0
    options = {"chunked_loss": True} if isinstance(model, DiffTransformerForCausalLM) else {}
    for batch in batches.validation_batches():
        targets += int((batch["labels"][:, 1:] != IGNORED).sum())
        row = _placed(model, batch, by_document=True)
        # Dividing by one item gives the sum instead of the mean.
        nats += float(model(**row, num_items_in_batch=1, use_cache=False, **options).loss)
    return LanguageLoss(nats, targets, batches.validation_bytes)


class LabelScores(NamedTuple):
    """A model's scores of labels: mean loss in nats, the share that are the likeliest, and how many there are."""

    loss: float
    accuracy: float
    targets: int


@torch.no_grad()
def label_scores(model: Any, batches: Iterable[dict[str, Tensor]], *, masked: bool = False) -> LabelScores:
    """Score the labels of batches, given all tokens before them; if `masked`, an encoder finds hidden tokens."""
    nats, right, targets = 0.0, 0, 0
    for batch in batches:
        row = _placed(model, batch, by_document=masked)
        labels = row.pop("labels")
        logits = model(**row).logits if masked else model(**row, use_cache=False).logits[:, :-1]
        labels = labels if masked else labels[:, 1:]
        chosen = labels != IGNORED
        logits, labels = logits[chosen].float(), labels[chosen]
        nats += float(F.cross_entropy(logits, labels, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        targets += len(labels)
    return LabelScores(nats / targets, right / targets, targets)


def text_part(batches: Batches | None) -> TextBatches:
    """Return validation data that are text. Raises ValueError if they are none."""
    if not isinstance(batches, TextBatches):
        raise ValueError("This is measured on whole documents of text, and the data holds none: name some with --text.")
    return batches


def validation_callback(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    """Make the callback of training that measures its validation data: a function of the model and the step."""
    retrieval = None
    if isinstance(batches, RetrievalBatches):  # first queries: an answer that is in view helps with those that follow
        retrieval = batches.asking(1).sample(VALIDATION_SEQUENCES, seed=0)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        if isinstance(batches, MaskedTextBatches):
            scores = label_scores(model, batches.validation_batches(), masked=True)
            return {VALIDATION_LOSS: scores.loss, LABEL_ACCURACY: scores.accuracy}
        if isinstance(batches, TextBatches):
            loss = language_loss(model, batches)
            return {VALIDATION_LOSS: loss.per_token, "validation/bits_per_byte": loss.bits_per_byte}
        if retrieval is not None:
            return {LABEL_ACCURACY: retrieval_answers(model, retrieval).float().mean().item()}
        return {LABEL_ACCURACY: label_scores(model, batches.validation_batches()).accuracy}

    return on_evaluate


def curve_records(
    metrics: Sequence[Mapping[str, Any]], *, variant: str, seed: int, coordinates: Coordinates = NO_COORDINATES
) -> list[Result]:
    """Return the validation curve of a run, from the lines of its `metrics.jsonl`: a record for each validation."""
    return [
        Result(
            name=name,
            variant=variant,
            value=number_of(line[logged]),
            unit=unit,
            seed=seed,
            better=better,
            coordinates=Coordinates(coordinates, step=line["step"]),
        )
        for line in metrics
        for logged, (name, better, unit) in _LOGGED.items()
        if logged in line
    ]


def curve_baselines(recipe: Any) -> list[Baseline]:
    """Return the validation accuracy during training without learning; nothing is known of text."""
    if recipe.data.kind == "retrieval":
        levels = next(one for one in retrieval_baselines(recipe) if one.name == FIRST_QUERY)
        return [replace(levels, name=ACCURACY_CURVE)]
    return _label_baselines(ACCURACY_CURVE, recipe)


def _label_baselines(name: str, recipe: Any) -> list[Baseline]:
    match recipe.data.kind:
        case "many_shot":
            return [guessing(name, NO_COORDINATES, recipe)]
        case "recall":
            return [recall_level(name, NO_COORDINATES, recipe, recipe.data.pairs)]
    return []


class Standard(Measurement):
    """Loss and bits per byte on text, an encoder's accuracy and loss at hidden tokens, accuracy and attention mass on
    the retrieval task, exact match on arithmetic, and on any other data the accuracy of the predicted labels."""

    sequences: Count = Field(default=512, description="sequences of the retrieval task")

    def run(self, measured: EvalInput) -> list[Result]:
        model, batches = measured.model, measured.data
        if batches.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"The data has a vocabulary of {batches.vocab_size} tokens, the model only {model.config.vocab_size}."
            )
        match batches:
            case TextBatches():
                loss = language_loss(model, batches)
                text: dict[str, Any] = {"seed": None, "better": "lower", "n": loss.targets}
                return [
                    measured.record("language/bits_per_byte", loss.bits_per_byte, unit="bits/byte", **text),
                    measured.record(LANGUAGE_LOSS, loss.per_token, unit="nats/token", **text),
                ]
            case MaskedTextBatches():
                scores = label_scores(model, batches.validation_batches(), masked=True)
                hidden: dict[str, Any] = {"seed": None, "n": scores.targets}
                return [
                    measured.record(LABEL_ACCURACY, scores.accuracy, better="higher", **hidden),
                    measured.record(MASKED_LOSS, scores.loss, unit="nats/token", better="lower", **hidden),
                ]
            case RetrievalBatches():
                return retrieval_records(measured, batches, self.sequences)
            case ArithmeticBatches():
                return Arithmetic().run(replace(measured, tokenizer=batches.tokenizer))
        scores = label_scores(model, batches.validation_batches())
        return [measured.record(LABEL_ACCURACY, scores.accuracy, seed=None, n=scores.targets, better="higher")]

    def baselines(self, recipe: Any) -> list[Baseline]:
        return [*retrieval_baselines(recipe), *_label_baselines(LABEL_ACCURACY, recipe)]


class LossOfAGuess(Measurement):
    """The loss of a guess among all tokens of the data's vocabulary, in nats."""

    def run(self, measured: EvalInput) -> list[Result]:
        return [measured.record(GUESS, math.log(measured.data.vocab_size))]


def is_right(text: str, result: int) -> bool:
    """Return whether an answer ends with the right result behind a "#"."""
    found = _RESULT.search(text)
    return found is not None and int(found[1]) == result


class Arithmetic(Measurement):
    """Exact match and answer length on sums worked out step by step (Appendix C in small); a run that was trained on
    sums is asked its own kind."""

    needs = None

    problems: Count = Field(default=256, description="problems of each number of operations, at most")
    examples: int = Field(default=0, ge=0, description="solved problems before each")
    new_tokens: Count | None = Field(default=None, description="tokens of an answer; a solution's unless given")

    def run(self, measured: EvalInput) -> list[Result]:
        if measured.tokenizer is None:
            raise ValueError("Arithmetic is asked in text, and this model has no tokenizer.")
        model, tokenizer, batches = measured.model, measured.tokenizer, measured.batches
        if not isinstance(batches, ArithmeticBatches):
            batches = ArithmeticBatches()
        new_tokens = self.new_tokens or batches.longest_solution
        seed = 0  # the same problems for the models of all seeds, which the documents of the records need
        numbers = range(1, batches.operations + 1)
        problems = [problem for number in numbers for problem in batches.sample(self.problems, number, seed)]
        # A line for each, for a model that was not trained on them.
        examples = "".join(f"{one.question}{one.solution}\n" for one in batches.examples(self.examples, seed))
        rows = prompt_tokens(model, tokenizer, [examples + problem.question for problem in problems], new_tokens)
        # Whether each answer, up to a line break, is right, how many tokens it has, and whether it ran into the limit.
        parts: dict[Coordinates, list[tuple[bool, float, bool]]] = {NO_COORDINATES: []}
        answers = greedy_answers(model, tokenizer, rows, new_tokens, batch_size=64)
        for problem, tokens in zip(problems, answers, strict=True):
            line, broken, _ = tokenizer.decode(tokens, skip_special_tokens=True).partition("\n")
            length = len(tokenizer(line, add_special_tokens=False)["input_ids"]) if broken else len(tokens)
            endless = not broken and len(tokens) == new_tokens
            for coordinates in (NO_COORDINATES, Coordinates(operations=problem.operations)):
                answer = (is_right(line, problem.result), float(length), endless)
                parts.setdefault(coordinates, []).append(answer)
        records = []
        for coordinates, found in parts.items():
            right, lengths, limited = zip(*found, strict=True)
            # Without a seed: the problems are the same, and models of different seeds are compared by problem.
            shared: dict[str, Any] = {"seed": None, "coordinates": coordinates}
            records += [
                proportion_record(
                    measured,
                    EXACT_MATCH,
                    right,
                    method="Wilson's score interval over problems",
                    documents=tuple((float(value), 1.0) for value in right),
                    **shared,
                ),
                measured.record(
                    ANSWER_LENGTH,
                    sum(lengths) / len(lengths),
                    interval=mean_interval(lengths),
                    n=len(lengths),
                    unit="tokens",
                    better="lower",
                    method=f"Student's t over problems; {sum(limited)} answers ran into the limit and count with it",
                    documents=tuple((value, 1.0) for value in lengths),
                    **shared,
                ),
            ]
        return records
