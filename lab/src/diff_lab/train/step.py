"""Makes the parts of an optimizer step: its batch, its gradients, its learning rate, and the optimizers."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diff_lab.data.batches import IGNORED
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.recipe import TrainRecipe


def prefetched(
    batch_of: Callable[[int], dict[str, Tensor]], first: int, last: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the steps `first` … `last` with their batches. A thread makes the next batch during a step."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(batch_of, first)
        for step in range(first, last + 1):
            batch = coming.result()
            if step < last:
                coming = thread.submit(batch_of, step + 1)
            yield step, batch


def backward(
    call: nn.Module, batch: dict[str, Tensor], context: DistributedContext, scaler: torch.amp.GradScaler, parts: int
) -> float:
    """Compute the gradients of a step's loss, the mean over all targets of the batch. Returns the loss.

    `batch` is the whole batch of the step, (B, N) on the CPU; this process takes its rows of it, and divides them into
    `parts` parts, one after the other. `call` is the module to call in training.
    """
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    # Gradients are averaged over the processes, so each process divides its own by fewer targets.
    targets_per_process = targets / context.count
    total = torch.zeros((), device=context.device)
    for part, rows in enumerate(split_rows(context.local_batch(batch), parts), start=1):
        # Under autocast, too: what checkpointing computes again uses the casts of the weights that are there already.
        exchange = nullcontext() if part == parts else context.no_gradient_exchange(call)
        with exchange, context.autocast():
            loss = loss_of_rows(call, rows, targets_per_process, context)
            scaler.scale(loss).backward()
        total += loss.detach()
    return float(context.sum(total / context.count))


def split_rows(rows: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    """Split the rows of a batch into equal parts."""
    return [{name: tensor.chunk(parts)[part] for name, tensor in rows.items()} for part in range(parts)]


def loss_of_rows(call: nn.Module, rows: dict[str, Tensor], items: Tensor, context: DistributedContext) -> Tensor:
    """Compute the summed loss of some rows of a batch, divided by `items`, the number of targets in the average."""
    with context.autocast():
        loss: Tensor = call(
            **context.model_inputs(rows), num_items_in_batch=items, use_cache=False, chunked_loss=True
        ).loss
    return loss


def build_optimizers(model: nn.Module, recipe: TrainRecipe) -> list[torch.optim.Optimizer]:
    """Build AdamW for everything, or Muon for the matrices inside the layers and AdamW for the rest.

    Weight decay is on matrices, but not on embeddings and not on parameters of λ; norm weights are no matrices. Muon's
    steps are scaled to the size of AdamW's ("match_rms_adamw"), so both take the same learning rate and decay.
    """
    beta1, beta2 = recipe.betas
    parts = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # A weight that is shared with an embedding is an embedding; λ's vectors of the first version are no matrices.
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed = {
        name
        for name, parameter in parts.items()
        if parameter.ndim >= 2 and id(parameter) not in embeddings and not name.endswith("lambda_proj.weight")
    }
    hidden = {name for name in decayed if ".layers." in f".{name}"} if recipe.optimizer == "muon" else set()
    groups = [
        {"params": [parts[name] for name in parts if name in decayed - hidden], "weight_decay": recipe.weight_decay},
        {"params": [parts[name] for name in parts if name not in decayed], "weight_decay": 0.0},
    ]
    settings: dict[str, Any] = {"lr": recipe.learning_rate, "betas": (beta1, beta2), "eps": recipe.eps}
    if all(parameter.device.type == "cuda" for parameter in parts.values()):
        settings["fused"] = True
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, **settings)]
    if hidden:
        matrices: list[Tensor] = [parts[name] for name in parts if name in hidden]
        optimizers.append(
            torch.optim.Muon(
                matrices,
                lr=recipe.learning_rate,
                weight_decay=recipe.weight_decay,
                momentum=recipe.momentum,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def learning_rate(step: int, recipe: TrainRecipe) -> float:
    """Return the learning rate of a step in 1 … `steps`.

    It climbs in a straight line to `learning_rate` at step `warmup_steps`. From there it falls to `learning_rate` ·
    `final_learning_rate` at the last step, in a line or half a cosine wave; or it stays, with "warmup_stable_decay"
    until the last `decay_steps`, in which it falls in a line.
    """
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    if recipe.schedule == "constant":
        return recipe.learning_rate
    begin = recipe.warmup_steps
    if recipe.schedule == "warmup_stable_decay":
        assert recipe.decay_steps is not None  # the recipe's own check
        begin = max(begin, recipe.steps - recipe.decay_steps)
    progress = max(0, step - begin) / max(1, recipe.steps - begin)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if recipe.schedule == "cosine" else 1 - progress
    return recipe.learning_rate * (recipe.final_learning_rate + (1 - recipe.final_learning_rate) * remaining)
