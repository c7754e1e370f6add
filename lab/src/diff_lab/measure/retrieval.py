"""Measures the retrieval and the recall task: accuracy, and attention to the answer and to noise (Tables 2 and 3)."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches, RecallBatches, RetrievalBatches, RetrievalSample
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.measure.answers import (
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
from diff_transformer.explorer import ExploredModel, LambdaSettings
from diff_transformer.explorer.explored_model import replaced_lambdas
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
NOISE_ACCURACY, BY_LAMBDA = "noise/accuracy", "noise/accuracy_by_lambda"
SHARE, SIGNED = "noise/attention_share", "noise/attention_signed"
BEST, MEAN = "best head", "mean of the heads"
ALL_LAYERS = "all layers"


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
    absolute values over that of the whole row. The paper states neither its normalisation nor its sign.

    Args:
        model: one of this project's.
        input_ids: (n, N); what stands behind the last query changes nothing.
        queries: (n, Q), the positions that attend.
        answers: (n, Q, 2), where each answer begins and ends (not included) in the context.
        needles: (n, Q, 2), the same of the needle around it, which is no noise; all else in the context is.
        context_lengths: (n,), positions before the first query.
        batch_size: sequences at a time, all of whose maps are held at once.
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
    """Measure accuracy, in all, of first queries (nothing to eliminate yet) and by depth, and Table 3's attention."""
    sample = batches.sample(sequences, measured.seed)
    right = retrieval_answers(measured.model, sample)
    mass = attention_mass(measured.model, sample, batches.context_length)
    fifths = (sample.depth * len(FIFTHS)).long().clamp(max=len(FIFTHS) - 1)

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


