"""When training goes wrong: in which layer it began."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data.packing import IGNORED
from diff_transformer.train.distributed import Processes
from diff_transformer.train.fault import Origin, find_origin, layer_of, loss_of_rows
from diff_transformer.train.inspection import inspect, reduced
from diff_transformer.train.loss_watch import Fault, Watch
from diff_transformer.train.progress import DivergenceError
from diff_transformer.train.run_folder import DIVERGENCE
from diff_transformer.train.schema import TrainRecipe
from diff_transformer.train.sharding import reshard
from diff_transformer.train.together import gathered

# A number of a layer that has grown less than so many times says nothing.
_GROWN = 2.0

_WORDS = {
    "hidden_rms": "the RMS of its output",
    "norm_input_rms": "the RMS of what enters its headwise norm",
    "logit_max": "its largest attention logit",
}


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


def stop_or_leave_out(
    divergence: Divergence,
    settings: TrainRecipe,
    watch: Watch,
    folder: Path,
    checkpoint: Path | None,
    processes: Processes,
) -> None:
    """Write the report down; raise unless the recipe wants such a step left out and that can help."""
    if processes.is_first:
        divergence.write(folder / DIVERGENCE)
    if settings.on_divergence == "skip" and watch.may_leave_out and not divergence.weights_are_broken:
        return
    where = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
    raise DivergenceError(
        f"{divergence} All of it is in {folder / DIVERGENCE}; {where}. A lower train.learning_rate (now "
        f"{settings.learning_rate}) or a longer warm-up usually helps; train.on_divergence=skip leaves such steps out."
    )


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
