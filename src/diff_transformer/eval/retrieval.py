"""Answers to the retrieval task, and where attention went meanwhile (Table 3)."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import RetrievalSample
from diff_transformer.model import attention_maps


def split_sample(sample: RetrievalSample, size: int) -> Iterator[RetrievalSample]:
    """The sample in parts of at most ``size`` sequences."""
    parts = [getattr(sample, field.name).split(size) for field in fields(sample)]
    for tensors in zip(*parts, strict=True):
        yield RetrievalSample(*tensors)


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
    for part in split_sample(sample, batch_size):
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


def attention_mass(model: Any, sample: RetrievalSample, context_length: int, batch_size: int = 32) -> AttentionMass:
    """Attention to the answer and attention noise (Table 3).

    Args:
        model: one of this project's models in evaluation mode.
        sample: sequences with the places of their queries and answers.
        context_length: positions before the first query.
        batch_size: sequences at a time; all maps of a batch are held at once.
    """
    device = next(model.parameters()).device
    parts: list[tuple[Tensor, ...]] = []
    for part in split_sample(sample, batch_size):
        maps = attention_maps(model, part.input_ids.to(device))
        parts.append(tuple(_mass_of_layers([layer.difference.cpu() for layer in maps], part, context_length)))
    return AttentionMass(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _mass_of_layers(maps: list[Tensor], part: RetrievalSample, context_length: int) -> Tensor:
    """(4, n, Q): the four measures of :class:`AttentionMass`."""
    sequences = torch.arange(len(part.input_ids)).unsqueeze(1)
    answers = part.answer_spans
    noise = torch.ones(*answers.shape, context_length, dtype=torch.bool)
    noise.scatter_(2, torch.stack((answers, answers - 1), dim=-1), False)  # a needle's key stands before its value
    total = torch.zeros(4, *answers.shape)
    for layer in maps:
        rows = layer[sequences, :, part.query_positions]  # (n, Q, H, N)
        sizes = rows.abs().sum(-1)
        on_answer = rows.gather(3, answers[:, :, None, None].expand(-1, -1, rows.shape[2], 1)).squeeze(-1)
        on_noise = rows[..., :context_length] * noise.unsqueeze(2)
        measures = (on_answer, on_answer.abs() / sizes, on_noise.sum(-1), on_noise.abs().sum(-1) / sizes)
        total += torch.stack([measure.mean(-1) for measure in measures])
    return total / len(maps)
