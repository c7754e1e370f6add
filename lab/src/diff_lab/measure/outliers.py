"""Measures activation outliers: the largest attention logits and hidden states, and their medians (Table 5)."""

from contextlib import ExitStack
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from diff_lab.coordinates import Coordinates
from diff_lab.measure.attention_logits import attending, register_logits
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.standard import first_tokens
from diff_lab.record import Result

RECORDED_LOGITS = "recorded_logits"
# Table 5's columns, and its number of tokens.
TOPS = (1, 2, 3, 10, 100)
TOKENS = 400_000
MEDIAN = "median"
# A float32's sign, exponent and the first 11 bits of its fraction.
_DROPPED_BITS = 12
_BINS = 1 << (32 - 1 - _DROPPED_BITS)
_NOT_FINITE = 0x7F800000 >> _DROPPED_BITS
MEDIAN_ERROR = 2.0**-12
METHOD = f"exact largest values; median to {MEDIAN_ERROR:.2%} of itself"


class Magnitudes:
    """The largest of many |x|, exactly, and their median, in a memory that does not grow with their number.

    The values are rounded to float32. Their bits, read as a whole number, are in the order of the values; the first 20
    of them count into a histogram, whose bins are 2⁻¹¹ of their values wide. The median is the middle of the bin that
    holds it: off by at most 2⁻¹² of itself. (Below 1.2e-38, the smallest normal float32, by at most 3e-42.)
    """

    def __init__(self, device: torch.device) -> None:
        self._largest = torch.empty(0, device=device)
        self._counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=device)

    def add(self, x: Tensor, seen: Tensor | None = None) -> None:
        """Take in the values of any shape; with ``seen``, broadcastable to it, only those of which that is True."""
        sizes = x.detach().abs().to(torch.float32)
        bins = sizes.view(torch.int32) >> _DROPPED_BITS
        if seen is not None:
            sizes, bins = sizes.masked_fill(~seen, -1.0), bins.masked_fill(~seen, _BINS)
        self._counts += torch.bincount(bins.flatten(), minlength=_BINS + 1)
        least = self._largest[-1] if len(self._largest) == max(TOPS) else -1.0
        candidates = torch.cat((self._largest, sizes[sizes > least]))
        self._largest = candidates.topk(min(max(TOPS), len(candidates))).values

    @property
    def count(self) -> int:
        """How many values there were."""
        return int(self._counts[:_BINS].sum())

    def ranks(self) -> dict[int | str, float]:
        """Return the values of the ranks `TOPS`, as far as there are so many, and at "median" the median, or the lower
        of the two in the middle. Raises ValueError for a value that is not finite."""
        if broken := int(self._counts[_NOT_FINITE:_BINS].sum()):
            raise ValueError(f"{broken} of {self.count} values are not finite.")
        below = self._counts[:_BINS].cumsum(0)
        index = torch.searchsorted(below, (below[-1] + 1) // 2).to(torch.int32)
        ends = torch.stack((index, index + 1)) << _DROPPED_BITS
        largest: dict[int | str, float] = {
            rank: self._largest[rank - 1].item() for rank in TOPS if rank <= len(self._largest)
        }
        return largest | {MEDIAN: ends.view(torch.float32).mean().item()}


class Outliers(Measurement):
    """The largest attention logits and hidden states, at their ranks, and their medians, at "median" (Table 5).

    "attention_logits" are q·k/√d as the softmax gets them, of the keys that a query sees, of all heads (of both maps,
    if there are two) and layers; "hidden_states" the residual stream after each layer, before the final norm.
    """

    tokens: Count = Field(default=TOKENS, description="tokens that are read, at most")

    @torch.no_grad()
    def run(self, measured: EvalInput) -> list[Result]:
        """Take the numbers. Raises ValueError for a model that does not attend through transformers' interface."""
        model = measured.model
        device = next(model.parameters()).device
        logits, hidden_states = Magnitudes(device), Magnitudes(device)
        last_query: Tensor | None = None
        left = 0

        def record(query: Tensor, of_sequence: Tensor, seen: Tensor) -> Tensor:
            nonlocal last_query, left
            # DiffLlama attends twice by the very same queries, to one half of its values and to the other.
            if query is not last_query:
                last_query, left = query, len(query)
            if left:
                logits.add(of_sequence, seen)
                left -= 1
            return of_sequence

        def note(_: nn.Module, __: Any, output: Any) -> None:
            hidden_states.add(output[0] if isinstance(output, tuple) else output)

        register_logits(RECORDED_LOGITS, record)
        with attending(model, RECORDED_LOGITS), ExitStack() as undo:
            for layer in model.get_decoder().layers:
                undo.callback(layer.register_forward_hook(note).remove)
            for batch in first_tokens(measured.data, self.tokens):
                inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
                model(**inputs, use_cache=False, logits_to_keep=1)
        records = []
        for name, sizes in (("attention_logits", logits), ("hidden_states", hidden_states)):
            for rank, value in sizes.ranks().items():
                better = None if rank == MEDIAN else "lower"
                fields = {"n": sizes.count, "better": better, "coordinates": Coordinates(rank=rank), "method": METHOD}
                records.append(measured.record(f"outliers/{name}", value, **fields))
        return records
