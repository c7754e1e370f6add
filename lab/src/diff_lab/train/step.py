"""Makes the parts of an optimizer step: its batch and gradients, whether they are good, learning rate, optimizers."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diff_lab.data.batches import IGNORED
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.recipe import TrainRecipe

# A loss is compared with at most so many losses before it, and only once there are so many.
_MOST_LOSSES, _FEWEST_LOSSES = 100, 20
# The loss of a batch of few tokens jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
_SKIPPED = 10  # bad steps in a row


def prefetched(
    batch_of: Callable[[int, slice], dict[str, Tensor]], rows: slice, first: int, last: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield the steps `first` … `last` with rows of their batches. A thread makes the next ones during a step."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(batch_of, first, rows)
        for step in range(first, last + 1):
            batch = coming.result()
            if step < last:
                coming = thread.submit(batch_of, step + 1, rows)
            yield step, batch


def backward(call: nn.Module, batch: dict[str, Tensor], context: DistributedContext, parts: int) -> float:
    """Compute the gradients of a step's loss, the mean over all targets of the batch. Returns the loss.

    `batch` is this process' rows of the step's batch, (B, N) on the CPU, which it takes in `parts` parts, one after the
    other. `call` is the module to call in training.
    """
    targets = context.sum((batch["labels"][:, 1:] != IGNORED).sum().to(context.device))
    # Gradients are averaged over the processes, so each process divides its own by fewer targets.
    targets_per_process = targets / context.count
    total = torch.zeros((), device=context.device)
    for part in range(parts):
        rows = {name: tensor.chunk(parts)[part] for name, tensor in batch.items()}
        # DDP exchanges the gradients' sum with the last part. FSDP2 could do so as well, but would keep the gradients
        # of all parameters on every process meanwhile.
        alone = call.no_sync() if isinstance(call, DistributedDataParallel) and part < parts - 1 else nullcontext()
        # Under autocast, too: what checkpointing computes again uses the casts of the weights that are there already.
        with alone, context.autocast():
            loss = loss_of_rows(call, rows, targets_per_process, context)
            loss.backward()
        total += loss.detach()
    return float(context.sum(total / context.count))


def loss_of_rows(call: nn.Module, rows: dict[str, Tensor], items: Tensor, context: DistributedContext) -> Tensor:
    """Compute the summed loss of some rows of a batch, divided by `items`, the number of targets in the average."""
    with context.autocast():
        loss: Tensor = call(
            **context.model_inputs(rows), num_items_in_batch=items, use_cache=False, chunked_loss=True
        ).loss
    return loss


class DivergenceError(ValueError):
    """A step went wrong; the message has its number, loss and gradient norm. The weights are those before that step."""


class SpikeDetector:
    """Finds bad steps by their loss and gradient norm, compared with the losses before.

    The ranks of a run see the same two numbers, so they come to the same verdict. A loss of more than `max_loss_rise`
    nats (None: no limit) above the median of the last ones is a spike.
    """

    def __init__(self, max_loss_rise: float | None) -> None:
        self.max_loss_rise = max_loss_rise
        self.losses: list[float] = []
        self.bad_steps = 0  # in a row

    def check(self, loss: float, norm: float) -> str | None:
        """Check a step, once, before the optimizer changes the weights; return in words what is wrong with it."""
        if reason := self._reason(loss, norm):
            self.bad_steps += 1
            return reason
        self.losses, self.bad_steps = [*self.losses, loss][-_MOST_LOSSES:], 0
        return None

    def _reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm became {norm}"
        if self.max_loss_rise is None or len(self.losses) < _FEWEST_LOSSES:
            return None
        usual = median(self.losses)
        jump = median(abs(after - before) for before, after in itertools.pairwise(self.losses))
        if loss - usual <= max(self.max_loss_rise, _JUMPS * jump):
            return None
        return f"the loss rose to {loss:.2f}, from {usual:.2f} as the median of the last {len(self.losses)} steps"

    @property
    def may_skip(self) -> bool:
        """Whether the step that was just found bad may be skipped: not after many in a row."""
        return self.bad_steps <= _SKIPPED

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to decide the same, as JSON: at most 100 losses and a count."""
        return {"losses": self.losses, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`, of this version or of those that called bad steps "faults"."""
        self.losses = list(state["losses"])
        self.bad_steps = state["bad_steps"] if "bad_steps" in state else state["faults"]


def enable_checkpointing(model: Any) -> None:
    """Let the backward pass compute the layers' activations again."""
    # transformers renamed it within version 5; the old name warns where the new one exists.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


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
    fused = all(parameter.device.type == "cuda" for parameter in parts.values()) or None
    adamw = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(beta1, beta2), eps=recipe.eps, fused=fused)
    optimizers: list[torch.optim.Optimizer] = [adamw]
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
