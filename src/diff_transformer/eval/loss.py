"""Language-modelling loss on held-out text, in nats per token and bits per byte."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import Batches, TextBatches
from diff_transformer.data.packing import IGNORED, flattened
from diff_transformer.model import DiffTransformerForCausalLM, attends_by_document


@dataclass(frozen=True)
class LanguageLoss:
    """Summed negative log-likelihood of a text.

    Attributes:
        nats: the sum over all targets.
        targets: how many tokens were predicted.
        bytes: how many bytes of text they stand for.
    """

    nats: float
    targets: int
    bytes: int

    @property
    def per_token(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.targets

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte: does not depend on how the text is cut into tokens."""
        return self.nats / math.log(2) / self.bytes


@torch.no_grad()
def language_loss(model: Any, batches: TextBatches) -> LanguageLoss:
    """The loss of a causal language model of transformers on the validation windows.

    Args:
        model: in evaluation mode.
        batches: the text; see :meth:`TextBatches.validation_batches`.
    """
    device = next(model.parameters()).device
    nats, targets = 0.0, 0
    options = {"chunked_loss": True} if isinstance(model, DiffTransformerForCausalLM) else {}
    for batch in batches.validation_batches():
        targets += int((batch["labels"][:, 1:] != IGNORED).sum())
        row = flattened(batch) if attends_by_document(model.config) else batch
        row = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in row.items()}
        # Dividing by one item gives the sum instead of the mean.
        nats += float(model(**row, num_items_in_batch=1, use_cache=False, **options).loss)
    return LanguageLoss(nats, targets, batches.validation_bytes)


@torch.no_grad()
def label_accuracy(model: Any, batches: Batches) -> float:
    """The share of the validation data's labels that the model takes for the likeliest, given all that stands before.

    Args:
        model: in evaluation mode.
        batches: data of which only some tokens are labels, such as answers.
    """
    device = next(model.parameters()).device
    right = labels = 0
    for batch in batches.validation_batches():
        predicted = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits[:, :-1].argmax(-1).cpu()
        expected = batch["labels"][:, 1:]
        right += int((predicted == expected).sum())
        labels += int((expected != IGNORED).sum())
    return right / labels
