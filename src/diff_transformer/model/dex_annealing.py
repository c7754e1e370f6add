"""Anneals DEX's λ under transformers' Trainer. Not imported with the package: the Trainer takes seconds to import."""

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from diff_transformer.nn import AnnealedLambda, set_dex_progress


class DexAnnealing(TrainerCallback):
    """Sets λ(t) before every optimizer step t = 1, 2, … of a "dex" model, also of one that is wrapped (PEFT, FSDP).

    A resumed run goes on with the λ that it would have had: t is the Trainer's own count of steps.

    Args:
        steps: T, the steps that the annealing takes; all of the training unless given.

    Raises:
        ValueError: fewer than one step; at the start of training, a model that has nothing to anneal.

    Examples:
        >>> DexAnnealing(steps=100).steps
        100
    """

    def __init__(self, steps: int | None = None) -> None:
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be 1 or more, got {steps}.")
        self.steps = steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: nn.Module = kwargs["model"]
        if not any(isinstance(module, AnnealedLambda) for module in model.modules()):
            raise ValueError(f"DexAnnealing: {type(model).__name__} has no λ to anneal; attention_type 'dex' has.")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        steps = self.steps or state.max_steps
        set_dex_progress(kwargs["model"], min(1.0, (state.global_step + 1) / steps))
