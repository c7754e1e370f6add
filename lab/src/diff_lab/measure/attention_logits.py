"""Hands attention logits to measurements before the softmax, and measures the cost of quantisation (Figure 8).

The logits are rounded to whole multiples of a step, with a sign, so that the largest in size is the last of 2^(b−1) − 1
steps: "dynamic absmax". The paper does not say which logits share a step. Here that is each row, the logits of one
query in one head and map, or each tensor, all logits of a layer for one sequence; in either case only those that are
seen.

Each is an attention implementation that this module registers with transformers under the name that
:func:`quantised_implementation` gives, so anything that runs a model can run it so: ``model.set_attn_implementation``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from diff_lab.coordinates import Coordinates
from diff_lab.data import RetrievalBatches, TextBatches
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.measure.retrieval import retrieval_answers
from diff_lab.measure.standard import first_tokens, label_scores
from diff_lab.record import Result
from diff_transformer.model.interface_attention import attention_implementation

# Logits to hold at a time: few for a processor's caches, many for a GPU, which is slow to start.
_LOGITS = {"cpu": 1 << 22}
_LOGITS_ELSEWHERE = 1 << 26
# Arguments by which some models change their logits, or what these are divided by, inside the attention call.
_NOT_ORDINARY = ("softcap", "s_aux")


class LogitBlock(NamedTuple):
    """The logits of some queries (B, H, rows, keys): q·k times the scale, in float32 at least, of hidden keys too.

    `seen`, which can be broadcast to that, says which keys the queries see.
    """

    logits: Tensor
    seen: Tensor


class Call(NamedTuple):
    """One call of an implementation: the queries (B, H, N, d), and the logits, computed anew each time."""

    query: Tensor
    blocks: Callable[[], Iterator[LogitBlock]]


def register_logits(name: str, logits_of: Callable[[Call], Iterator[LogitBlock]]) -> None:
    """Make an attention known to transformers by a name: `logits_of` gives the blocks that the softmax is taken of."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Attend by transformers' signature: q (B, H, N, d), k and v (B, H_kv, S, …) → (B, N, H, dv), no weights."""
        for argument in _NOT_ORDINARY:
            if kwargs.get(argument) is not None:
                raise ValueError(f"{name!r} is ordinary attention, and {type(module).__name__} asks for {argument}.")
        if attention_mask is not None and getattr(attention_mask, "dtype", None) != torch.bool:
            kind = getattr(attention_mask, "dtype", type(attention_mask).__name__)
            raise ValueError(f"{name!r} takes a boolean mask (True = may attend) or none, got {kind}.")
        scaling = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        call = Call(query, partial(logit_blocks, query, key, attention_mask, scale))
        return _weigh(logits_of(call), value).transpose(1, 2), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Make the model attend by the implementation of this name, and afterwards as before. Raises ValueError for a model
    that does not attend through transformers' interface, which would not notice."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} computes attention by itself in this version of transformers, so its logits "
            "cannot be seen; convert it to this project's layout, or take a newer transformers."
        )
    with attention_implementation(model, name):
        yield


