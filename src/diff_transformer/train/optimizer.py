"""The optimizer and its learning rate."""

import math

import torch
from torch import nn

from diff_transformer.train.schema import TrainRecipe


def build_optimizer(model: nn.Module, recipe: TrainRecipe) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: not on norm weights, and not on the vectors of λ."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = recipe.betas
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(beta1, beta2), eps=recipe.eps)


def learning_rate(step: int, recipe: TrainRecipe) -> float:
    """The learning rate of a step in 1 … `steps`.

    It climbs in a straight line to `learning_rate` at step `warmup_steps`, then falls (in a line, or half a cosine
    wave) to `learning_rate` · `final_learning_rate` at the last step, or stays.
    """
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    if recipe.schedule == "constant":
        return recipe.learning_rate
    progress = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    left = 1 - progress if recipe.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return recipe.learning_rate * (recipe.final_learning_rate + (1 - recipe.final_learning_rate) * left)
