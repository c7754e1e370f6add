"""Measures the retrieval task: accuracy, attention to the answer and to noise (Table 3), longer contexts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches, RetrievalBatches, RetrievalSample
from diff_lab.measure.accuracy import (
    BY_SEQUENCE,
    proportion_record,
    ratio_samples,
    share_interval,
    share_record,
    token_levels,
)
from diff_lab.measure.measurement import Count, Counts, EvalInput, Measurement, data_of
from diff_lab.record import Baseline, Better, Interval, Result
from diff_lab.statistics import mean_interval
from diff_transformer.convert.loaded_models import returned_maps
from diff_transformer.model import DiffTransformerPreTrainedModel, attention_maps
from diff_transformer.model.interface_attention import attention_implementation

T = TypeVar("T", RetrievalSample, "AttentionSpans")

ACCURACY, FIRST_QUERY = "retrieval/accuracy", "retrieval/first_query_accuracy"
BY_DEPTH = "retrieval/accuracy_by_depth"
# Table 3 gives five depths; needles lie anywhere, so each depth is a fifth of the context.
FIFTHS = tuple(Coordinates(depth=(fifth / 5, (fifth + 1) / 5)) for fifth in range(5))
# Table 3's two measures: the name of each, the part of `AttentionMass`, and the direction.
ATTENTION: tuple[tuple[str, str, Better], ...] = (
    ("attention_to_answer", "answer", "higher"),
    ("attention_noise", "noise", "lower"),
)
DEFINITIONS = ("signed", "share")
LENGTH_ACCURACY = "length/accuracy"


def fifth_of(depth: Tensor) -> Tensor:
    """Return the fifths of the context, counted from 0, of depths from 0 to 1."""
    return (depth * len(FIFTHS)).long().clamp(max=len(FIFTHS) - 1)


def _split(sample: T, size: int) -> Iterator[T]:
    """Yield the sample in parts of at most ``size`` sequences."""
    parts = [getattr(sample, field.name).split(size) for field in fields(sample)]
    for tensors in zip(*parts, strict=True):
        yield type(sample)(*tensors)


@torch.no_grad()
def retrieval_answers(model: Any, sample: RetrievalSample, batch_size: int = 64) -> Tensor:
    """Return which queries are answered right: (n, Q) boolean. An answer is the most likely of all tokens."""
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
    absolute values over that of the whole row. The paper states neither its normalisation nor its sign (Table 3). Noise
    is all of the context but the answer and its key.
    """

    answer_signed: Tensor
    answer_share: Tensor
    noise_signed: Tensor
    noise_share: Tensor


@dataclass(frozen=True)
class AttentionSpans:
    """n sequences with Q queries each, and the spans that :class:`AttentionMass` measures; all int64."""

    input_ids: Tensor  # (n, N); what stands behind the last query changes nothing
    query_positions: Tensor  # (n, Q), the positions that attend
    answer_spans: Tensor  # (n, Q, 2), where each answer begins and ends (not included) in the context
    needle_spans: Tensor  # (n, Q, 2), the same of the needle around it, which is no noise
    context_lengths: Tensor  # (n,), positions before the first query


def attention_mass(model: Any, sample: RetrievalSample, context_length: int, batch_size: int = 32) -> AttentionMass:
    """Measure attention to the answer and attention noise (Table 3) in the retrieval task."""
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
    """Measure attention to the answer and attention noise (Table 3). All maps of a batch are held at once."""
    device = next(model.parameters()).device
    parts = [_mass_of_layers(applied_maps(model, x.input_ids.to(device)), x) for x in _split(spans, batch_size)]
    return AttentionMass(*torch.cat(parts, dim=1))


@torch.no_grad()
def applied_maps(model: Any, input_ids: Tensor) -> list[Tensor]:
    """Return the map by which each layer weighs its values, (B, heads, N, N): A1 − λ A2, or the softmax map.

    Takes one of this project's models, or a causal language model of transformers that returns its attentions;
    DiffLlama's are put together as its layers do, with the λ of each. Raises ValueError for one that returns none.
    """
    if isinstance(model, DiffTransformerPreTrainedModel):
        return [layer.difference for layer in attention_maps(model, input_ids)]
    with attention_implementation(model, "eager"):  # the others compute no maps
        maps = returned_maps(model, input_ids)
    if maps is None:
        raise ValueError(f"The attention to needles cannot be measured: {type(model).__name__} returns no attentions.")
    if model.config.model_type != "diffllama":
        return maps
    differences = []
    for layer, both in zip((layer.self_attn for layer in model.model.layers), maps, strict=True):
        first, second = both.chunk(2, dim=1)  # the first maps of all heads, then the second ones
        positive, negative = (layer.lambda_q1 * layer.lambda_k1).sum(), (layer.lambda_q2 * layer.lambda_k2).sum()
        differences.append(first - (positive.exp() - negative.exp() + layer.lambda_init) * second)
    return differences


