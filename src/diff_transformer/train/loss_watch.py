"""Noticing at the step where it does that training goes wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

# Losses that a new one is compared with: so many at most, and not before there are so many.
_KEPT, _NEEDED = 100, 20
# A batch of few tokens has a loss that jumps by nature. A rise counts from so many times the usual jump (the median one
# from a step to the next); where batches are not tiny, max_loss_rise is more than that.
_JUMPS = 25
# Bad steps in a row that are left out; and of fp16's overflowing gradients, which halve the scale each time.
_LEFT_OUT, _OVERFLOWS = 10, 30


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
