"""Tiny models that read bytes, with attention that is not uniform, for other people's tools to work on."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import sizes_for

VOCABULARY = 257  # the byte tokenizer's 256 bytes and its end of text


def make(kind: str = "diff", **config: Any) -> DiffTransformerForCausalLM:
    """A model, the same weights every time."""
    torch.manual_seed(6)
    sizes = sizes_for(kind, **{"vocab_size": VOCABULARY, "initializer_range": 0.3, **config})
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes))


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, (batch, length))


def train(model: Any, inputs: Tensor, steps: int = 3) -> list[float]:
    """Train on one batch; the loss before each step and after the last."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=inputs, labels=inputs).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return [*losses, model(input_ids=inputs, labels=inputs).loss.item()]
