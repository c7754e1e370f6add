"""Measures the cost of keys and values of few bits, and whether the subtraction makes an error of them count more."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from pydantic import Field
from scipy import linalg, stats
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import RecallBatches, RetrievalBatches
from diff_lab.measure.attention_logits import WHOLE, cost_records, scores_of
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.retrieval import recall_level
from diff_lab.measure.standard import first_tokens
from diff_lab.record import Baseline, Result
from diff_transformer.model import attention_maps

BITS = (8, 6, 4, 3, 2)
PARTS = ("keys and values", "keys", "values")
GRANULARITIES = TOKEN, ROTATED, CHANNEL = "token", "rotated token", "channel"
PLACES = [Coordinates(part=p, granularity=g, bits=b) for p, g, b in product(PARTS, GRANULARITIES, BITS)]
GROUP = 32  # numbers that share a scale, at most
Project = Callable[..., tuple[Tensor, Tensor, Tensor]]


def hadamard(x: Tensor, width: int) -> Tensor:
    """Multiply every `width` entries of the last axis, a power of two, by the Hadamard matrix over √width.

    The matrix is its own inverse. A product of queries and keys stays as it is if both are multiplied by it.
    """
    matrix = torch.as_tensor(linalg.hadamard(width), dtype=x.dtype, device=x.device)
    return (x.unflatten(-1, (-1, width)) @ matrix / math.sqrt(width)).flatten(-2)


def rounded(x: Tensor, bits: int, granularity: str, width: int) -> Tensor:
    """Round keys or values of a cache, (B, H, S, W), to 2^bits numbers in equal steps from the least to the greatest.

    A scale is shared by up to 32 channels of a token, side by side over all heads; or by 32 tokens of a channel. As a
    "rotated token" the `width` channels of each map go through a Hadamard transform before, and back afterwards.
    """
    tokens = x.transpose(1, 2).flatten(2).to(torch.promote_types(x.dtype, torch.float32))  # (B, S, H·W)
    if granularity == CHANNEL:
        tokens = torch.cat([_in_steps(part, bits, 1) for part in tokens.split(GROUP, 1)], 1)
    else:
        turned = hadamard(tokens, width) if granularity == ROTATED else tokens
        groups = turned.unflatten(-1, (-1, math.gcd(GROUP, turned.shape[-1])))
        turned = _in_steps(groups, bits, -1).flatten(2)
        tokens = hadamard(turned, width) if granularity == ROTATED else turned
    return tokens.unflatten(2, (x.shape[1], -1)).transpose(1, 2).to(x.dtype)


def _in_steps(x: Tensor, bits: int, dim: int) -> Tensor:
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return torch.where(step > 0, torch.round((x - low) / step) * step + low, x)


def rounded_at(place: Mapping[str, Any], keys: Tensor, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Round the keys, the values or both, as the coordinates say."""
    if "keys" in place["part"]:
        keys = rounded(keys, place["bits"], place["granularity"], width)
    if "values" in place["part"]:
        values = rounded(values, place["bits"], place["granularity"], width)
    return keys, values


@contextmanager
def changed_cache(model: Any, change: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Pass the keys and values of each layer, as a cache would hold them, through a function, inside this context.

    It gets both, (B, H, S, …), with the width of a map's keys, and gives both back.
    """

    def changed(project: Project, width: int) -> Project:
        def call(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
            queries, keys, values = project(*args, **kwargs)
            return (queries, *change(keys, values, width))

        return call

    with ExitStack() as undo:
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.project = changed(attention.project, attention.head_dim)
            undo.callback(vars(attention).pop, "project")
        yield


class LowBit(Measurement):
    """The cost of keys and values of 8 to 2 bits on text or on recall, and of the subtraction by layer.

    "low_bit/accuracy" is the share of right answers, or of text the share of tokens that the model holds most likely;
    "low_bit/accuracy_drop" how much less than with keys and values as they are. Of text also "low_bit/loss" and
    "…/loss_increase". Of each layer "low_bit/amplification" is (‖O1‖ + ‖λO2‖) / ‖O1 − λO2‖, of the mean norms of the
    heads' outputs, not of DIFF V3: so much larger is an error of both parts in their difference, if it is not common to
    them. "…/key_kurtosis" and "…/value_kurtosis" are 3 of a normal distribution, more with outliers.
    """

    any_model = False

    tokens: Count = Field(default=32_768, description="tokens of text that are read, at most")
    sequences: Count = Field(default=256, description="sequences of the recall or the retrieval task")

    def run(self, measured: EvalInput) -> list[Result]:
        if (config := measured.model.config).spec.latent:
            raise ValueError(f"low_bit rounds keys and values; a {config.attention_type!r} caches latents instead.")
        found = {WHOLE: scores_of(measured, self.tokens, self.sequences)}
        for at in PLACES:
            with changed_cache(measured.model, partial(rounded_at, at)):
                found[at] = scores_of(measured, self.tokens, self.sequences)
        return [*cost_records(measured, "low_bit", found), *self._by_layer(measured)]

    def baselines(self, recipe: Any) -> list[Baseline]:
        if recipe.data.kind != "recall":
            return []
        level = recall_level("low_bit/accuracy", WHOLE, recipe, recipe.data.pairs)
        # A model that finds no answer loses none.
        drop = replace(
            level, name="low_bit/accuracy_drop", accuracy=level.name, accuracy_coordinates=WHOLE, is_accuracy=False
        )
        return [level, *(replace(one, coordinates=at) for one in (level, drop) for at in PLACES)]

    def _by_layer(self, measured: EvalInput) -> list[Result]:
        """Return what says why, from the first batch."""
        model, data = measured.model, measured.data
        if isinstance(data, RetrievalBatches | RecallBatches):
            inputs = data.sample(32, measured.seed).input_ids
        else:
            inputs = next(first_tokens(data, 4096))["input_ids"]
        cached: list[tuple[Tensor, Tensor]] = []

        def keep(keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
            cached.append((keys, values))
            return keys, values

        with changed_cache(model, keep):
            maps = attention_maps(model, inputs.to(next(model.parameters()).device))
        records = []
        for number, (layer, (keys, values)) in enumerate(zip(maps, cached, strict=True), 1):
            entries = {"key_kurtosis": keys, "value_kurtosis": values}
            numbers = {name: stats.kurtosis(x.double().cpu(), axis=None, fisher=False) for name, x in entries.items()}
            # Of two gates, those of DIFF V3, the first map's is not among the maps.
            if layer.first is not None and model.config.spec.gates_per_head < 2:
                heads = values.repeat_interleave(layer.difference.shape[1] // values.shape[1], dim=1).float()
                signal, difference = layer.first @ heads, layer.difference @ heads
                sizes = [x.norm(dim=-1).mean() for x in (signal, signal - difference, difference)]
                numbers["amplification"] = float((sizes[0] + sizes[1]) / sizes[2])
            at = Coordinates(layer=number)
            records += [measured.record(f"low_bit/{name}", float(x), coordinates=at) for name, x in numbers.items()]
        return records
