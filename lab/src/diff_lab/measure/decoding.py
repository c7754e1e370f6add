"""Decodes greedily, freely or along the tokens of given labels."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig


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
    """Return the number of the label that greedy decoding along the tokens of labels arrives at after a prompt (N,).

    No label begins with another. The cache of the prompt's first tokens is changed.
    """
    end = labels[0][-1]  # what stands behind a label that is shorter than the longest

    def following(_: int, tokens: Tensor) -> list[int]:
        begun = tuple(tokens[len(prompt) :].tolist())
        return [label[len(begun)] for label in labels if label[: len(begun)] == begun != label] or [end]

    output = model.generate(
        prompt[None].to(model.device),
        attention_mask=torch.ones_like(prompt)[None].to(model.device),
        past_key_values=cache,
        prefix_allowed_tokens_fn=following,
        do_sample=False,
        num_beams=1,
        max_new_tokens=max(map(len, labels)),
        eos_token_id=None,
        pad_token_id=end,
    )
    answer = tuple(output[0, len(prompt) :].tolist())
    return next(number for number, label in enumerate(labels) if answer[: len(label)] == label)