def logit_blocks(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Iterator[LogitBlock]:
    """Yield the logits of queries (B, H, N, d) and keys (B, H_kv, S, d), part by part, up to the last key that is seen.

    The mask is boolean (B or 1, 1, N, S), True = may attend. Without one a single query sees all keys, of several each
    its own key and those before; the first key is the first query's.
    """
    n, s = query.shape[2], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = max(1, _LOGITS.get(query.device.type, _LOGITS_ELSEWHERE) // (query.shape[0] * query.shape[1] * s))
    position = torch.arange(s, device=query.device)
    # The last key that each query sees.
    last = torch.arange(n, device=query.device) if n > 1 else position[-1:]
    if mask is not None:
        last = (mask.any(0).any(0) * (position + 1)).amax(-1) - 1
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        width = max(1, int(last[start:stop].max()) + 1)
        with torch.autocast(query.device.type, enabled=False):
            # The queries of a group meet the same keys: one product, (B, H_kv, G·rows, keys).
            some = query[:, :, start:stop].unflatten(1, (key.shape[1], -1)).flatten(2, 3).to(dtype) * scale
            logits = (some @ key[:, :, :width].to(dtype).mT).unflatten(2, (-1, stop - start)).flatten(1, 2)
        seen = position[:width] <= last[start:stop, None] if mask is None else mask[:, :, start:stop, :width]
        yield LogitBlock(logits, seen)


def _weigh(blocks: Iterator[LogitBlock], value: Tensor) -> Tensor:
    """Compute softmax(logits) V, (B, H, N, dv), in the values' dtype; the softmax in float32 at least."""
    outs = []
    for logits, seen in blocks:
        # Not −∞: a query at padding sees nothing, and no key may weigh "not a number" there.
        hidden = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
        weights = torch.softmax(hidden, dim=-1).to(value.dtype)
        width, groups = weights.shape[-1], value.shape[1]
        out = weights.unflatten(1, (groups, -1)).flatten(2, 3) @ value[:, :, :width]
        outs.append(out.unflatten(2, (-1, weights.shape[2])).flatten(1, 2))
    return torch.cat(outs, dim=2)


Granularity = Literal["tensor", "row"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row")
BITS = (16, 8, 6, 4)
# The same attention with its logits as they are: what the others are compared with.
WHOLE_LOGITS, WHOLE = "whole_logits", Coordinates(bits="whole")
TOKENS = 100_000
_UNITS = {"loss": "nats/token", "accuracy": ""}


def quantised_implementation(bits: int, granularity: Granularity) -> str:
    """Return the name of an attention implementation, for ``set_attn_implementation``. Raises ValueError for other bits
    than 16, 8, 6 or 4, and for a granularity other than "tensor" or "row"."""
    if bits not in BITS or granularity not in GRANULARITIES:
        raise ValueError(
            f"logits are quantised to {', '.join(map(str, BITS))} bits per {' or per '.join(GRANULARITIES)}, "
            f"got {bits} bits per {granularity}."
        )
    return f"quantised_logits_{bits}_per_{granularity}"


def quantise(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Round x to the nearest of 2^bits − 1 values, from −largest to largest in equal steps."""
    steps = 2 ** (bits - 1) - 1
    # All zero: nothing to divide by, and nothing to round.
    step = torch.where(largest > 0, largest / steps, 1.0)
    return torch.round(x / step) * step


def _largest_of_rows(block: LogitBlock) -> Tensor:
    return block.logits.abs().masked_fill(~block.seen, 0.0).amax(-1, keepdim=True)


def _quantised(call: Call, bits: int, granularity: Granularity) -> Iterator[LogitBlock]:
    largest = None
    if granularity == "tensor":
        rows = [_largest_of_rows(block).amax((1, 2), keepdim=True) for block in call.blocks()]
        largest = torch.cat(rows, dim=2).amax(2, keepdim=True)  # (B, 1, 1, 1)
    for block in call.blocks():
        of_block = _largest_of_rows(block) if largest is None else largest
        yield block._replace(logits=quantise(block.logits, of_block, bits))


register_logits(WHOLE_LOGITS, lambda call: call.blocks())
for _bits, _granularity in product(BITS, GRANULARITIES):
    _logits_of = partial(_quantised, bits=_bits, granularity=_granularity)
    register_logits(quantised_implementation(_bits, _granularity), _logits_of)


class Quantised(Measurement):
    """The cost of attention logits of 16, 8, 6 and 4 bits on text or on the retrieval task (Figure 8).

    "quantised/accuracy" is the share of right answers, or of text the share of tokens that the model holds most likely;
    "quantised/accuracy_drop" how much less than with the logits as they are. Of text also "quantised/loss" and
    "quantised/loss_increase", in nats per token. They stand at numbers of bits and a granularity, or at the word
    "whole" for the logits as they are.
    """

    tokens: Count = Field(default=TOKENS, description="tokens of text that are read, at most")
    sequences: Count = Field(default=512, description="sequences of the retrieval task")

    def run(self, measured: EvalInput) -> list[Result]:
        data = measured.batches
        if not isinstance(data, TextBatches | RetrievalBatches):
            raise ValueError(f"There is no measurement for data of type {type(data).__name__}.")

        def values(name: str) -> dict[str, tuple[float, int]]:
            """Return each number with its n, for the model with the attention implementation of this name."""
            with attending(measured.model, name):
                if isinstance(data, RetrievalBatches):
                    answers = retrieval_answers(measured.model, data.sample(self.sequences, measured.seed))
                    return {"accuracy": (answers.float().mean().item(), answers.numel())}
                scores = label_scores(measured.model, first_tokens(data, self.tokens))
                return {"loss": (scores.loss, scores.targets), "accuracy": (scores.accuracy, scores.targets)}

        implementations = {
            Coordinates(bits=bits, granularity=granularity): quantised_implementation(bits, granularity)
            for granularity, bits in product(GRANULARITIES, BITS)
        }
        records: list[Result] = []
        unquantised = values(WHOLE_LOGITS)
        for coordinates, implementation in {WHOLE: WHOLE_LOGITS, **implementations}.items():
            for name, (value, n) in (unquantised if coordinates == WHOLE else values(implementation)).items():
                fields = {"coordinates": coordinates, "n": n, "unit": _UNITS[name]}
                better = "lower" if name == "loss" else "higher"
                records.append(measured.record(f"quantised/{name}", value, better=better, **fields))
                if coordinates != WHOLE:
                    change = value - unquantised[name][0]
                    cost, word = (change, "increase") if better == "lower" else (-change, "drop")
                    records.append(measured.record(f"quantised/{name}_{word}", cost, better="lower", **fields))
        return records
