"""Detects a training step whose loss or gradient goes wrong, and finds the first layer that did."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diff_lab.data.batches import IGNORED
from diff_lab.train.collectives import all_gather_object
from diff_lab.train.distributed import DistributedContext, local, reshard
from diff_lab.train.layer_statistics import measure_layers, reduced
from diff_lab.train.step import loss_of_rows, split_rows
from diff_transformer.utils.files import finite, write_atomically

# A loss is compared with at most so many losses before it, and only once there are so many.
_MOST_LOSSES, _FEWEST_LOSSES = 100, 20
# The loss of a batch of few tokens jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
# How many bad steps in a row are skipped, and how many of fp16's overflows, each of which halves the scale.
_SKIPPED, _OVERFLOWS = 10, 30
# Each statistic of a layer in words, and from where on growth counts: attention logits below 1 hardly matter.
_STATISTICS = {
    "logit_max": ("its largest attention logit", 1.0),
    "norm_input_rms": ("the RMS of its headwise norm's input", 1e-12),
    "hidden_rms": ("the RMS of its output", 1e-12),
}
_GROWN = 2.0  # a statistic counts as grown from so many times its last value

# A module or a parameter by its name, and which side of the module; a parameter has none.
HookPoint = tuple[str, Literal["input", "output"] | None]


class DivergenceError(ValueError):
    """A step went wrong; the message names the first layer. The weights are those before that step."""


@dataclass(frozen=True)
class BadStep:
    """A step that must not change the weights."""

    reason: str  # in words
    loss: float  # in nats
    norm: float  # of its gradient
    median_loss: float | None  # of the steps before it, if there were any


class SpikeDetector:
    """Finds bad steps by their loss and gradient norm, compared with the losses before.

    The ranks of a run see the same two numbers, so they come to the same verdict. A loss of more than `max_loss_rise`
    nats (None: no limit) above the median of the last ones is a spike. In fp16 with a loss scaler, a gradient may
    overflow now and then (`overflow_is_normal`).
    """

    def __init__(self, max_loss_rise: float | None, overflow_is_normal: bool = False) -> None:
        self.max_loss_rise, self.overflow_is_normal = max_loss_rise, overflow_is_normal
        self.losses: list[float] = []
        self.bad_steps = self.overflows = 0  # in a row

    def check(self, loss: float, norm: float) -> BadStep | None:
        """Check a step, once, by its loss before the optimizer changes the weights; return it if it is bad."""
        median_loss = median(self.losses) if self.losses else None
        if reason := self._reason(loss, norm, median_loss):
            self.bad_steps += 1
            return BadStep(reason, loss, norm, median_loss)
        self.losses, self.bad_steps = [*self.losses, loss][-_MOST_LOSSES:], 0
        return None

    def _reason(self, loss: float, norm: float, median_loss: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        if self.overflows > (_OVERFLOWS if self.overflow_is_normal else 0):
            often = f" for {self.overflows} steps in a row" if self.overflow_is_normal else ""
            return f"the gradient norm became {norm}{often}"
        if self.max_loss_rise is None or median_loss is None or len(self.losses) < _FEWEST_LOSSES:
            return None
        jump = median(abs(after - before) for before, after in itertools.pairwise(self.losses))
        if loss - median_loss <= max(self.max_loss_rise, _JUMPS * jump):
            return None
        return f"the loss rose to {loss:.2f}, from {median_loss:.2f} as the median of the last {len(self.losses)} steps"

    @property
    def may_skip(self) -> bool:
        """Whether the step that was just found bad may be skipped: not after many in a row."""
        return self.bad_steps <= _SKIPPED

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to decide the same, as JSON: at most 100 losses and two counts."""
        return {"losses": self.losses, "bad_steps": self.bad_steps, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`, of this version or of those that called bad steps "faults"."""
        self.losses, self.overflows = list(state["losses"]), state["overflows"]
        self.bad_steps = state["bad_steps"] if "bad_steps" in state else state["faults"]


@dataclass(frozen=True)
class Divergence:
    """A bad step and its first bad layer; `str()` says so in a few sentences. Only a spike has the last four."""

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
        """Write all of it as JSON; if that fails, OSError has the text of `str()`, and the reason."""
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
    """Find the first layer that went wrong in a bad step. The weights are those before it; its gradients are lost.

    A second pass looks for numbers that are not finite. For a spike, the statistics of each layer are compared with
    those logged last (`before`), and the rows of the batch with each other. All ranks call this with the whole batch of
    the step and the model, without DDP's wrapper, in training mode. They get the same answer.
    """
    rows, logged = context.local_batch(dict(batch)), before or {}
    if not (math.isfinite(bad_step.loss) and math.isfinite(bad_step.norm)):
        items = ((batch["labels"][:, 1:] != IGNORED).sum() / context.dp_size).to(context.device)
        module, wrong, is_weight = _find_nonfinite(model, split_rows(rows, accumulation), items, context)
        if module is None:
            return Divergence(step, bad_step, None, None, wrong)
        match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module)
        layer = int(match[1]) + 1 if match else None
        location = f"layer {layer} of {model.config.num_hidden_layers} ({module})" if match else module or "the loss"
        return Divergence(step, bad_step, layer, module, f"It began in {location}: {wrong}", is_weight)
    # The gradients are still there, and clipping has not changed each layer's share of them.
    squares = [context.clip(layer.parameters(), None) ** 2 for layer in model.model.layers]
    # For each of this rank's rows, the mean loss over its targets, and how many these are.
    targets = (rows["labels"][:, 1:] != IGNORED).sum(1)
    pairs = zip(split_rows(rows, len(targets)), targets.clamp(min=1), strict=True)
    with torch.no_grad():
        losses = torch.stack([loss_of_rows(model, row, count, context) for row, count in pairs]).tolist()
    reshard(model)
    worst = losses.index(max(losses))
    with context.autocast():
        row = {name: tensor[worst : worst + 1].to(context.device) for name, tensor in rows.items()}
        now = reduced(measure_layers(model, row))
    per_rank = all_gather_object(list(zip(losses, targets.tolist(), strict=True)))[: context.dp_size]
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


def _find_nonfinite(
    model: nn.Module, parts: Sequence[dict[str, Tensor]], items: Tensor, context: DistributedContext
) -> tuple[str | None, str, bool]:
    """Repeat a step until something is not finite: a weight, a module's output, or a gradient. Return the first such
    module (None if all is finite), the reason, and whether it is a weight.
    """
    weight, seen_by = _extreme({(name, None): _not_finite(each) for name, each in model.named_parameters()}, min)
    if weight is not None:
        wrong = "held numbers that are not finite before the step: the cause came earlier."
        return weight[0].rpartition(".")[0], f"{weight[0]} {wrong}{seen_by}", True
    model.zero_grad()
    for rows in parts:
        with ExitStack() as undo:
            undo.callback(reshard, model)
            undo.enter_context(torch.compiler.set_stance("force_eager"))  # what is compiled passes hooks by
            values, gradients = _watch(model, undo)
            loss = loss_of_rows(model, rows, items, context)
            point, seen_by = _extreme(values, min)
            is_forward = point is not None
            if not is_forward:
                loss.backward()
                # What nobody entered gets its place at the end: the loss itself uses these weights.
                gradients |= {(name, None): _not_finite(each.grad) for name, each in model.named_parameters()}
                point, seen_by = _extreme(gradients, max)
        if point is not None:
            model.zero_grad()
            name, side = point
            module = name if side == ("output" if is_forward else "input") else name.rpartition(".")[0]
            what = f"what {module} computes" if module else "the loss"
            if not is_forward:
                what = f"the gradient that {module or 'the loss'} computes"
            return module, f"{what} is not finite, although all that it is computed from is.{seen_by}", False
    norms = {name: context.clip([each], None) for name, each in model.named_parameters()}
    norm = context.clip(model.parameters(), None)
    model.zero_grad()
    if not math.isfinite(norm):
        name = max(norms, key=norms.__getitem__)
        wrong = f"every gradient is finite, but they are too large for their norm: the largest is that of {name}."
        return name.rpartition(".")[0], wrong, False
    wrong = (
        "The same step with the same weights is finite when it is repeated: suspect the hardware, or an operation "
        "that does not give the same result each time."
    )
    return None, wrong, False


def _watch(model: nn.Module, undo: ExitStack) -> tuple[dict[HookPoint, Tensor | None], dict[HookPoint, Tensor | None]]:
    """Test the inputs and outputs of each module, and the gradients of both, as long as hooks are not undone.

    Returns whether something there is not finite, in the order of the forward pass. The backward pass goes from the
    last to the first; a parameter stands at its module's beginning.
    """
    values: dict[HookPoint, Tensor | None] = {}
    gradients: dict[HookPoint, Tensor | None] = {}

    def is_number(x: object) -> bool:
        return isinstance(x, Tensor) and x.is_floating_point()

    @torch.no_grad()
    def flag(flags: dict[HookPoint, Tensor | None], point: HookPoint, tensor: Tensor) -> None:
        found, before = _not_finite(tensor), flags[point]
        flags[point] = found if found is None or before is None else found | before

    def test(point: HookPoint, tensors: Iterable[Any]) -> None:
        values.setdefault(point)
        gradients.setdefault(point)
        for tensor in filter(is_number, tensors):
            flag(values, point, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(flag, gradients, point))

    def enter(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # A view for each use: its gradient is that of this use alone, not of all that the tensor is used for.
        views = tuple(x.view_as(x) if is_number(x) else x for x in inputs)
        test((name, "input"), views)
        for parameter, _ in module.named_parameters(name, recurse=False):
            gradients.setdefault((parameter, None))
        return views

    def leave(name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        output = output if name else output.loss  # the model's other outputs are those of its modules
        test((name, "output"), output if isinstance(output, tuple) else (output,))

    for name, module in model.named_modules():
        undo.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
        undo.callback(module.register_forward_hook(partial(leave, name)).remove)
    return values, gradients


def _not_finite(tensor: Tensor | None) -> Tensor | None:
    """Return whether this rank's part of a tensor holds anything that is not finite."""
    return None if tensor is None else ~local(tensor.detach()).isfinite().all()


def _extreme(
    flags: Mapping[HookPoint, Tensor | None], choose: Callable[[set[int]], int]
) -> tuple[HookPoint | None, str]:
    """Find the first (`min`) or last (`max`) place whose flag is set on any rank, and say which ranks if not all."""
    # One transfer from the device for all of them.
    known = {number: flag for number, flag in enumerate(flags.values()) if flag is not None}
    numbers = set(itertools.compress(known, torch.stack(list(known.values())).tolist())) if known else set()
    per_rank = all_gather_object(numbers)
    if not any(per_rank):
        return None, ""
    extreme = choose(set.union(*per_rank))
    ranks = [str(rank) for rank, numbers in enumerate(per_rank) if extreme in numbers]
    is_partial = len(ranks) < len(per_rank)
    return list(flags)[extreme], f" Of {len(per_rank)} ranks these saw it: {', '.join(ranks)}." if is_partial else ""


def _growth(now: Mapping[str, list[float]], before: Mapping[str, list[float]]) -> tuple[int | None, str]:
    """Find the layer, counted from 1, whose statistic grew most since it was logged last, and say which grew.

    Growth in one layer is carried to those after it, so it is the first layer that grew at least half as much.
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
    """Say whether one of the rows, of (loss, targets) each, makes most of the rise above the median loss."""
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
