"""Equations 7 and 9 on a model's own layers, as a measure that runs on a checkpoint alone (Appendix G)."""

from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import Batches
from diff_transformer.eval.gradient_flow import closed_form_error
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.results import Result

ERROR = "closed_form/error"


def closed_form_record(model: Any, batches: Batches, arm: str, seed: int) -> Result:
    """The largest error of the closed forms in any layer, on the first validation sequence.

    Args:
        model: a DIFF Transformer or its twin.
        batches: the data.
        arm, seed: for the record.

    Raises:
        ValueError: as `closed_form_error`.
    """
    tokens = next(iter(batches.validation_batches()))["input_ids"][:1].to(model.device)
    errors = [closed_form_error(layer.self_attn, x) for layer, x in _inputs(model, tokens)]
    return Result(name=ERROR, arm=arm, value=max(errors), seed=seed, better="lower")


@torch.no_grad()
def _inputs(model: Any, tokens: Tensor) -> list[tuple[Any, Tensor]]:
    """Each layer with what its attention gets, (N, D)."""
    found: list[tuple[Any, Tensor]] = []
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda _, __, x, layer=layer: found.append((layer, x[0])))
        for layer in model.model.layers
    ]
    try:
        model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _measure(subject: Subject) -> list[Result]:
    assert subject.batches is not None  # needs="recipe"
    return [closed_form_record(subject.model, subject.batches, subject.arm, subject.seed)]


CLOSED_FORMS = Measure(
    shows="the largest error of Equation 7 or 9 against autograd in float64, of any layer (Appendix G)",
    measure=_measure,
    needs="recipe",
)
