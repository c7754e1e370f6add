"""Measures what every model is measured by: the loss on text, the answers of a synthetic task."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diff_transformer.data import ArithmeticBatches, Batches, NeedleBatches, RetrievalBatches, TextBatches
from diff_transformer.data.batches import IGNORED, flattened
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.arithmetic import ArithmeticOptions, arithmetic_records
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options
from diff_transformer.lab.measure.retrieval import retrieval_answers, retrieval_baselines, retrieval_records
from diff_transformer.lab.record import Result
from diff_transformer.lab.results_files import number_of
from diff_transformer.model import DiffTransformerForCausalLM, attends_by_document

LANGUAGE_LOSS = "language/validation_loss"
CURVE, GUESS = "scaling/loss_by_tokens", "sensitivity/loss_of_a_guess"

# For one pass, unless a sequence has more: the logits of all of them are held at once.
_AT_A_TIME = 1 << 14


def first_tokens(batches: Batches, tokens: int) -> Iterator[dict[str, Tensor]]:
    """The validation batches up to so many tokens, in parts. The last sequence is cut where they end. Raises ValueError
    for a number below 1."""
    if tokens < 1:
        raise ValueError(f"tokens must be 1 or more, got {tokens}.")
    return _parts(batches, tokens)


def _parts(batches: Batches, left: int) -> Iterator[dict[str, Tensor]]:
    for batch in batches.validation_batches():
        count, length = batch["input_ids"].shape
        complete = min(count, left // length)
        rows = max(1, _AT_A_TIME // length)
        for start in range(0, complete, rows):
            yield {name: values[start : min(complete, start + rows)] for name, values in batch.items()}
        left -= complete * length
        if complete < count:
            if left:
                yield {name: values[complete : complete + 1, :left] for name, values in batch.items()}
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
        """Bits per byte: does not depend on how the text is cut into tokens."""
        return self.nats / math.log(2) / self.bytes


@torch.no_grad()
def language_loss(model: Any, batches: TextBatches) -> LanguageLoss:
    """The loss of a causal language model of transformers on the validation windows."""
    device = next(model.parameters()).device
    nats, targets = 0.0, 0
    options = {"chunked_loss": True} if isinstance(model, DiffTransformerForCausalLM) else {}
    for batch in batches.validation_batches():
        targets += int((batch["labels"][:, 1:] != IGNORED).sum())
        row = flattened(batch) if attends_by_document(model.config) else batch
        row = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in row.items()}
        # Dividing by one item gives the sum instead of the mean.
        nats += float(model(**row, num_items_in_batch=1, use_cache=False, **options).loss)
    return LanguageLoss(nats, targets, batches.validation_bytes)


@torch.no_grad()
def label_accuracy(model: Any, batches: Batches) -> float:
    """The share of the validation data's labels that the model takes for the likeliest, given all before them."""
    device = next(model.parameters()).device
    right = labels = 0
    for batch in batches.validation_batches():
        predicted = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        expected = batch["labels"][:, 1:]
        right += int((predicted == expected).sum())
        labels += int((expected != IGNORED).sum())
    return right / labels


def text_part(batches: Batches | None) -> TextBatches:
    """Validation data as text alone: of a run that has needle documents beside its text, the text. Raises ValueError
    where there is no text in it.
    """
    text = batches.text if isinstance(batches, NeedleBatches) else batches
    if not isinstance(text, TextBatches):
        raise ValueError("This is measured on whole documents of text, and the data holds none: name some with --text.")
    return text


def language_records(model: Any, batches: TextBatches, variant: str) -> list[Result]:
    """Validation loss in nats per token, and bits per byte."""
    loss = language_loss(model, batches)
    shared: dict[str, Any] = {"variant": variant, "better": "lower", "n": loss.targets}
    return [
        Result(name="language/bits_per_byte", value=loss.bits_per_byte, unit="bits/byte", **shared),
        Result(name=LANGUAGE_LOSS, value=loss.per_token, unit="nats/token", **shared),
    ]


def evaluate(model: Any, batches: Batches, variant: str, *, sequences: int = 512, seed: int = 0) -> list[Result]:
    """Every measurement that makes sense on the data: text, the retrieval task or arithmetic.

    From the retrieval task so many sequences are drawn with the seed. Raises ValueError for other data, or a vocabulary
    that is not the model's.
    """
    if batches.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"The data has a vocabulary of {batches.vocab_size} tokens, the model only {model.config.vocab_size}."
        )
    measured = EvalInput(model=model, variant=variant, tokenizer=getattr(batches, "tokenizer", None), seed=seed)
    match batches:
        case TextBatches():
            return language_records(model, batches, variant)
        case RetrievalBatches():
            return retrieval_records(measured, batches, sequences)
        case ArithmeticBatches():
            return arithmetic_records(measured, batches, ArithmeticOptions(), seed)
    raise ValueError(
        f"Data of type {type(batches).__name__} has no measurement without a name; name one, e.g. needles or episodes."
    )


def validation_callback(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    """What training logs about its validation data: a function of the model and the step."""

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        match batches:
            case TextBatches():
                loss = language_loss(model, batches)
                return {"validation/loss": loss.per_token, "validation/bits_per_byte": loss.bits_per_byte}
            case RetrievalBatches():
                right = retrieval_answers(model, batches.sample(256, seed=0))
                return {"validation/accuracy": right.float().mean().item()}
        return {"validation/accuracy": label_accuracy(model, batches)}

    return on_evaluate


class StandardOptions(Options):
    """How much is measured."""

    sequences: Count = Field(default=512, description="sequences of the retrieval task")


def _run(measured: EvalInput, options: StandardOptions) -> list[Result]:
    return evaluate(measured.model, measured.data, measured.variant, seed=measured.seed, sequences=options.sequences)


def _run_by_tokens(measured: EvalInput, _: Options) -> list[Result]:
    training = measured.trained()
    return [
        measured.record(
            CURVE,
            number_of(line["validation/loss"]),
            coordinates=Coordinates(tokens=line["step"] * training.tokens_per_step),
            unit="nats/token",
            better="lower",
        )
        for line in training.metrics
        if "validation/loss" in line
    ]


def _run_guess(measured: EvalInput, _: Options) -> list[Result]:
    return [measured.record(GUESS, math.log(measured.data.vocab_size))]


STANDARD = Measurement(
    name="standard",
    description="loss and bits per byte on text; accuracy and attention mass on the retrieval task",
    options=StandardOptions,
    run=_run,
    baselines=lambda _, recipe: retrieval_baselines(recipe),
)
LOSS_BY_TOKENS = Measurement(
    name="loss_by_tokens",
    description="the validation losses of an experiment's run during its training, by tokens (Figure 3)",
    options=Options,
    run=_run_by_tokens,
    needs="training",
)
LOSS_OF_A_GUESS = Measurement(
    name="loss_of_a_guess",
    description="the loss of a guess among all tokens of the data's vocabulary, in nats",
    options=Options,
    run=_run_guess,
)
