"""Finds where a training step stops being finite: repeats the step with hooks on every module."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from diff_lab.train.distributed import DistributedContext, local, reshard
from diff_lab.train.process_errors import gathered
from diff_lab.train.step import loss_of_rows

# A module or a parameter by its name, and which side of the module; a parameter has none.
HookPoint = tuple[str, Literal["input", "output"] | None]
Key = TypeVar("Key", str, HookPoint)


@dataclass(frozen=True)
class Origin:
    """Where a step stopped being finite."""

    # A weight was not finite before the step; a pass went wrong; or finite gradients are too large for their norm.
    kind: Literal["weight", "forward", "backward", "norm"]
    module: str  # in which it began, as the model names it; "" for the loss
    explanation: str  # what is wrong there, in words
    part: int | None  # of those that a batch is divided into, counted from 1, if it concerns a single one
    ranks: list[int]  # the processes that saw it


def layer_of(module: str) -> int | None:
    """The number, counted from 1, of the layer that a module or a parameter of this name belongs to, if any."""
    match = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", module)
    return int(match[1]) + 1 if match else None


def locate_nonfinite(
    model: nn.Module, parts: Sequence[dict[str, Tensor]], items: Tensor, context: DistributedContext
) -> Origin | None:
    """Repeat a step and find the first thing that is not finite: a weight, what a module gives, or a gradient.

    Gradients are lost; weights and everything else stay. Compiled layers run uncompiled, so that hooks are called.
    All processes call this, each with its parts of the batch, and all get the same answer: None where all is finite,
    so that the step went wrong only once.
    """
    name, ranks = _extreme({name: _not_finite(weight) for name, weight in model.named_parameters()}, last=False)
    if name is not None:
        explanation = f"{name} held numbers that are not finite before the step: what broke it came earlier"
        return Origin("weight", name.rpartition(".")[0], explanation, None, ranks)
    largest: dict[str, float] = {}
    for part, rows in enumerate(parts, start=1):
        model.zero_grad()
        with ExitStack() as undo:
            undo.callback(model.zero_grad)
            undo.callback(reshard, model)
            undo.enter_context(torch.compiler.set_stance("force_eager"))
            hooks = _FiniteHooks(model, undo)
            loss = loss_of_rows(model, rows, items, context)
            hooks.is_forward = False
            first, ranks = _extreme(hooks.values, last=False)
            if first is not None:
                return Origin("forward", *_forward_words(*first), part, ranks)
            loss.backward()
            # What nobody entered gets its place at the end: the loss itself uses these weights.
            hooks.gradients |= {(name, None): _not_finite(weight.grad) for name, weight in model.named_parameters()}
            last, ranks = _extreme(hooks.gradients, last=True)
            if last is not None:
                return Origin("backward", *_backward_words(*last), part, ranks)
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


class _FiniteHooks:
    """Hooks on all modules of a model that test their inputs and outputs, and the gradients of both."""

    def __init__(self, model: nn.Module, undo: ExitStack) -> None:
        # Whether something there is not finite, in the order of the forward pass. The backward pass goes from the last
        # to the first; a parameter stands where its module begins.
        self.values: dict[HookPoint, Tensor | None] = {}
        self.gradients: dict[HookPoint, Tensor | None] = {}
        self.is_forward = True  # what is recomputed for gradients is not tested again
        for name, module in model.named_modules():
            undo.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
            undo.callback(module.register_forward_hook(partial(self._leave, name)).remove)

    def _enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # A view for each use: its gradient is that of this use alone, not of all that the tensor is used for.
        views = tuple(x.view_as(x) if _is_number(x) else x for x in inputs)
        self._test((name, "input"), views)
        for parameter, _ in module.named_parameters(name, recurse=False):
            self.gradients.setdefault((parameter, None))
        return views

    def _leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not name:
            output = output.loss  # the model's other outputs are those of its modules
        self._test((name, "output"), output if isinstance(output, tuple) else (output,))

    def _test(self, point: HookPoint, tensors: Iterable[Any]) -> None:
        self.values.setdefault(point)
        self.gradients.setdefault(point)
        for tensor in filter(_is_number, tensors):
            if self.is_forward:
                self._flag(self.values, point, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._flag, self.gradients, point))

    @staticmethod
    @torch.no_grad()
    def _flag(flags: dict[HookPoint, Tensor | None], point: HookPoint, tensor: Tensor) -> None:
        flag, before = _not_finite(tensor), flags[point]
        flags[point] = flag if flag is None or before is None else flag | before


def _is_number(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _not_finite(tensor: Tensor | None) -> Tensor | None:
    """Whether this process' part of a tensor holds anything that is not finite."""
    return None if tensor is None else ~local(tensor.detach()).isfinite().all()


def _extreme(flags: Mapping[Key, Tensor | None], last: bool) -> tuple[Key | None, list[int]]:
    """The first or the last key whose flag is set on any process, and on which processes it is."""
    # One transfer from the device for all of them.
    known = {number: flag for number, flag in enumerate(flags.values()) if flag is not None}
    numbers = set(itertools.compress(known, torch.stack(list(known.values())).tolist())) if known else set()
    per_rank = gathered(numbers)
    if not any(per_rank):
        return None, []
    extreme = (max if last else min)(set.union(*per_rank))
    return list(flags)[extreme], [rank for rank, numbers in enumerate(per_rank) if extreme in numbers]


def _largest_gradients(model: nn.Module) -> dict[str, float]:
    """The largest number of each parameter's gradient."""
    parts = {name: local(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    # Of a small parameter that is split a process may have nothing.
    sizes = [part.abs().max().float() if part.numel() else part.new_zeros(()).float() for part in parts.values()]
    per_rank = gathered(torch.stack(sizes).tolist())
    return dict(zip(parts, map(max, zip(*per_rank, strict=True)), strict=True))


def _forward_words(name: str, side: str | None) -> tuple[str, str]:
    """The module where the forward pass went wrong, and what is wrong there."""
    if not name:
        return "", "the loss is not finite, although all that it is computed from is"
    if side == "output":
        return name, f"the output of {name} is not finite, although its input and its weights are"
    parent, _, child = name.rpartition(".")
    return parent, f"what {parent or 'the model'} hands to {child} is not finite, although what it is computed from is"


def _backward_words(name: str, side: str | None) -> tuple[str, str]:
    """The module where the backward pass went wrong, and what is wrong there."""
    parent, _, child = name.rpartition(".")
    gradient = {
        None: f"of {name}",
        "input": f"that {name} gives back",
        "output": f"that {parent or 'the loss'} gives back to {child}",
    }[side]
    wrong = f"the gradient {gradient} is not finite, although the gradients before it in the backward pass are"
    return name if side == "input" else parent, wrong
