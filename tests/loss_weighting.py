"""How other people's trainers weight tokens: documents of very different targets, and what one step makes of them.

A step's loss is the mean over the targets of all its documents, however they are spread over batches, padded or
packed. ``exact_step`` computes it and its gradients from plain logits, one document at a time in float64;
``GradientRecorder`` keeps the gradients that a trainer's optimizer was given.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from diff_transformer import DiffTransformerForCausalLM
from tiny_model import check_rounding

# Of a trainer's arguments.
QUIET_ON_CPU: dict[str, Any] = {
    "use_cpu": True,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 0,
}
Document = tuple[Tensor, Tensor]  # tokens and labels, (N,) both
Gradients = dict[str, Tensor]


class GradientRecorder(TrainerCallback):
    """The gradients of each optimizer step, by the parameters' names."""

    def __init__(self) -> None:
        self.steps: list[Gradients] = []

    def on_pre_optimizer_step(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = kwargs["model"].named_parameters()
        self.steps.append({name: value.grad.clone() for name, value in parameters if value.grad is not None})


def exact_step(model: DiffTransformerForCausalLM, documents: Sequence[Document]) -> tuple[float, Gradients]:
    """The mean loss over all targets of `documents`, each read alone, and its gradients."""
    model = copy.deepcopy(model).double().eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, labels in documents:
        log_probs = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen = labels[1:] != -100
        total = total - log_probs[chosen, tokens[1:][chosen]].sum()
        count += int(chosen.sum())
    loss = total / count
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def check_step(loss: float, gradients: Gradients, expected: tuple[float, Gradients]) -> None:
    """Fails if a float32 step's loss or any of its gradients is off by more than rounding explains."""
    assert loss == pytest.approx(expected[0], abs=6e-5)  # older versions of transformers log four places
    assert gradients.keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert value.abs().max() > 1e-6, name
        check_rounding(gradients[name], value)


def check_weights(model: torch.nn.Module, expected: torch.nn.Module, start: torch.nn.Module) -> None:
    """Fails if a weight has not moved, or in two float32 models not by the same but for rounding."""
    for name, value in expected.named_parameters():
        moved = (value - start.get_parameter(name)).detach()
        assert moved.abs().max() > 1e-5, name
        again = (model.get_parameter(name) - start.get_parameter(name)).detach()
        check_rounding(again, moved, least=value.abs().max().item())