@torch.no_grad()
def answer_attention(model: Any, sample: RetrievalSample, batch_size: int) -> tuple[Tensor, Tensor]:
    """Measure the attention of asked keys to their answers: the share and the signed mass, (layers, heads) in float64.

    A weight a of a head's map, A1 − λA2 or the softmax map, counts as a·|v|, with the norm of the value it multiplies.

    - The *share* is |a·v| of the answer over Σ|a·v| of the row, as a mean over questions. A head of DIFF that has all
      of A1 on the answer and none of A2 reaches 1/(1 + λ), if all values are of one size.
    - The *signed* mass is Σ a·|v| of the answers over Σ (1 − λ)·v̄, with v̄ = Σ|a·v| / Σ|a| of each row, summed over
      questions. Such a head reaches 1/(1 − λ). With a λ near 1 or above it says little.
    """
    device = next(model.parameters()).device
    attentions = [layer.self_attn for layer in model.model.layers]
    norms: list[Tensor] = []  # of each layer's values, (B, heads of values, N)

    def keep(_: object, __: object, values: Tensor) -> None:
        norms.append(values.unflatten(-1, (-1, attentions[0].value_width)).norm(dim=-1).transpose(1, 2))

    found = []
    with ExitStack() as hooks:
        for attention in attentions:
            hooks.callback(attention.v_proj.register_forward_hook(keep).remove)
        parts = (x.split(batch_size) for x in (sample.input_ids, sample.query_positions, sample.answer_spans))
        for input_ids, queries, answers in zip(*parts, strict=True):
            norms.clear()
            maps = attention_maps(model, input_ids.to(device))
            places = torch.arange(len(input_ids), device=device)[:, None], queries.to(device)
            layers = []
            for layer, norm in zip(maps, norms, strict=True):
                rows = layer.difference.transpose(1, 2)[places].double()  # (n, Q, H, N)
                heads = rows.shape[2]
                weighted = rows * norm.repeat_interleave(heads // norm.shape[1], dim=1)[:, None]
                on_answer = weighted.gather(-1, answers.to(device)[:, :, None, None].expand(-1, -1, heads, 1))[..., 0]
                size = weighted.abs().sum(-1)
                scale = rows.sum(-1) * size / rows.abs().sum(-1)
                layers.append(torch.stack((on_answer.abs() / size, on_answer, scale)).flatten(1, 2))  # (3, n·Q, H)
            found.append(torch.stack(layers))
    share, on_answer, scale = torch.cat(found, dim=2).unbind(1)  # (layers, questions, H)
    return share.mean(1).cpu(), (on_answer.sum(1) / scale.sum(1)).cpu()


def recall_level(name: str, coordinates: Coordinates, recipe: Any, pairs: int) -> Baseline:
    """Return chance, and as floor the most frequent value of the context."""
    tokens, steps = recipe.data.tokens, recipe.train.steps
    return Baseline(
        name=name, coordinates=coordinates, chance=1 / tokens, floor=most_frequent(pairs, tokens), steps=steps
    )


class Noise(Measurement):
    """Answers found among more and more distractors, also with other λ, and the attention to them (Tables 2 and 3)."""

    any_model = False

    pairs: Counts = Field(default=(8, 16, 32), description="numbers of pairs in a context; the last is the hardest")
    sequences: Count = Field(default=256, description="sequences of each")
    factors: tuple[Annotated[FiniteFloat, Field(ge=0, le=10)], ...] = Field(
        default=(0.0, 0.5, 1.0, 1.5, 2.0), description="factors by which learned λ are multiplied"
    )
    batch_size: Count = Field(default=32, description="sequences at a time")

    def check(self, batches: Batches | None, tokenizer: Any) -> RecallBatches:
        """Return the task."""
        task = data_of(batches, RecallBatches, "the recall task", "noise", "positions")
        for pairs in self.pairs:
            task.check_pairs(pairs)
        return task

    def run(self, measured: EvalInput) -> list[Result]:
        task, model = self.check(measured.batches, None), measured.model
        samples = {pairs: task.sample(self.sequences, measured.seed, pairs) for pairs in self.pairs}

        def accuracy(pairs: int, name: str, coordinates: Coordinates) -> Result:
            right = retrieval_answers(model, samples[pairs], self.batch_size)
            return share_record(measured, name, right, coordinates)

        records = [accuracy(pairs, NOISE_ACCURACY, Coordinates(pairs=pairs)) for pairs in self.pairs]
        hardest = self.pairs[-1]
        explored = ExploredModel(model, measured.variant)
        for factor in self.factors if explored.subtracts else ():
            with replaced_lambdas(model, LambdaSettings(factor=factor), explored.heads):
                records.append(accuracy(hardest, BY_LAMBDA, Coordinates(factor=factor)))
        share, signed = answer_attention(model, samples[hardest], self.batch_size)
        fields: dict[str, Any] = {"n": samples[hardest].query_positions.numel(), "better": "higher"}
        chosen_layers: dict[int | str, slice] = {ALL_LAYERS: slice(None)}
        chosen_layers |= {number + 1: slice(number, number + 1) for number in range(len(share))}
        for layer, chosen in chosen_layers.items():
            best = int(share[chosen].argmax())
            for name, values in ((SHARE, share[chosen].flatten()), (SIGNED, signed[chosen].flatten())):
                for part, value in ((BEST, values[best]), (MEAN, values.mean())):
                    at = Coordinates(layer=layer, part=part)
                    records.append(measured.record(name, float(value), coordinates=at, **fields))
        return records

    def baselines(self, recipe: Any) -> list[Baseline]:
        by_pairs = [recall_level(NOISE_ACCURACY, Coordinates(pairs=pairs), recipe, pairs) for pairs in self.pairs]
        hardest = by_pairs[-1]
        # Where a model looks that does not find the answer means nothing.
        follows: dict[str, Any] = {"accuracy": hardest.name, "accuracy_coordinates": hardest.coordinates}
        follows["is_accuracy"] = False
        places = [Coordinates(layer=ALL_LAYERS, part=part) for part in (BEST, MEAN)]
        return [
            *by_pairs,
            *(replace(hardest, name=BY_LAMBDA, coordinates=Coordinates(factor=factor)) for factor in self.factors),
            *(replace(hardest, name=name, coordinates=at, **follows) for name in (SHARE, SIGNED) for at in places),
        ]
