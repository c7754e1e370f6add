"""Greedy answers of a causal language model to prompts of different lengths."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig


def prompt_tokens(model: Any, tokenizer: Any, prompts: Sequence[str], new_tokens: int) -> list[list[int]]:
    """The tokens of each prompt, checked before anything is generated.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, whose own special tokens are put where it puts them.
        prompts: texts.
        new_tokens: how many tokens must have room after each.

    Raises:
        ValueError: a prompt is empty or leaves no room in the model's context, or the vocabulary is not the model's.
    """
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens, the model only {model.config.vocab_size}.")
    rows = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    if not all(rows):
        raise ValueError("A prompt has no tokens, and the model has nothing to go on from.")
    room = model.config.max_position_embeddings - new_tokens
    long = [len(row) for row in rows if len(row) > room]
    if long:
        raise ValueError(
            f"{len(long)} of {len(rows)} prompts are too long: the longest has {max(long)} tokens, and the model's "
            f"context of {model.config.max_position_embeddings} has room for {max(room, 0)} before {new_tokens} new "
            "ones."
        )
    return rows


@torch.no_grad()
def greedy_answers(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], new_tokens: int, batch_size: int = 16
) -> Iterator[list[int]]:
    """What the model adds to each row of tokens, always taking the likeliest; without the token that ends a text.

    Args:
        model: in evaluation mode.
        tokenizer: its tokenizer.
        rows: tokens to go on from, at least one in each row.
        new_tokens: at most so many; fewer where the model ends the text.
        batch_size: rows at a time, padded on the left.
    """
    ends = _ends(model, tokenizer)
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
            stop = next((place for place, token in enumerate(answer) if token in ends), len(answer))
            yield answer[:stop]


def _ends(model: Any, tokenizer: Any) -> set[int]:
    own = model.generation_config.eos_token_id
    found = own if isinstance(own, list) else [own]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}