def _mass_of_layers(maps: list[Tensor], part: AttentionSpans) -> Tensor:
    """Compute the four measures of :class:`AttentionMass`, (4, n, Q)."""
    device = maps[0].device
    sequences = torch.arange(len(part.input_ids), device=device).unsqueeze(1)
    queries = part.query_positions.to(device)
    positions = torch.arange(part.input_ids.shape[1])
    answer = _inside(positions, part.answer_spans)
    noise = (positions < part.context_lengths[:, None, None]) & ~_inside(positions, part.needle_spans)
    chosen = torch.stack((answer, noise)).unsqueeze(3).to(device)  # (2, n, Q, 1, N)
    signed, share = torch.zeros(2, 2, *queries.shape, device=device).unbind()
    for layer in maps:
        rows = layer[sequences, :, queries].float()  # (n, Q, H, N)
        sizes = rows.abs()
        signed += (rows * chosen).sum(-1).mean(-1)
        share += ((sizes * chosen).sum(-1) / sizes.sum(-1)).mean(-1)
    return torch.stack((signed[0], share[0], signed[1], share[1])).cpu() / len(maps)


def _inside(positions: Tensor, spans: Tensor) -> Tensor:
    """Return which of the positions (N,) lie in each span (n, Q, 2): (n, Q, N) boolean."""
    return (positions >= spans[..., :1]) & (positions < spans[..., 1:])


def retrieval_records(measured: EvalInput, batches: RetrievalBatches, sequences: int) -> list[Result]:
    """Measure accuracy, in all and by depth, and Table 3's attention to the answer and to noise by depth.

    If all pairs are asked for, later queries can be answered by elimination: a model that does only that answers (1/P +
    … + 1/2 + 1) / P of P queries, .52 of four. The first query, which leaves nothing to eliminate, is therefore
    measured on its own as well. The queries of a sequence share its context, so intervals are over sequences.
    """
    sample = batches.sample(sequences, measured.seed)
    right = retrieval_answers(measured.model, sample)
    records = [
        share_record(measured, ACCURACY, right),
        proportion_record(measured, FIRST_QUERY, right[:, 0].tolist(), method="Wilson's score interval"),
        *_by_depth(measured, BY_DEPTH, right.float(), sample, share_interval, "higher"),
    ]
    mass = attention_mass(measured.model, sample, batches.context_length)
    for (kind, part, better), definition in product(ATTENTION, DEFINITIONS):
        name, values = f"retrieval/{kind}_{definition}", getattr(mass, f"{part}_{definition}")
        records += _by_depth(measured, name, values, sample, lambda means: mean_interval(means.tolist()), better)
    return records


def _by_depth(
    measured: EvalInput,
    name: str,
    values: Tensor,
    sample: RetrievalSample,
    interval: Callable[[Tensor], Interval | None],
    better: Better,
) -> list[Result]:
    """Make one record for each depth at which there are needles: the mean over its queries, with its interval."""
    fifths = fifth_of(sample.depth)
    records = []
    for index, depth in enumerate(FIFTHS):
        chosen = fifths == index
        counts = chosen.sum(1)
        if not counts.any():
            continue
        interval_ends = interval(ratio_samples((values * chosen).sum(1)[counts > 0], counts[counts > 0]))
        details = {"n": int(counts.sum()), "better": better, "coordinates": depth, "method": BY_SEQUENCE}
        records.append(measured.record(name, values[chosen].mean().item(), interval=interval_ends, **details))
    return records


def retrieval_baselines(recipe: Any) -> list[Baseline]:
    """Return the accuracies of `retrieval_records` without retrieval; nothing is known of another task's."""
    data, steps = recipe.data, recipe.train.steps
    if data.kind != "retrieval":
        return []
    first = token_levels(data.num_pairs, 1, data.num_values)
    levels = token_levels(data.num_pairs, data.num_queries or data.num_pairs, data.num_values, repeats=data.repeats)
    return [
        Baseline(name=FIRST_QUERY, steps=steps, **first),
        Baseline(name=ACCURACY, steps=steps, **levels),
        *(Baseline(name=BY_DEPTH, coordinates=depth, steps=steps, accuracy=ACCURACY, **levels) for depth in FIFTHS),
    ]


class RetrievalLengths(Measurement):
    """Recall of the first query in contexts once, twice and four times as long as in training (beyond the paper)."""

    any_model = False

    factors: Counts = Field(default=(1, 2, 4), description="lengths of a context, in those of training")
    sequences: Count = Field(default=2048, description="sequences of each length")

    def check(self, batches: Batches | None, tokenizer: Any) -> dict[int, RetrievalBatches]:
        """Return the task in contexts so many times as long, with as many needles as in training."""
        task = data_of(batches, RetrievalBatches, "the retrieval task", "retrieval_lengths", "positions")
        # One query: what the answers to others give away is no part of it.
        return {factor: task.asking(task.num_pairs, 1, factor * task.context_length) for factor in self.factors}

    def run(self, measured: EvalInput) -> list[Result]:
        records = []
        for factor, longer in self.check(measured.batches, None).items():
            right = retrieval_answers(measured.model, longer.sample(self.sequences, measured.seed))
            records.append(share_record(measured, LENGTH_ACCURACY, right, Coordinates(context_factor=factor)))
        return records

    def baselines(self, recipe: Any) -> list[Baseline]:
        levels = token_levels(recipe.data.num_pairs, 1, recipe.data.num_values)
        # Whether a model has learned the task is told by the shortest contexts, whatever is left of it in longer ones.
        shortest = Coordinates(context_factor=min(self.factors))
        shared: dict[str, Any] = {"accuracy": LENGTH_ACCURACY, "accuracy_coordinates": shortest, **levels}
        shared |= {"name": LENGTH_ACCURACY, "steps": recipe.train.steps}
        return [Baseline(coordinates=Coordinates(context_factor=factor), **shared) for factor in self.factors]
