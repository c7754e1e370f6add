"""Measures attention logits before the softmax: the cost of quantisation (Figure 8), and outliers (Table 5).

For the cost they are rounded to whole multiples of a step, so that the largest in size is the last of 2^(b−1) − 1
steps: "dynamic absmax". The paper does not say which logits share a step. Here that is each row, the seen logits of one
query in one head and map, all of one head and map, or each tensor, those of a layer for one sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from diff_lab.coordinates import Coordinates
from diff_lab.data import RecallBatches, RetrievalBatches, TextBatches
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.retrieval import retrieval_answers
from diff_lab.measure.standard import first_tokens, label_scores
from diff_lab.record import Result
from diff_transformer.model.interface_attention import attention_implementation

# Arguments by which some models change their logits, or what these are divided by, inside the attention call.
_NOT_ORDINARY = ("softcap", "s_aux")
LOGITS = "changed_logits"
AttentionMaskInterface.register(LOGITS, sdpa_mask)


@contextmanager
def changed_logits(model: Any, change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Pass the model's attention logits through a function before the softmax, inside this context.

    The function gets the queries of the call (B, H, N, d), and of each sequence in turn the logits (H, N, S), in
    float32 at least, with the keys that each query sees, (N, S) boolean; of hidden keys there are logits too. Raises
    ValueError for a model that does not attend through transformers' interface, which would not notice.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} computes attention by itself in this version of transformers, so its logits "
            "cannot be seen; convert it to this project's layout, or take a newer transformers."
        )

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend by transformers' signature: q (B, H, N, d), k and v (B, H_kv, S, …) → (B, N, H, dv), no weights."""
        for argument in _NOT_ORDINARY:
            if kwargs.get(argument) is not None:
                raise ValueError(f"{LOGITS!r} is ordinary attention, and {type(module).__name__} asks for {argument}.")
        (batch, _, n, width), s = query.shape, key.shape[2]
        scale = width**-0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
        if attention_mask is None:
            # A single query sees all keys, of several each its own key and those before; the first is the first's.
            attention_mask = query.new_ones(1, 1, n, s, dtype=torch.bool).tril(0 if n > 1 else s)
        masks = attention_mask[:, 0].expand(batch, -1, -1)
        outs = []
        for q, k, v, seen in zip(query, key, value, masks, strict=True):
            dtype = torch.promote_types(q.dtype, torch.float32)
            with torch.autocast(q.device.type, enabled=False):
                # The queries of a group meet the same keys: one product, (H_kv, G·N, S).
                grouped = q.unflatten(0, (len(k), -1)).flatten(1, 2).to(dtype) * scale
                logits = (grouped @ k.to(dtype).mT).reshape(len(q), n, s)
            logits = change(query, logits, seen)
            # Not −∞: a query at padding sees nothing, and no key may weigh "not a number" there.
            weights = logits.masked_fill(~seen, torch.finfo(dtype).min).softmax(-1).to(v.dtype)
            outs.append((weights.reshape(len(v), -1, s) @ v).reshape(len(q), n, -1))
        return torch.stack(outs).transpose(1, 2), None

    AttentionInterface.register(LOGITS, forward)
    with attention_implementation(model, LOGITS):
        yield


# The axes of (H, N, S) whose logits share a scale.
GRANULARITIES = {"tensor": (-3, -2, -1), "map": (-2, -1), "row": (-1,)}
BITS = (16, 8, 6, 4)
WHOLE = Coordinates(bits="whole")
_UNITS = {"loss": "nats/token", "accuracy": ""}
Scores = dict[str, tuple[float, int]]  # "accuracy", and of text also "loss", each with its n


def scores_of(measured: EvalInput, tokens: int, sequences: int) -> Scores:
    """Score a model on so many tokens of text, or on so many sequences of the retrieval or the recall task."""
    data = measured.batches
    if isinstance(data, RetrievalBatches | RecallBatches):
        answers = retrieval_answers(measured.model, data.sample(sequences, measured.seed))
        return {"accuracy": (answers.float().mean().item(), answers.numel())}
    if not isinstance(data, TextBatches):
        raise ValueError("This is measured on text, retrieval or recall, and the run has none: name text with --text.")
    scores = label_scores(measured.model, first_tokens(data, tokens))
    return {"loss": (scores.loss, scores.targets), "accuracy": (scores.accuracy, scores.targets)}


def cost_records(measured: EvalInput, name: str, found: Mapping[Coordinates, Scores]) -> list[Result]:
    """Make the records of scores by coordinates, and of the cost of each beside those at `WHOLE`."""
    records: list[Result] = []
    for coordinates, scores in found.items():
        for score, (value, n) in scores.items():
            fields = {"coordinates": coordinates, "n": n, "unit": _UNITS[score]}
            better = "lower" if score == "loss" else "higher"
            records.append(measured.record(f"{name}/{score}", value, better=better, **fields))
            if coordinates != WHOLE:
                change = value - found[WHOLE][score][0]
                cost, word = (change, "increase") if better == "lower" else (-change, "drop")
                records.append(measured.record(f"{name}/{score}_{word}", cost, better="lower", **fields))
    return records


def whole(_: Tensor, logits: Tensor, seen: Tensor) -> Tensor:
    """Leave the logits as they are."""
    return logits


def quantised(_: Tensor, logits: Tensor, seen: Tensor, *, bits: int, granularity: str) -> Tensor:
    """Round the logits to the nearest of 2^bits − 1 values, from the negative of the largest to it in equal steps."""
    sizes = logits.abs().masked_fill(~seen, 0.0)
    largest = sizes.amax(GRANULARITIES[granularity], keepdim=True)
    # All zero: nothing to divide by, and nothing to round.
    step = torch.where(largest > 0, largest / (2 ** (bits - 1) - 1), 1.0)
    return torch.round(logits / step) * step


class Quantised(Measurement):
    """The cost of attention logits of 16, 8, 6 and 4 bits on text, the retrieval or the recall task (Figure 8).

    "quantised/accuracy" is the share of right answers, or of text the share of tokens that the model holds most likely;
    "quantised/accuracy_drop" how much less than with whole logits. Of text also "quantised/loss" and "…/loss_increase".
    """

    tokens: Count = Field(default=100_000, description="tokens of text that are read, at most")
    sequences: Count = Field(default=512, description="sequences of the retrieval or the recall task")

    def run(self, measured: EvalInput) -> list[Result]:
        def scores(change: Any) -> Scores:
            with changed_logits(measured.model, change):
                return scores_of(measured, self.tokens, self.sequences)

        places: list[Any] = [{"bits": bits, "granularity": by} for by, bits in product(GRANULARITIES, BITS)]
        found = {WHOLE: scores(whole)} | {Coordinates(at): scores(partial(quantised, **at)) for at in places}
        return cost_records(measured, "quantised", found)


TOPS = (1, 2, 3, 10, 100)  # Table 5's columns
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
    of them count into a histogram, whose bins are 2⁻¹¹ of their values wide: the median is off by 2⁻¹² of itself.
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
        """Return the values at the ranks `TOPS` and the lower median. Raises ValueError for one that is not finite."""
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

    tokens: Count = Field(default=400_000, description="tokens that are read, at most")

    @torch.no_grad()
    def run(self, measured: EvalInput) -> list[Result]:
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

        with changed_logits(model, record), ExitStack() as undo:
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
