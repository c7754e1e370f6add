"""Finds where a training step stops being finite: repeats the step with hooks on every module."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diff_transformer.train.distributed import DistributedContext, local, reshard
from diff_transformer.train.process_errors import gathered

Side = Literal["input", "output"]


@dataclass(frozen=True)
class Origin:
    """Where a step stopped being finite.

    Attributes:
        kind: "weight": it was not finite before the step; "forward" and "backward": the pass that it happened in;
            "norm": gradients are finite, but too large for the sum of their squares.
        module: the module that it began in, as the model names it; "" for the loss.
        explanation: a sentence about what was found.
        part: which of the parts that a batch is divided into, counted from 1; None where it concerns no single part.
        ranks: the processes that saw it.
    """

    kind: Literal["weight", "forward", "backward", "norm"]
    module: str
    explanation: str
    part: int | None
    ranks: list[int]

    @property
    def layer(self) -> int | None:
        """The number of the layer, counted from 1; None for what is in no layer."""
        return layer_of(self.module)


def layer_of(module: str) -> int | None:
    """The number, counted from 1, of the layer that a module or a parameter of this name belongs to, if any."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module)
    return int(match[1]) + 1 if match else None


def locate_nonfinite(
    model: nn.Module, parts: Sequence[dict[str, Tensor]], items: Tensor, context: DistributedContext
) -> Origin | None:
    """Repeat a step and find the first thing that is not finite: a weight, what a module gives, or a gradient.

    Gradients are lost; weights and everything else stay. Compiled layers run uncompiled, so that hooks are called.
    All processes call this and all get the same answer.

    Args:
        model: without DDP's wrapper, in training mode.
        parts: this process' parts of the batch, (n, N) on the CPU.
        items: what each part's loss is divided by.
        context: the processes of the run.

    Returns:
        None where all is finite: the step went wrong only once.
    """
    if broken := _broken_weight(model):
        return broken
    largest: dict[str, float] = {}
    for part, rows in enumerate(parts, start=1):
        model.zero_grad()
        with ExitStack() as undo:
            undo.callback(model.zero_grad)
            undo.callback(reshard, model)
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            hooks = _FiniteHooks(model, undo)
            loss = loss_of_rows(model, rows, items, context)
            hooks.forward = False
            first, ranks = _extreme(hooks.flags(hooks.values), last=False)
            if first is not None:
                return Origin("forward", *_forward_words(*hooks.names[first]), part, ranks)
            loss.backward()
            # The pass goes from the last place to the first, and a module's parameters belong to its beginning.
            places: list[tuple[str, Side | None]] = list(hooks.names)
            flags = hooks.flags(hooks.gradients)
            for name, parameter in model.named_parameters():
                places.append((name, None))
                flags.append(_not_finite(parameter.grad))
            order = sorted(range(len(places)), key=lambda place: hooks.position(*places[place]))
            last, ranks = _extreme([flags[place] for place in order], last=True)
            if last is not None:
                return Origin("backward", *_backward_words(*places[order[last]]), part, ranks)
            for name, size in _largest_gradients(model).items():
                largest[name] = max(size, largest.get(name, 0.0))
    name = max(largest, key=largest.__getitem__)
    if largest[name] < math.sqrt(torch.finfo(torch.float32).max / sum(p.numel() for p in model.parameters())):
        return None
    explanation = (
        "every gradient is finite, but they are too large for their norm: the largest, "
        f"{largest[name]:.1e}, is of {name}"
    )
    return Origin("norm", name.rpartition(".")[0], explanation, None, list(range(context.count)))


def loss_of_rows(model: nn.Module, rows: dict[str, Tensor], items: Tensor, context: DistributedContext) -> Tensor:
    """The summed loss of some rows of a batch, divided by `items`: as a step of training computes it."""
    with context.autocast():
        return model(**context.model_inputs(rows), num_items_in_batch=items, use_cache=False, chunked_loss=True).loss


