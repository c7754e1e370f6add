"""A tiny model of each kind, with attention that is not uniform, for other people's tools to work on."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import KINDS, check_rounding, kinds, sizes_for

transformers.utils.logging.disable_progress_bar()

VOCABULARY = 257  # the byte tokenizer's 256 bytes and its end of text


kind = kinds(KINDS)


@pytest.fixture
def make() -> Callable[..., DiffTransformerForCausalLM]:
    """(kind, **config) → a model, the same weights every time."""

    def make(kind: str = "diff", **config: Any) -> DiffTransformerForCausalLM:
        torch.manual_seed(6)
        sizes = sizes_for(kind, **{"vocab_size": VOCABULARY, "initializer_range": 0.3, **config})
        return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes))

    return make


@pytest.fixture
def tokens() -> Callable[..., Tensor]:
    """(batch=2, length=9) → random bytes."""
    return lambda batch=2, length=9: torch.randint(0, 256, (batch, length))


@pytest.fixture
def train() -> Callable[..., list[float]]:
    """(model, inputs, steps=3) → train on one batch; the loss before each step and after the last."""

    def train(model: Any, inputs: Tensor, steps: int = 3) -> list[float]:
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

    return train


@pytest.fixture
def check() -> Callable[..., None]:
    return check_rounding


@pytest.fixture(autouse=True)
def _forget_the_device() -> Iterator[None]:
    """accelerate keeps what it set up for the whole process; the next test may want another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
