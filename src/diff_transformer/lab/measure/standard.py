"""Measures what every model is measured by: loss on text, accuracy and attention on the retrieval task."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from diff_transformer.data import (
    ArithmeticBatches,
    Batches,
    NeedleBatches,
    RetrievalBatches,
    RetrievalSample,
    TextBatches,
)
from diff_transformer.data.packing import IGNORED, flattened
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.measure.accuracy import BY_SEQUENCE, share_interval
from diff_transformer.lab.measure.arithmetic import arithmetic_records
from diff_transformer.lab.measure.measurement import Count, EvalInput, Measurement, Options, check_counts
from diff_transformer.lab.measure.retrieval import attention_mass, retrieval_answers
from diff_transformer.lab.record import Interval, Result
from diff_transformer.lab.statistics import mean_interval, proportion_interval
from diff_transformer.model import DiffTransformerForCausalLM, attends_by_document

# For one pass, unless a sequence has more: the logits of all of them are held at once.
_AT_A_TIME = 1 << 14


def first_tokens(batches: Batches, tokens: int) -> Iterator[dict[str, Tensor]]:
    """The validation batches up to so many tokens, in parts. The last sequence is cut where they end.

    Args:
        batches: the data.
        tokens: how many; all there are if they are fewer.

    Raises:
        ValueError: a number below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be 1 or more, got {tokens}.")
    return _parts(batches, tokens)


