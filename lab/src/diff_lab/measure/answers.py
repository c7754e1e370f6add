"""Asks models for answers, makes records of how many are right, and computes accuracies without retrieval."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.measure.measurement import EvalInput
from diff_lab.record import Interval, Result
from diff_lab.statistics import mean_interval, proportion_interval
from diff_transformer.model.cache import CACHE_NAME

BY_SEQUENCE = "Student's t over sequences (Wilson's interval where none differ)"


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """Raise ValueError for a tokenizer with more tokens than the model."""
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}.")


def prompt_tokens(model: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """Return the tokens of each prompt. Raises ValueError if one leaves no room for `new_tokens` in the context."""
    check_vocabulary(model, tokenizer)
    rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    most = model.config.max_position_embeddings - new_tokens
    long = [len(row) for row in rows if len(row) > most]
    if long:
        raise ValueError(
            f"{len(long)} of {len(rows)} prompts are too long: the longest has {max(long)} tokens, and the model's "
            f"context of {model.config.max_position_embeddings} has room for {max(most, 0)} before {new_tokens} new "
            "ones."
        )
    return rows


@torch.no_grad()
def greedy_answers(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], new_tokens: int, batch_size: int = 16
) -> Iterator[list[int]]:
    """Yield the greedy continuation of each row of tokens, at most so many, without the token that ends a text."""
    end = model.generation_config.eos_token_id
    ends = {*(end if isinstance(end, list) else [end]), tokenizer.eos_token_id} - {None}
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    # Not the model's own settings: they may ask to sample.
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, pad_token_id=padding, eos_token_id=sorted(ends) or None
    )
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        width = max(map(len, part))
        input_ids = torch.tensor([[padding] * (width - len(row)) + list(row) for row in part])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
        output = model.generate(
            input_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings
        )
        for answer in output[:, width:].tolist():
            stop = next((index for index, token in enumerate(answer) if token in ends), len(answer))
            yield answer[:stop]


@torch.no_grad()
def greedy_label(model: Any, labels: Sequence[tuple[int, ...]], prompt: Tensor, cache: Any = None) -> int:
    """Return the number of the label that greedy decoding along the labels' tokens arrives at; changes the cache."""
    end = labels[0][-1]  # what stands behind a label that is shorter than the longest

    def following(_: int, tokens: Tensor) -> list[int]:
        begun = tuple(tokens[len(prompt) :].tolist())
        return [label[len(begun)] for label in labels if label[: len(begun)] == begun != label] or [end]

    output = model.generate(
        prompt[None].to(model.device),
        attention_mask=torch.ones_like(prompt)[None].to(model.device),
        prefix_allowed_tokens_fn=following,
        do_sample=False,
        num_beams=1,
        max_new_tokens=max(map(len, labels)),
        eos_token_id=None,
        pad_token_id=end,
        **{CACHE_NAME: cache},
    )
    answer = tuple(output[0, len(prompt) :].tolist())
    return next(number for number, label in enumerate(labels) if answer[: len(label)] == label)


def share_interval(means: Tensor) -> Interval | None:
    """Return the interval of a mean of shares, inside 0 … 1; Wilson's if all are 0 or all are 1 and show no spread."""
    if bool((means == means[0]).all()) and float(means[0]) in (0.0, 1.0):
        return proportion_interval(int(means.sum()), len(means))
    interval = mean_interval(means.tolist())
    return None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1]))


def ratio_samples(sums: Tensor, counts: Tensor) -> Tensor:
    """Return a number for each sequence (n,), with the mean Σ `sums` / Σ `counts` and, to first order, its spread."""
    sums, counts = sums.double(), counts.double()
    ratio = sums.sum() / counts.sum()
    return ratio + (sums - ratio * counts) * len(counts) / counts.sum()


def share_record(measured: EvalInput, name: str, right: Tensor, coordinates: Coordinates = NO_COORDINATES) -> Result:
    """Return the share of right answers, (sequences, answers) boolean, with its interval over sequences."""
    values = right.double()
    interval = share_interval(values.mean(1))
    fields = {"interval": interval, "n": values.numel(), "coordinates": coordinates}
    return measured.record(name, values.mean().item(), better="higher", method=BY_SEQUENCE, **fields)


def proportion_record(measured: EvalInput, name: str, right: Sequence[bool], **fields: Any) -> Result:
    """Return the share of right ones among answers that are independent of each other, with Wilson's interval."""
    interval = proportion_interval(sum(right), len(right))
    return measured.record(name, sum(right) / len(right), interval=interval, n=len(right), better="higher", **fields)


def token_levels(pairs: int, queries: int, values: int, *, repeats: bool = False) -> dict[str, Any]:
    """Return the levels of the retrieval task over all queries in random order, with earlier right answers in view."""
    eliminated = fmean(_by_elimination(pairs, queries, values, repeats)) if queries > 1 else None
    return {"chance": 1 / values, "floor": most_frequent(pairs, values), "by_elimination": eliminated}


def _by_elimination(pairs: int, queries: int, values: int, repeats: bool) -> Iterator[float]:
    """Yield the accuracy of each query: a repeated key is copied, else the values left are independent draws."""
    blind = [0.0, *(most_frequent(left, values) for left in range(1, pairs + 1))]  # by how many keys are left
    likelihoods = {0: 1.0}  # how many different keys were asked for → how likely that is
    for _ in range(queries):
        seen = {count: count / pairs if repeats else 0.0 for count in likelihoods}
        yield math.fsum(
            share * (seen[count] + (1 - seen[count]) * blind[pairs - count]) for count, share in likelihoods.items()
        )
        after: dict[int, float] = {}
        for count, share in likelihoods.items():
            for new, part in ((count, seen[count]), (count + 1, 1 - seen[count])):
                if part:
                    after[new] = after.get(new, 0.0) + share * part
        likelihoods = after
