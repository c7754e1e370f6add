"""How far a run is."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.files import read_json


@dataclass
class RunState:
    """How far a run is: what a checkpoint holds beside weights, optimizers and random numbers.

    Attributes:
        data: a fingerprint of the data, so that a run is not resumed on other data.
        step: optimizer steps that are done.
        seconds: time spent in them.
        scaler: the state of the loss scaler of fp16 (numbers by name); None in other precisions.
        watch: what the watch over the loss remembers, as JSON; None before it has seen a step.
    """

    data: str
    step: int = 0
    seconds: float = 0.0
    scaler: dict[str, Any] | None = None
    watch: dict[str, Any] | None = None


def read_state(file: Path) -> RunState:
    """The state that a checkpoint holds.

    Raises:
        ValueError: the file does not hold one; the message names what is wrong.
    """
    try:
        state = RunState(**read_json(file))
    except (ValueError, TypeError) as error:  # not JSON, or not the fields of a state
        raise ValueError(f"{str(file)!r} is not the state of a run: {error}.") from None
    allowed = {
        "data": isinstance(state.data, str),
        "step": type(state.step) is int and state.step >= 0,
        "seconds": _is_number(state.seconds),
        "scaler": state.scaler is None or isinstance(state.scaler, dict),
        "watch": state.watch is None or isinstance(state.watch, dict),
    }
    for name, is_allowed in allowed.items():
        if not is_allowed:
            raise ValueError(f"{str(file)!r} is not the state of a run: {name} is {getattr(state, name)!r}.")
    return state


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