class _FiniteHooks:
    """Hooks on all modules of a model that test their inputs and outputs, and the gradients of both.

    Attributes:
        names: each place (a module and its side), in the order of the forward pass.
        values, gradients: whether something there is not finite, by the number of the place.
        forward: whether this is the forward pass; what is recomputed for gradients is not tested again.
    """

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        self.names: list[tuple[str, Side]] = []
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.forward = True
        self._places: dict[tuple[str, str], int] = {}
        for name, module in model.named_modules():
            undo.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
            undo.callback(module.register_forward_hook(partial(self._leave, name)).remove)

    def flags(self, by_place: Mapping[int, Tensor]) -> list[Tensor | None]:
        """A flag for each place, or None."""
        return [by_place.get(place) for place in range(len(self.names))]

    def position(self, name: str, side: Side | None) -> float:
        """Where in the forward pass a place is; a parameter (no side) is where its module begins."""
        if side is None:
            # Weights of a module that nobody called are used by the loss itself.
            return self._places.get((name.rpartition(".")[0], "input"), math.inf)
        return self._places[name, side]

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # A view for each use: its gradient is that of this use alone, not of all that the tensor is used for.
        views = tuple(x.view_as(x) if _is_number(x) else x for x in inputs)
        self._test(name, "input", views)
        return views

    def _leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not name:
            output = output.loss  # the model's other outputs are those of its modules
        self._test(name, "output", output if isinstance(output, tuple) else (output,))

    def _test(self, name: str, side: Side, values: Iterable[Any]) -> None:
        place = self._places.setdefault((name, side), len(self._places))
        if place == len(self.names):
            self.names.append((name, side))
        for tensor in filter(_is_number, values):
            if self.forward:
                self._flag(self.values, place, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._flag, self.gradients, place))

    @staticmethod
    @torch.no_grad()
    def _flag(flags: dict[int, Tensor], place: int, tensor: Tensor) -> None:
        flag = _not_finite(tensor)
        assert flag is not None
        flags[place] = flag | flags[place] if place in flags else flag


def _is_number(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _not_finite(tensor: Tensor | None) -> Tensor | None:
    """Whether this process' part of a tensor holds anything that is not finite."""
    return None if tensor is None else ~local(tensor.detach()).isfinite().all()


def _extreme(flags: Sequence[Tensor | None], last: bool) -> tuple[int | None, list[int]]:
    """The first or the last of the flags that any process has, and which processes have it."""
    # One transfer from the device for all of them.
    known = {place: flag for place, flag in enumerate(flags) if flag is not None}
    places = set(itertools.compress(known, torch.stack(list(known.values())).tolist())) if known else set()
    per_rank = gathered(places)
    if not any(per_rank):
        return None, []
    place = (max if last else min)(set.union(*per_rank))
    return place, [rank for rank, places in enumerate(per_rank) if place in places]


def _broken_weight(model: nn.Module) -> Origin | None:
    weights = dict(model.named_parameters())
    place, ranks = _extreme([_not_finite(weight) for weight in weights.values()], last=False)
    if place is None:
        return None
    name = list(weights)[place]
    explanation = f"{name} held numbers that are not finite before the step: what broke it came earlier"
    return Origin("weight", name.rpartition(".")[0], explanation, None, ranks)


def _largest_gradients(model: nn.Module) -> dict[str, float]:
    """The largest number of each parameter's gradient."""
    parts = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    # Of a small parameter that is split a process may have nothing.
    sizes = [part.abs().max().float() if part.numel() else part.new_zeros(()).float() for part in parts.values()]
    per_rank = gathered(torch.stack(sizes).tolist())
    return dict(zip(parts, map(max, zip(*per_rank, strict=True)), strict=True))


def _forward_words(name: str, side: Side) -> tuple[str, str]:
    if not name:
        return "", "the loss is not finite, although all that it is computed from is"
    if side == "output":
        return name, f"the output of {name} is not finite, although its input and its weights are"
    parent, _, child = name.rpartition(".")
    return parent, f"what {parent or 'the model'} hands to {child} is not finite, although what it is computed from is"


def _backward_words(name: str, side: Side | None) -> tuple[str, str]:
    before = "although the gradients before it in the backward pass are"
    if side is None:
        return name.rpartition(".")[0], f"the gradient of {name} is not finite, {before}"
    if side == "input":
        return name, f"the gradient that {name} gives back is not finite, {before}"
    parent, _, child = name.rpartition(".")
    giver = parent or "the loss"
    return parent, f"the gradient that {giver} gives back to {child} is not finite, {before}"
