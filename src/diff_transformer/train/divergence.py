"""When training goes wrong: noticing it at the step where it does, and saying in which layer it began."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data.packing import IGNORED
from diff_transformer.train.distributed import Processes
from diff_transformer.train.fault import Origin, find_origin, layer_of, loss_of_rows
from diff_transformer.train.inspection import inspect, reduced
from diff_transformer.train.sharding import reshard
from diff_transformer.train.together import gathered

# Losses that a new one is compared with: so many at most, and not before there are so many.
_KEPT, _NEEDED = 100, 20
# A batch of few tokens has a loss that jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
# Bad steps in a row that are left out; and of fp16's overflowing gradients, which halve the scale each time.
_LEFT_OUT, _OVERFLOWS = 10, 30
# A number of a layer that has grown less than so many times says nothing.
_GROWN = 2.0

_WORDS = {
    "hidden_rms": "the RMS of its output",
    "norm_input_rms": "the RMS of what enters its headwise norm",
    "logit_max": "its largest attention logit",
}


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step.

    Attributes:
        what: in words.
        loss, norm: of the step.
        usual: the median of the losses before it; None where there were none.
    """

    what: str
    loss: float
    norm: float
    usual: float | None


class Watch:
    """Looks at every step's loss and gradient norm, and remembers the losses.

    Processes that train together see the same two numbers, so they come to the same verdict.

    Args:
        max_loss_rise: nats above the median of the last losses from which a loss is a spike; None for no limit.
        overflow_is_normal: whether a gradient may overflow now and then, as in fp16 with a loss scaler.
    """

    def __init__(self, max_loss_rise: float | None, overflow_is_normal: bool = False) -> None:
        self.max_loss_rise, self.overflow_is_normal = max_loss_rise, overflow_is_normal
        self.losses: list[float] = []
        self.faults = self.overflows = 0  # in a row

    def fault(self, loss: float, norm: float) -> Fault | None:
        """What is wrong with a step; None where nothing is. Call it once for each step.

        Args:
            loss: of the step, before the optimizer changes the weights by it.
            norm: of its gradient.
        """
        usual = median(self.losses) if self.losses else None
        what = self._what(loss, norm, usual)
        if what is None:
            self.losses = [*self.losses, loss][-_KEPT:]
        self.faults = self.faults + 1 if what else 0
        return None if what is None else Fault(what, loss, norm, usual)

    def _what(self, loss: float, norm: float, usual: float | None) -> str | None:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        if self.overflows > (_OVERFLOWS if self.overflow_is_normal else 0):
            often = f" for {self.overflows} steps in a row" if self.overflow_is_normal else ""
            return f"the gradient norm became {norm}{often}"
        if self.max_loss_rise is None or usual is None or len(self.losses) < _NEEDED:
            return None
        jump = median(abs(after - before) for before, after in pairwise(self.losses))
        if loss - usual <= max(self.max_loss_rise, _JUMPS * jump):
            return None
        return f"the loss rose to {loss:.2f}, from {usual:.2f} as the median of the last {len(self.losses)} steps"

    @property
    def may_leave_out(self) -> bool:
        """Whether the step that was just found bad can still be left out: not after many in a row."""
        return self.faults <= _LEFT_OUT

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know to decide the same, as JSON: at most 100 losses and two counts."""
        return {"losses": self.losses, "faults": self.faults, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.losses, self.faults, self.overflows = list(state["losses"]), state["faults"], state["overflows"]


@dataclass(frozen=True)
class Divergence:
    """A step that went wrong, and where that began; `str()` tells it in a few sentences.

    Attributes:
        step: the step; its batch is a function of it.
        fault: what is wrong with it.
        layer: the number, counted from 1, of the layer where it began; None outside of the layers or where unknown.
        module: the module; "" is the model itself, None unknown.
        found: what was found there, in words.
        weights_are_broken: whether leaving the batch out cannot help.
        rows: the loss of each row of the batch, for a spike.
        now, before: numbers of each layer, for a spike: in this step, and as they were logged last.
        gradient_shares: each layer's share of the squared gradient norm, for a spike.
    """

    step: int
    fault: Fault
    layer: int | None
    module: str | None
    found: str
    weights_are_broken: bool = False
    rows: list[float] = field(default_factory=list)
    now: dict[str, list[float]] = field(default_factory=dict)
    before: dict[str, list[float]] = field(default_factory=dict)
    gradient_shares: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"At step {self.step} {self.fault.what}. {self.found}"

    def write(self, file: Path) -> None:
        """Write all of it as JSON, whole or not at all; what is not finite is null.

        Raises:
            OSError: it cannot be written; the message is what `str()` gives, and why.
        """
        unfinished = file.with_name(f".unfinished-{file.name}")
        try:
            unfinished.write_text(json.dumps(_plain(asdict(self)), indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, file)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise OSError(f"{self} This cannot be written to {str(file)!r}: {error}.") from error


def diagnose(
    model: Any,
    batch: Mapping[str, Tensor],
    processes: Processes,
    fault: Fault,
    *,
    step: int,
    accumulation: int = 1,
    before: Mapping[str, list[float]] | None = None,
) -> Divergence:
    """Find the layer where a bad step went wrong. The weights are those before it; its gradients are lost.

    What is not finite is looked for in a second pass. For a spike, the numbers of each layer now are compared with
    those logged last, and the rows of the batch with each other. All processes call this and get the same answer.

    Args:
        model: without DDP's wrapper, in training mode.
        batch: of the step, the whole of it: (B, N) `input_ids`, `labels` and what else the model takes.
        processes: those that train together.
        fault: what `Watch.fault` said of the step.
        step: its number.
        accumulation: the parts that each process divides its rows into.
        before: the numbers of `train.inspection.inspect` that were logged last, if any.
    """
    own = processes.rows(dict(batch))
    if math.isfinite(fault.loss) and math.isfinite(fault.norm):
        return _spike(model, own, processes, fault, step, dict(before or {}))
    targets = (batch["labels"][:, 1:] != IGNORED).sum()
    pieces = [{name: tensor.chunk(accumulation)[part] for name, tensor in own.items()} for part in range(accumulation)]
    origin = find_origin(model, pieces, (targets / processes.shares).to(processes.device), processes)
    if origin is None:
        found = (
            "The same step with the same weights is finite when it is repeated: suspect the hardware, or an operation "
            "that does not give the same result each time."
        )
        return Divergence(step, fault, layer=None, module=None, found=found)
    found = f"It began in {_place(origin.module, model)}: {origin.found}."
    found += _whose(origin, processes, accumulation)
    broken = origin.kind == "weight"
    return Divergence(step, fault, origin.layer, origin.module, found, weights_are_broken=broken)


def _place(module: str, model: Any) -> str:
    """What to call a module: its layer, counted from 1, and its name."""
    layer = layer_of(module)
    if layer is None:
        return module or "the loss"
    return f"layer {layer} of {model.config.num_hidden_layers} ({module})"


def _whose(origin: Origin, processes: Processes, accumulation: int) -> str:
    """Which part of the batch and which processes it was, where there are several."""
    said = ""
    if origin.part is not None and accumulation > 1:
        said += f" It was part {origin.part} of the {accumulation} that a batch is divided into."
    if len(origin.ranks) < processes.count:
        said += f" Of {processes.count} processes these saw it: {', '.join(map(str, origin.ranks))}."
    return said


def _spike(
    model: Any,
    own: Mapping[str, Tensor],
    processes: Processes,
    fault: Fault,
    step: int,
    before: dict[str, list[float]],
) -> Divergence:
    # The gradients are still there; clipping has left each layer its share.
    squares = [processes.clip(layer.parameters(), None) ** 2 for layer in model.model.layers]
    shares = [square / max(sum(squares), 1e-300) for square in squares]
    losses, targets = _rows(model, own, processes)
    worst = max(range(len(losses)), key=lambda row: losses[row])
    alone = {name: tensor[worst : worst + 1].to(processes.device) for name, tensor in own.items()}
    with processes.autocast():
        now = reduced(inspect(model, alone), processes.device)
    every = gathered(list(zip(losses, targets, strict=True)))[: processes.shares]
    rows = [row for each in every for row in each]
    layer, growth = _growth(now, before)
    found = f"{growth} {_peculiar(rows, fault.usual)}"
    return Divergence(
        step,
        fault,
        layer=layer,
        module=None if layer is None else f"model.layers.{layer - 1}",
        found=found,
        rows=[loss for loss, _ in rows],
        now=now,
        before={name: list(before[name]) for name in now if before.get(name)},
        gradient_shares=shares,
    )


@torch.no_grad()
def _rows(model: Any, own: Mapping[str, Tensor], processes: Processes) -> tuple[list[float], list[int]]:
    """For each of this process' rows, the mean loss over its targets, and how many these are."""
    targets = (own["labels"][:, 1:] != IGNORED).sum(1)
    losses = [
        loss_of_rows(
            model, {name: tensor[row : row + 1] for name, tensor in own.items()}, count.clamp(min=1), processes
        )
        for row, count in enumerate(targets)
    ]
    reshard(model)
    return torch.stack(losses).tolist(), targets.tolist()


