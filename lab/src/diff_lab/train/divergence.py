"""Detects a training step whose loss or gradient goes wrong."""

import itertools
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

# A loss is compared with at most so many losses before it, and only once there are so many.
_MOST_LOSSES, _FEWEST_LOSSES = 100, 20
# The loss of a batch of few tokens jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
# How many bad steps in a row are skipped, and how many of fp16's overflows, each of which halves the scale.
_SKIPPED, _OVERFLOWS = 10, 30


class DivergenceError(ValueError):
    """A step went wrong; the message has its number, loss and gradient norm. The weights are those before that step."""


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
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        if self.overflows > (_OVERFLOWS if self.overflow_is_normal else 0):
            often = f" for {self.overflows} steps in a row" if self.overflow_is_normal else ""
            return f"the gradient norm became {norm}{often}"
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
        """Return the state that a resumed run needs to decide the same, as JSON: at most 100 losses and two counts."""
        return {"losses": self.losses, "bad_steps": self.bad_steps, "overflows": self.overflows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of `state_dict`, of this version or of those that called bad steps "faults"."""
        self.losses, self.overflows = list(state["losses"]), state["overflows"]
        self.bad_steps = state["bad_steps"] if "bad_steps" in state else state["faults"]
