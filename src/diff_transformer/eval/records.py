"""Measurements as records: what is measured on which data, with its interval."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import ArithmeticBatches, Batches, RetrievalBatches, RetrievalSample, TextBatches
from diff_transformer.eval.arithmetic import arithmetic_records
from diff_transformer.eval.loss import label_accuracy, language_loss
from diff_transformer.eval.retrieval import attention_mass, retrieval_answers
from diff_transformer.eval.shares import BY_SEQUENCE, share_interval
from diff_transformer.results import Interval, Result, mean_interval, proportion_interval

# Table 3 gives five depths; needles lie anywhere, so each depth is a fifth of the context.
DEPTHS = ("0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %")


def evaluate(model: Any, batches: Batches, arm: str, *, sequences: int = 512, seed: int = 0) -> list[Result]:
    """Every measurement that makes sense on the data.

    Args:
        model: in evaluation mode.
        batches: text (loss, bits per byte), the retrieval task (accuracy, Table 3's measures) or arithmetic (exact
            match and answer length).
        arm: what to call the model in the records.
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
        return language_records(model, batches, arm)
    if isinstance(batches, RetrievalBatches):
        return retrieval_records(model, batches, arm, sequences=sequences, seed=seed)
    if isinstance(batches, ArithmeticBatches):
        return arithmetic_records(model, batches.tokenizer, batches, arm, seed=seed)
    raise ValueError(
        f"Data of type {type(batches).__name__} has no measurement without a name; name one, e.g. needles or episodes."
    )


def language_records(model: Any, batches: TextBatches, arm: str) -> list[Result]:
    """Validation loss in nats per token, and bits per byte."""
    loss = language_loss(model, batches)
    shared: dict[str, Any] = {"arm": arm, "better": "lower", "n": loss.targets}
    return [
        Result(name="language/bits_per_byte", value=loss.bits_per_byte, unit="bits/byte", **shared),
        Result(name="language/validation_loss", value=loss.per_token, unit="nats/token", **shared),
    ]


def retrieval_records(
    model: Any, batches: RetrievalBatches, arm: str, *, sequences: int = 512, seed: int = 0
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
    accuracy: dict[str, Any] = {"arm": arm, "better": "higher", "seed": seed}
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
                f"retrieval/{kind}_{definition}", values, sample, _mean_interval, arm=arm, better=better, seed=seed
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
    for index, group in enumerate(DEPTHS):
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
                group=group,
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
