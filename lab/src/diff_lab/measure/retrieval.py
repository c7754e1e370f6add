"""Measures the retrieval task: accuracy, attention to the answer and to noise (Table 3), longer contexts."""

from collections.abc import Callable, Mapping
from typing import Any

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
from diff_transformer.model import attention_maps

ACCURACY, FIRST_QUERY = "retrieval/accuracy", "retrieval/first_query_accuracy"
BY_DEPTH = "retrieval/accuracy_by_depth"
# Table 3 gives five depths; needles lie anywhere, so each depth is a fifth of the context.
FIFTHS = tuple(Coordinates(depth=(fifth / 5, (fifth + 1) / 5)) for fifth in range(5))
# Table 3's two measures, by both definitions, and the direction of each.
ATTENTION: dict[str, Better] = {
    "attention_to_answer_signed": "higher",
    "attention_to_answer_share": "higher",
    "attention_noise_signed": "lower",
    "attention_noise_share": "lower",
}
LENGTH_ACCURACY = "length/accuracy"


def fifth_of(depth: Tensor) -> Tensor:
    """Return the fifths of the context, counted from 0, of depths from 0 to 1."""
    return (depth * len(FIFTHS)).long().clamp(max=len(FIFTHS) - 1)


@torch.no_grad()
def retrieval_answers(model: Any, sample: RetrievalSample, batch_size: int = 64) -> Tensor:
    """Return which queries are answered right: (n, Q) boolean. An answer is the most likely of all tokens."""
    device = next(model.parameters()).device
    right = []
    parts = (x.split(batch_size) for x in (sample.input_ids, sample.query_positions, sample.answer_spans))
    for input_ids, queries, answers in zip(*parts, strict=True):
        predicted = model(input_ids=input_ids.to(device), use_cache=False).logits.argmax(-1).cpu()
        right.append(predicted.gather(1, queries) == input_ids.gather(1, answers))
    return torch.cat(right)


def attention_mass(model: Any, sample: RetrievalSample, context_length: int, batch_size: int = 32) -> Tensor:
    """Measure the numbers of `ATTENTION` in the retrieval task: (n, Q, 4) float32."""
    answers = sample.answer_spans
    spans = torch.stack((answers, answers + 1), dim=-1)
    needles = torch.stack((answers - 1, answers + 1), dim=-1)  # a needle's key stands before its value
    lengths = torch.full((len(answers),), context_length)
    return attention_of_spans(model, sample.input_ids, sample.query_positions, spans, needles, lengths, batch_size)


@torch.no_grad()
def attention_of_spans(
    model: Any,
    input_ids: Tensor,
    queries: Tensor,
    answers: Tensor,
    needles: Tensor,
    context_lengths: Tensor,
    batch_size: int = 32,
) -> Tensor:
    """Measure the numbers of `ATTENTION` for each query, as means over heads and layers: (n, Q, 4) float32.

    The *signed* mass is the sum of the weights, which for A1 − λA2 can be negative; the *share* is the sum of their
    absolute values over that of the whole row. The paper states neither its normalisation nor its sign. All maps of a
    batch are held at once.

    Args:
        model: one of this project's.
        input_ids: (n, N); what stands behind the last query changes nothing.
        queries: (n, Q), the positions that attend.
        answers: (n, Q, 2), where each answer begins and ends (not included) in the context.
        needles: (n, Q, 2), the same of the needle around it, which is no noise; all else in the context is.
        context_lengths: (n,), positions before the first query.
        batch_size: sequences at a time.
    """
    device = next(model.parameters()).device
    positions = torch.arange(input_ids.shape[1])
    found = []
    arguments = (input_ids, queries, answers, needles, context_lengths)
    for tokens, at, answer, needle, length in zip(*(x.split(batch_size) for x in arguments), strict=True):
        in_answer, in_needle = ((positions >= x[..., :1]) & (positions < x[..., 1:]) for x in (answer, needle))
        noise = (positions < length[:, None, None]) & ~in_needle
        chosen = torch.stack((in_answer, noise)).unsqueeze(3).to(device)  # (2, n, Q, 1, N)
        maps = [layer.difference for layer in attention_maps(model, tokens.to(device))]
        masses = torch.zeros(2, 2, *at.shape, device=device)  # of answer and noise, signed and share
        for layer in maps:
            rows = layer[torch.arange(len(tokens), device=device).unsqueeze(1), :, at.to(device)].float()
            sizes = rows.abs()  # (n, Q, H, N), as the rows
            masses[:, 0] += (rows * chosen).sum(-1).mean(-1)
            masses[:, 1] += ((sizes * chosen).sum(-1) / sizes.sum(-1)).mean(-1)
        found.append(masses.flatten(0, 1).movedim(0, -1).cpu() / len(maps))
    return torch.cat(found)


def retrieval_records(measured: EvalInput, batches: RetrievalBatches, sequences: int) -> list[Result]:
    """Measure accuracy, in all and by depth, and Table 3's attention to the answer and to noise by depth.

    If all pairs are asked for, later queries can be answered by elimination: a model that does only that answers (1/P +
    … + 1/2 + 1) / P of P queries, .52 of four. The first query, which leaves nothing to eliminate, is therefore
    measured on its own as well. The queries of a sequence share its context, so intervals are over sequences.
    """
    sample = batches.sample(sequences, measured.seed)
    right = retrieval_answers(measured.model, sample)
    mass = attention_mass(measured.model, sample, batches.context_length)
    fifths = fifth_of(sample.depth)

    def by_depth(name: str, values: Tensor, interval: Callable[[Tensor], Interval | None], better: Better) -> None:
        """Add a record for each depth at which there are needles: the mean over its queries, with its interval."""
        for index, depth in enumerate(FIFTHS):
            chosen = fifths == index
            counts = chosen.sum(1)
            if counts.any():
                ends = interval(ratio_samples((values * chosen).sum(1)[counts > 0], counts[counts > 0]))
                fields = {"interval": ends, "better": better, "coordinates": depth, "method": BY_SEQUENCE}
                records.append(measured.record(name, values[chosen].mean().item(), n=int(counts.sum()), **fields))

    records = [
        share_record(measured, ACCURACY, right),
        proportion_record(measured, FIRST_QUERY, right[:, 0].tolist(), method="Wilson's score interval"),
    ]
    by_depth(BY_DEPTH, right.float(), share_interval, "higher")
    for (name, better), values in zip(ATTENTION.items(), mass.unbind(-1), strict=True):
        by_depth(f"retrieval/{name}", values, lambda means: mean_interval(means.tolist()), better)
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

    def check(self, batches: Batches | None, tokenizer: Any) -> Mapping[int, RetrievalBatches]:
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
        # Whether a model has learned the task is told by the shortest contexts, whatever is left of it in longer ones.
        shared: dict[str, Any] = {"accuracy_coordinates": Coordinates(context_factor=min(self.factors))}
        shared |= {"name": LENGTH_ACCURACY, "accuracy": LENGTH_ACCURACY, "steps": recipe.train.steps}
        shared |= token_levels(recipe.data.num_pairs, 1, recipe.data.num_values)
        return [Baseline(coordinates=Coordinates(context_factor=factor), **shared) for factor in self.factors]
