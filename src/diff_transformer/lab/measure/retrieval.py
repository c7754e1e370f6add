"""Asks for answers to the retrieval task, and measures where attention goes meanwhile (Table 3)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from diff_transformer.data import RetrievalSample
from diff_transformer.lab.measure.attention_heads import applied_maps

T = TypeVar("T", RetrievalSample, "AttentionSpans")


def _split(sample: T, size: int) -> Iterator[T]:
    """The sample in parts of at most ``size`` sequences."""
    parts = [getattr(sample, field.name).split(size) for field in fields(sample)]
    for tensors in zip(*parts, strict=True):
        yield type(sample)(*tensors)


@torch.no_grad()
def retrieval_answers(model: Any, sample: RetrievalSample, batch_size: int = 64) -> Tensor:
    """Which queries are answered right: (n, Q) boolean. An answer is the most likely of all tokens.

    Args:
        model: a causal language model of transformers in evaluation mode.
        sample: sequences with the places of their queries.
        batch_size: sequences at a time.
    """
    device = next(model.parameters()).device
    right = []
    for part in _split(sample, batch_size):
        predicted = model(input_ids=part.input_ids.to(device), use_cache=False).logits.argmax(-1).cpu()
        answers = part.input_ids.gather(1, part.answer_spans)
        right.append(predicted.gather(1, part.query_positions) == answers)
    return torch.cat(right)


@dataclass(frozen=True)
class AttentionMass:
    """Attention from the position that answers a query, averaged over heads and layers; each (n, Q) float32.

    The *signed* mass is the sum of the weights, which for A1 − λA2 can be negative; the *share* is the sum of their
    absolute values over that of the whole row. The paper states neither its normalisation nor its sign (Table 3).

    Attributes:
        answer_signed, answer_share: on the answer in the context.
        noise_signed, noise_share: on all of the context but the answer and its key.
    """

    answer_signed: Tensor
    answer_share: Tensor
    noise_signed: Tensor
    noise_share: Tensor


@dataclass(frozen=True)
class AttentionSpans:
    """Sequences, and where in them the measures of :class:`AttentionMass` look. n sequences, Q queries each; all int64.

    Attributes:
        input_ids: (n, N); what stands behind the last query changes nothing.
        query_positions: (n, Q), the positions that attend.
        answer_spans: (n, Q, 2), where each answer begins and ends (not included) in the context.
        needle_spans: (n, Q, 2), the same of the needle around it, which is no noise.
        context_lengths: (n,), positions before the first query.
    """

    input_ids: Tensor
    query_positions: Tensor
    answer_spans: Tensor
    needle_spans: Tensor
    context_lengths: Tensor


def attention_mass(model: Any, sample: RetrievalSample, context_length: int, batch_size: int = 32) -> AttentionMass:
    """Attention to the answer and attention noise (Table 3) in the retrieval task.

    Args:
        model: one of this project's models in evaluation mode.
        sample: sequences with the places of their queries and answers.
        context_length: positions before the first query.
        batch_size: sequences at a time; all maps of a batch are held at once.
    """
    answers = sample.answer_spans
    spans = AttentionSpans(
        input_ids=sample.input_ids,
        query_positions=sample.query_positions,
        answer_spans=torch.stack((answers, answers + 1), dim=-1),
        needle_spans=torch.stack((answers - 1, answers + 1), dim=-1),  # a needle's key stands before its value
        context_lengths=torch.full((len(answers),), context_length),
    )
    return attention_of_spans(model, spans, batch_size)


def attention_of_spans(model: Any, spans: AttentionSpans, batch_size: int = 32) -> AttentionMass:
    """Attention to the answer and attention noise (Table 3).

    Args:
        model: as `applied_maps` takes it, in evaluation mode.
        spans: sequences and places in them.
        batch_size: sequences at a time; all maps of a batch are held at once.
    """
    device = next(model.parameters()).device
    parts: list[Tensor] = []
    for part in _split(spans, batch_size):
        parts.append(_mass_of_layers(applied_maps(model, part.input_ids.to(device)), part))
    return AttentionMass(*torch.cat(parts, dim=1))


def _mass_of_layers(maps: list[Tensor], part: AttentionSpans) -> Tensor:
    """(4, n, Q): the four measures of :class:`AttentionMass`."""
    device = maps[0].device
    sequences = torch.arange(len(part.input_ids), device=device).unsqueeze(1)
    queries = part.query_positions.to(device)
    places = torch.arange(part.input_ids.shape[1])
    answer = _inside(places, part.answer_spans)
    noise = (places < part.context_lengths[:, None, None]) & ~_inside(places, part.needle_spans)
    chosen = torch.stack((answer, noise)).unsqueeze(3).to(device)  # (2, n, Q, 1, N)
    signed, share = torch.zeros(2, 2, *queries.shape, device=device).unbind()
    for layer in maps:
        rows = layer[sequences, :, queries].float()  # (n, Q, H, N)
        sizes = rows.abs()
        signed += (rows * chosen).sum(-1).mean(-1)
        share += ((sizes * chosen).sum(-1) / sizes.sum(-1)).mean(-1)
    return torch.stack((signed[0], share[0], signed[1], share[1])).cpu() / len(maps)


def _inside(places: Tensor, spans: Tensor) -> Tensor:
    """Which of the places (N,) lie in each span (n, Q, 2): (n, Q, N) boolean."""
    return (places >= spans[..., :1]) & (places < spans[..., 1:])