def _parts(batches: Batches, left: int) -> Iterator[dict[str, Tensor]]:
    for batch in batches.validation_batches():
        count, length = batch["input_ids"].shape
        whole = min(count, left // length)
        rows = max(1, _AT_A_TIME // length)
        for start in range(0, whole, rows):
            yield {name: values[start : min(whole, start + rows)] for name, values in batch.items()}
        left -= whole * length
        if whole < count:
            if left:
                yield {name: values[whole : whole + 1, :left] for name, values in batch.items()}
            return


@dataclass(frozen=True)
class LanguageLoss:
    """Summed negative log-likelihood of a text.

    Attributes:
        nats: the sum over all targets.
        targets: how many tokens were predicted.
        bytes: how many bytes of text they stand for.
    """

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
    """The loss of a causal language model of transformers on the validation windows.

    Args:
        model: in evaluation mode.
        batches: the text; see :meth:`TextBatches.validation_batches`.
    """
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
    """The share of the validation data's labels that the model takes for the likeliest, given all that stands before.

    Args:
        model: in evaluation mode.
        batches: data of which only some tokens are labels, such as answers.
    """
    device = next(model.parameters()).device
    right = labels = 0
    for batch in batches.validation_batches():
        predicted = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        expected = batch["labels"][:, 1:]
        right += int((predicted == expected).sum())
        labels += int((expected != IGNORED).sum())
    return right / labels


# Logits to hold at a time, in float32.
_LOGITS = 1 << 27


def chosen_documents(documents: Iterable[np.ndarray], shortest: int, most: int) -> list[np.ndarray]:
    """At most `most` of the documents with `shortest` tokens or more, spread evenly over their order.

    Raises:
        ValueError: fewer than two are asked for or so long, which leaves nothing to draw other documents from.
    """
    check_counts(2, documents=most)
    lengths = []
    long = []
    for document in documents:
        lengths.append(len(document))
        if len(document) >= shortest:
            long.append(document)
    if len(long) < 2:
        raise ValueError(
            f"This needs two documents of {shortest} tokens or more, and of {len(lengths)} the longest has "
            f"{max(lengths, default=0)}: give more or longer text, or ask for shorter contexts."
        )
    places = np.linspace(0, len(long) - 1, min(most, len(long))).round().astype(int)
    return [long[place] for place in places]


def text_part(batches: Batches | None) -> TextBatches:
    """Validation data as text alone: of a run that has needle documents beside its text, the text.

    Raises:
        ValueError: there is no text in it.
    """
    text = batches.text if isinstance(batches, NeedleBatches) else batches
    if not isinstance(text, TextBatches):
        raise ValueError("This is measured on whole documents of text, and the data holds none: name some with --text.")
    return text


@torch.no_grad()
def token_losses(
    model: Any, rows: Sequence[np.ndarray], tell: Callable[[int, int], object] | None = None
) -> list[np.ndarray]:
    """−ln p of each token of each row but the first, given all that stands before it in the row.

    Rows of similar lengths go through the model together, shorter ones with anything after their end, which causal
    attention cannot see: no mask is needed, so that every implementation of attention will do.

    Args:
        model: a causal language model of transformers in evaluation mode.
        rows: (n,) tokens each, n ≥ 2.
        tell: is told how many rows are done, of how many.

    Returns:
        For each row (n − 1,) float64 on the CPU, in nats.

    Raises:
        ValueError: a row of fewer than two tokens, or a token that the model has not.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for row in rows:
        if len(row) < 2 or int(row.max()) >= vocabulary:
            raise ValueError(
                f"A row must have two tokens or more, all of them below {vocabulary}, got {len(row)} of up to "
                f"{int(row.max()) if len(row) else 'none'}."
            )
    # Nothing is to be padded: a model's rule for what is not told may look for padding tokens.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    losses: list[np.ndarray] = [np.empty(0)] * len(rows)
    done = 0
    while done < len(order):
        longest = len(rows[order[done]])
        some = order[done : done + max(1, _LOGITS // (longest * vocabulary))]
        padded = np.zeros((len(some), longest), dtype=np.int64)
        for place, index in enumerate(some):
            padded[place, : len(rows[index])] = rows[index]
        input_ids = torch.from_numpy(padded).to(device)
        logits = model(input_ids=input_ids, **options).logits
        for place, index in enumerate(some):
            size = len(rows[index])
            loss = F.cross_entropy(logits[place, : size - 1].float(), input_ids[place, 1:size], reduction="none")
            losses[index] = loss.double().cpu().numpy()
        done += len(some)
        if tell is not None:
            tell(done, len(order))
    return losses


# Table 3 gives five depths; needles lie anywhere, so each depth is a fifth of the context.
DEPTHS = tuple(Coordinates(depth=(fifth / 5, (fifth + 1) / 5)) for fifth in range(5))


def evaluate(model: Any, batches: Batches, variant: str, *, sequences: int = 512, seed: int = 0) -> list[Result]:
    """Every measurement that makes sense on the data.

    Args:
        model: in evaluation mode.
        batches: text (loss, bits per byte), the retrieval task (accuracy, Table 3's measures) or arithmetic (exact
            match and answer length).
        variant: what to call the model in the records.
        sequences: how many sequences of the retrieval task to draw.
        seed: of these sequences.

    Raises:
        ValueError: data that is neither, or a vocabulary that is not the model's.
    """
    if batches.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"The data has a vocabulary of {batches.vocab_size} tokens, the model only {model.config.vocab_size}."
        )
    if isinstance(batches, TextBatches):
        return language_records(model, batches, variant)
    if isinstance(batches, RetrievalBatches):
        return retrieval_records(model, batches, variant, sequences=sequences, seed=seed)
    if isinstance(batches, ArithmeticBatches):
        return arithmetic_records(model, batches.tokenizer, batches, variant, seed=seed)
    raise ValueError(
        f"Data of type {type(batches).__name__} has no measurement without a name; name one, e.g. needles or episodes."
    )


def language_records(model: Any, batches: TextBatches, variant: str) -> list[Result]:
    """Validation loss in nats per token, and bits per byte."""
    loss = language_loss(model, batches)
    shared: dict[str, Any] = {"variant": variant, "better": "lower", "n": loss.targets}
    return [
        Result(name="language/bits_per_byte", value=loss.bits_per_byte, unit="bits/byte", **shared),
        Result(name="language/validation_loss", value=loss.per_token, unit="nats/token", **shared),
    ]


def retrieval_records(
    model: Any, batches: RetrievalBatches, variant: str, *, sequences: int = 512, seed: int = 0
) -> list[Result]:
    """Accuracy, in all and by depth, and Table 3's attention to the answer and to noise by depth.

    Where all pairs are asked for, later queries can be answered by elimination: each value that was given leaves one
    fewer. A model that does only that answers (1/P + … + 1/2 + 1) / P of P queries, .52 of four; the first query is
    measured on its own because it leaves nothing to eliminate. The queries of a sequence share its context, so
    intervals are over sequences.
    """
    sample = batches.sample(sequences, seed)
    right = retrieval_answers(model, sample).float()
    whole = _mean_over_sequences(right, torch.ones_like(right, dtype=torch.bool))
    accuracy: dict[str, Any] = {"variant": variant, "better": "higher", "seed": seed}
    first = right[:, 0]
    records = [
        Result(
            name="retrieval/accuracy",
            value=right.mean().item(),
            interval=share_interval(whole),
            n=right.numel(),
            method=BY_SEQUENCE,
            **accuracy,
        ),
        Result(
            name="retrieval/first_query_accuracy",
            value=first.mean().item(),
            interval=proportion_interval(int(first.sum()), len(first)),
            n=len(first),
            method="Wilson's score interval",
            **accuracy,
        ),
    ]
    records += _by_depth("retrieval/accuracy_by_depth", right, sample, share_interval, **accuracy)
    mass = attention_mass(model, sample, batches.context_length)
    for name, better in (("answer", "higher"), ("noise", "lower")):
        kind = "attention_to_answer" if name == "answer" else "attention_noise"
        for definition in ("signed", "share"):
            values = getattr(mass, f"{name}_{definition}")
            records += _by_depth(
                f"retrieval/{kind}_{definition}",
                values,
                sample,
                _mean_interval,
                variant=variant,
                better=better,
                seed=seed,
            )
    return records


def _mean_interval(means: Tensor) -> Interval | None:
    return mean_interval(means.tolist())


def _by_depth(
    name: str,
    values: Tensor,
    sample: RetrievalSample,
    interval: Callable[[Tensor], Interval | None],
    **shared: Any,
) -> list[Result]:
    """One record for each depth at which there are needles."""
    fifth = (sample.depth * len(DEPTHS)).long().clamp(max=len(DEPTHS) - 1)
    records = []
    for index, place in enumerate(DEPTHS):
        here = fifth == index
        if not here.any():
            continue
        means = _mean_over_sequences(values, here)
        records.append(
            Result(
                name=name,
                value=values[here].mean().item(),
                interval=interval(means),
                n=int(here.sum()),
                coordinates=place,
                method=BY_SEQUENCE,
                **shared,
            )
        )
    return records


def _mean_over_sequences(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of the chosen values of each sequence that has any."""
    counts = chosen.sum(1)
    return ((values * chosen).sum(1) / counts.clamp(min=1))[counts > 0]


def validation_callback(batches: Batches) -> Callable[[Any, int], dict[str, float]]:
    """What training logs about its validation data: a function of the model and the step."""

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        if isinstance(batches, TextBatches):
            loss = language_loss(model, batches)
            return {"validation/loss": loss.per_token, "validation/bits_per_byte": loss.bits_per_byte}
        if isinstance(batches, RetrievalBatches):
            right = retrieval_answers(model, batches.sample(256, seed=0))
            return {"validation/accuracy": right.float().mean().item()}
        return {"validation/accuracy": label_accuracy(model, batches)}

    return on_evaluate


class StandardOptions(Options):
    """How much is asked."""

    sequences: Count = Field(default=512, description="sequences of the retrieval task")


def _run(measured: EvalInput, options: StandardOptions) -> list[Result]:
    assert measured.batches is not None  # needs="recipe"
    return evaluate(measured.model, measured.batches, measured.variant, seed=measured.seed, sequences=options.sequences)


STANDARD = Measurement(
    name="standard",
    description="loss and bits per byte on text; accuracy and attention mass on the retrieval task",
    options=StandardOptions,
    run=_run,
    needs="recipe",
    any_model=True,
)
