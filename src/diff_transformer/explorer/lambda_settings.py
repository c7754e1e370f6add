"""Changes λ in a model for all heads, for a layer or for a head, and puts the learned λ back afterwards."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diff_transformer.utils.suggestions import quoted

LARGEST_LAMBDA = 10.0  # of either sign; learned ones lie near 0 … 1


@dataclass(frozen=True)
class LambdaSettings:
    """What λ is where it is not the learned one. A head's value comes before its layer's; others follow the factor.

    Attributes:
        factor: what the learned λ of all heads are multiplied by.
        layers: by the layer's number, counted from 1.
        heads: by the layer's number and the head's, both counted from 1.
    """

    factor: float = 1.0
    layers: Mapping[int, float] = field(default_factory=dict)
    heads: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: object) -> "LambdaSettings":
        """From JSON: {"factor": 0.5, "layers": {"2": 0.3}, "heads": {"2.1": 0}}, each part of it optional.

        Raises:
            ValueError: another key, or a value that is not a number of at most ``LARGEST_LAMBDA`` in size.
        """
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping) or not set(raw) <= {"factor", "layers", "heads"}:
            raise ValueError('lambdas must be an object with "factor", "layers" and "heads", or some of them.')
        layers, heads = ({} if raw.get(name) is None else raw[name] for name in ("layers", "heads"))
        if not isinstance(layers, Mapping) or not isinstance(heads, Mapping):
            raise ValueError('lambdas must have objects as "layers" and "heads".')
        factor = raw.get("factor")
        return cls(
            factor=1.0 if factor is None else _checked(factor, "The factor of λ"),
            layers={_number(layer): _checked(value, f"λ of layer {layer}") for layer, value in layers.items()},
            heads={_pair(place): _checked(value, f"λ of head {place}") for place, value in heads.items()},
        )

    def check(self, layers: int, heads: int) -> None:
        """Refuse layers and heads that a model with so many does not have."""
        for layer, head in [*((layer, 1) for layer in self.layers), *self.heads]:
            if not (1 <= layer <= layers and 1 <= head <= heads):
                raise ValueError(
                    f"λ is set for head {head} of layer {layer}, but the model has layers 1 … {layers} with heads "
                    f"1 … {heads}."
                )

    def of_layer(self, layer: int, heads: int) -> list[float | None]:
        """λ of each head of a layer, counted from 1; None where it is the learned one times the factor."""
        of_layer = self.layers.get(layer)
        return [self.heads.get((layer, head), of_layer) for head in range(1, heads + 1)]

    @property
    def key(self) -> tuple[object, ...]:
        """What tells settings apart, for a cache."""
        return self.factor, tuple(sorted(self.layers.items())), tuple(sorted(self.heads.items()))

    def __bool__(self) -> bool:
        return self.factor != 1 or bool(self.layers) or bool(self.heads)


LEARNED = LambdaSettings()


def mixed_lambda(hidden_states: Tensor, learned: Any, values: Sequence[float | None], factor: float) -> Tensor:
    """λ of a layer, (B, H, N): the given value of each head, and the learned one times a factor where it is None.

    Args:
        hidden_states: (B, N, D), what the layer's attention receives.
        learned: the layer's own function of them.
        values: H of them.
        factor: of the learned λ.
    """
    own = learned(hidden_states)
    given = own.new_tensor([math.nan if value is None else value for value in values]).view(1, -1, 1)
    own = (factor * own).expand(hidden_states.shape[0], len(values), hidden_states.shape[1])
    return torch.where(given.isnan(), own, given)


@contextmanager
def replaced_lambdas(model: Any, settings: LambdaSettings, heads: int) -> Iterator[None]:
    """Inside, a DIFF or DIFF V2 model computes with the λ of the settings; all of its attention implementations do.

    The model is changed while this lasts, so no other thread may use it.
    """
    replaced = []
    try:
        for number, layer in enumerate(model.model.layers, start=1):
            values = settings.of_layer(number, heads)
            if settings.factor != 1 or any(value is not None for value in values):
                attention = layer.self_attn
                # An attribute of the module comes before the method of its class.
                attention.lambdas = partial(
                    mixed_lambda, learned=attention.lambdas, values=values, factor=settings.factor
                )
                replaced.append(attention)
        yield
    finally:
        for attention in replaced:
            del attention.lambdas


def _checked(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_LAMBDA:
        raise ValueError(f"{name} must be a number of at most {LARGEST_LAMBDA:g} in size, got {quoted(value, 40)}.")
    return float(value)


def _number(text: object) -> int:
    if not str(text).isascii() or not str(text).isdigit() or len(str(text)) > 6:
        raise ValueError(f"A layer is named by its number, counted from 1, got {quoted(text, 40)}.")
    return int(str(text))


def _pair(text: object) -> tuple[int, int]:
    layer, point, head = str(text).partition(".")
    if not point:
        raise ValueError(f'A head is named by its layer and its number, such as "2.1", got {quoted(text, 40)}.')
    return _number(layer), _number(head)
