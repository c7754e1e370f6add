"""Detects a training step whose loss or gradient goes wrong, and reports in which layer that began."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED
from diff_lab.train.distributed import DistributedContext, reshard
from diff_lab.train.layer_statistics import measure_layers, reduced
from diff_lab.train.nonfinite_search import layer_of, locate_nonfinite
from diff_lab.train.process_errors import gathered
from diff_lab.train.step import loss_of_rows, split_rows
from diff_transformer.utils.files import finite, write_atomically

# A loss is compared with at most so many losses before it, and only once there are so many.
_MOST_LOSSES, _FEWEST_LOSSES = 100, 20
# The loss of a batch of few tokens jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
# How many bad steps in a row are skipped, and how many of fp16's overflows, each of which halves the scale.
_SKIPPED, _OVERFLOWS = 10, 30
# A statistic of a layer counts as grown from so many times its last value.
_GROWN = 2.0

# Each statistic in words, and from where on growth counts: attention logits below 1 hardly matter.
_STATISTICS = {
    "logit_max": ("its largest attention logit", 1.0),
    "norm_input_rms": ("the RMS of what enters its headwise norm", 1e-12),
    "hidden_rms": ("the RMS of its output", 1e-12),
}


class DivergenceError(ValueError):
    """A step went wrong; the message says where it began. The weights are those before that step."""


@dataclass(frozen=True)
class BadStep:
    """A step that must not change the weights."""

    reason: str  # in words
    loss: float  # in nats
    norm: float  # of its gradient
    median_loss: float | None  # of the steps before it, if there were any


class SpikeDetector:
    """Finds bad steps by their loss and gradient norm, compared with the losses before.

    The processes of a run see the same two numbers, so they come to the same verdict. A loss of more than
    `max_loss_rise` nats (None: no limit) above the median of the last ones is a spike. In fp16 with a loss scaler, a
    gradient may overflow now and then (`overflow_is_normal`).
    """

    def __init__(self, max_loss_rise: float | None, overflow_is_normal: bool = False) -> None:
        self.max_loss_rise, self.overflow_is_normal = max_loss_rise, overflow_is_normal
        self.losses: list[float] = []
        self.bad_steps = self.overflows = 0  # in a row

    def check(self, loss: float, norm: float) -> BadStep | None:
        """Whether a step is bad, by its loss before the optimizer changes the weights; None where it is not.

        Called once for each step.
        """
        median_loss = median(self.losses) if self.losses else None
        reason = self._reason(loss, norm, median_loss)
        if reason is None:
            self.losses = [*self.losses, loss][-_MOST_LOSSES:]
            self.bad_steps = 0
            return None
        self.bad_steps += 1
        return BadStep(reason, loss, norm, median_loss)

    def _reason(self, loss: float, norm: float, median_loss: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        if self.overflows > (_OVERFLOWS if self.overflow_is_normal else 0):
            often = f" for {self.overflows} steps in a row" if self.overflow_is_normal else ""
            return f"the gradient norm became {norm}{often}"
        if self.max_loss_rise is None or median_loss is None or len(self.losses) < _FEWEST_LOSSES:
            return None
        jump = median(abs(after - before) for before, after in pairwise(self.losses))
        if loss - median_loss <= max(self.max_loss_rise, _JUMPS * jump):
            return None
        return f"the loss rose to {loss:.2f}, from {median_loss:.2f} as the median of the last {len(self.losses)} steps"

    @property
    def may_skip(self) -> bool:
        """Whether the step that was just found bad may be skipped: not after many in a row."""
        return self.bad_steps <= _SKIPPED

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide the same, as JSON: at most 100 losses and two counts."""
        return {"losses": self.losses, "bad_steps": self.bad_steps, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, of this version or of those that counted the bad steps as "faults"."""
        self.losses, self.overflows = list(state["losses"]), state["overflows"]
        self.bad_steps = state["bad_steps"] if "bad_steps" in state else state["faults"]


@dataclass(frozen=True)
class Divergence:
    """A bad step and where it went wrong; `str()` says so in a few sentences. Only a spike has the last four."""

    step: int  # of which its batch is a function
    bad_step: BadStep
    layer: int | None  # the number, counted from 1, of the layer where it began; None outside of the layers or unknown
    module: str | None  # "" is the model itself, None unknown
    explanation: str  # what is wrong there, in words
    weights_are_broken: bool = False  # then it cannot help to skip the batch
    rows: list[float] = field(default_factory=list)  # the loss of each row of the batch
    now: dict[str, list[float]] = field(default_factory=dict)  # statistics of each layer in this step
    before: dict[str, list[float]] = field(default_factory=dict)  # the same, as they were logged last
    gradient_shares: list[float] = field(default_factory=list)  # of each layer in the squared gradient norm

    def __str__(self) -> str:
        return f"At step {self.step} {self.bad_step.reason}. {self.explanation}"

    def write(self, file: Path) -> None:
        """Write all of it as JSON; where that cannot be done, OSError says what `str()` gives, and why."""
        try:
            write_atomically(file, json.dumps(finite(asdict(self)), indent=1) + "\n")
        except OSError as error:
            raise OSError(f"{self} This cannot be written to {str(file)!r}: {error}.") from error


def diagnose(
    model: Any,
    batch: Mapping[str, Tensor],
    context: DistributedContext,
    bad_step: BadStep,
    step: int,
    *,
    accumulation: int = 1,
    before: Mapping[str, list[float]] | None = None,
) -> Divergence:
    """Find the layer where a bad step went wrong. The weights are those before it; its gradients are lost.

    A second pass looks for what is not finite. For a spike, the statistics of each layer are compared with those
    logged last (`before`), and the rows of the batch with each other. All processes call this with the whole batch of
    the step and the model, without DDP's wrapper, in training mode. They get the same answer.
    """
    rows, logged = context.local_batch(dict(batch)), before or {}
    if math.isfinite(bad_step.loss) and math.isfinite(bad_step.norm):
        # The gradients are still there, and clipping has not changed each layer's share of them.
        squares = [context.clip(layer.parameters(), None) ** 2 for layer in model.model.layers]
        # For each of this process' rows, the mean loss over its targets, and how many these are.
        targets = (rows["labels"][:, 1:] != IGNORED).sum(1)
        pairs = zip(split_rows(rows, len(targets)), targets.clamp(min=1), strict=True)
        with torch.no_grad():
            losses = torch.stack([loss_of_rows(model, row, count, context) for row, count in pairs]).tolist()
        reshard(model)
        worst = losses.index(max(losses))
        worst_row = {name: tensor[worst : worst + 1].to(context.device) for name, tensor in rows.items()}
        with context.autocast():
            now = reduced(measure_layers(model, worst_row))
        per_rank = gathered(list(zip(losses, targets.tolist(), strict=True)))[: context.dp_size]
        all_rows = [row for each in per_rank for row in each]
        layer, growth = _growth(now, logged)
        return Divergence(
            step,
            bad_step,
            layer=layer,
            module=None if layer is None else f"model.layers.{layer - 1}",
            explanation=f"{growth} {_rows_in_words(all_rows, bad_step.median_loss)}",
            rows=[loss for loss, _ in all_rows],
            now=now,
            before={name: list(logged[name]) for name in now if logged.get(name)},
            gradient_shares=[square / max(sum(squares), 1e-300) for square in squares],
        )
    items = ((batch["labels"][:, 1:] != IGNORED).sum() / context.dp_size).to(context.device)
    origin = locate_nonfinite(model, split_rows(rows, accumulation), items, context)
    if origin is None:
        explanation = (
            "The same step with the same weights is finite when it is repeated: suspect the hardware, or an operation "
            "that does not give the same result each time."
        )
        return Divergence(step, bad_step, layer=None, module=None, explanation=explanation)
    layer = layer_of(origin.module)
    location = origin.module or "the loss"
    if layer is not None:
        location = f"layer {layer} of {model.config.num_hidden_layers} ({origin.module})"
    explanation = f"It began in {location}: {origin.explanation}."
    if origin.part is not None and accumulation > 1:
        explanation += f" It was part {origin.part} of the {accumulation} that a batch is divided into."
    if len(origin.ranks) < context.count:
        explanation += f" Of {context.count} processes these saw it: {', '.join(map(str, origin.ranks))}."
    broken = origin.kind == "weight"
    return Divergence(step, bad_step, layer, origin.module, explanation, weights_are_broken=broken)


def _growth(now: Mapping[str, list[float]], before: Mapping[str, list[float]]) -> tuple[int | None, str]:
    """The layer, counted from 1, whose statistic grew most since it was logged last, and that statistic in words.

    What grows in one layer is carried to those after it, so it is the first layer that grew at least half as much.
    """
    growth = {
        name: [max(new, least) / max(old, least) for new, old in zip(now[name], before[name], strict=True)]
        for name, (_, least) in _STATISTICS.items()
        if now.get(name) and before.get(name)
    }
    if not growth:
        return None, "No numbers of the layers were logged before, to compare these with (train.inspect_every)."
    name = max(growth, key=lambda name: max(growth[name]))
    most = max(growth[name])
    if most < _GROWN:
        return None, f"No layer's numbers are {_GROWN:g} times those logged last: it is not the weights."
    layer = next(number for number, ratio in enumerate(growth[name], start=1) if ratio >= most / 2)
    old, new = before[name][layer - 1], now[name][layer - 1]
    change = f"{_STATISTICS[name][0]} went from {old:.3g} to {new:.3g}"
    return layer, f"It began in layer {layer} of {len(growth[name])}: {change}."


def _rows_in_words(rows: Sequence[tuple[float, int]], median_loss: float | None) -> str:
    """Whether one of the rows, of (loss, targets) each, makes most of the rise above the median loss."""
    losses = [loss for loss, _ in rows]
    if median_loss is not None and len(rows) > 1:
        rise = [max(0.0, loss - median_loss) * count for loss, count in rows]
        row = max(range(len(rows)), key=rise.__getitem__)
        if rise[row] > sum(rise) / 2:
            return (
                f"Row {row + 1} of the batch makes {100 * rise[row] / sum(rise):.0f} % of the rise: its loss is "
                f"{losses[row]:.2f}, the rows' median {median(losses):.2f}."
            )
    return f"The rows of the batch are alike: their losses go from {min(losses):.2f} to {max(losses):.2f}."