def _growth(now: Mapping[str, list[float]], before: Mapping[str, list[float]]) -> tuple[int | None, str]:
    """The layer (counted from 1) and the number of it that have grown most since they were logged last, in words.

    What grows in one layer is carried to those after it, so it is the first layer that grew at least half as much.
    """
    grown = {
        name: [_times(name, new, old) for new, old in zip(values, before[name], strict=True)]
        for name, values in now.items()
        if name in _WORDS and before.get(name)
    }
    if not grown:
        return None, "No numbers of the layers were logged before, to compare these with (train.inspect_every)."
    name = max(grown, key=lambda name: max(grown[name]))
    most = max(grown[name])
    if most < _GROWN:
        return None, f"No layer's numbers are {_GROWN:g} times those logged last: it is not the weights."
    layer = next(number for number, times in enumerate(grown[name], start=1) if times >= most / 2)
    old, new = before[name][layer - 1], now[name][layer - 1]
    return layer, f"It began in layer {layer} of {len(grown[name])}: {_WORDS[name]} went from {old:.3g} to {new:.3g}."


def _times(name: str, new: float, old: float) -> float:
    # Attention logits below 1 hardly matter, so growth from there is none.
    least = 1.0 if name == "logit_max" else 1e-12
    return max(new, least) / max(old, least)


def _peculiar(rows: Sequence[tuple[float, int]], usual: float | None) -> str:
    """Whether one row, of (loss, targets) each, makes most of the rise above the usual loss, in words."""
    losses = [loss for loss, _ in rows]
    if usual is not None and len(rows) > 1:
        rise = [max(0.0, loss - usual) * count for loss, count in rows]
        row = max(range(len(rows)), key=rise.__getitem__)
        if rise[row] > sum(rise) / 2:
            return (
                f"Row {row + 1} of the batch makes {100 * rise[row] / sum(rise):.0f} % of the rise: its loss is "
                f"{losses[row]:.2f}, the rows' median {median(losses):.2f}."
            )
    return f"The rows of the batch are alike: their losses go from {min(losses):.2f} to {max(losses):.2f}."


def _plain(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
