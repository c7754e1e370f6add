"""Attention with quantised logits (Figure 8): how much worse a model gets.

The logits are rounded to whole multiples of a step, with a sign, so that the largest in size is the last of 2^(b−1) − 1
steps: "dynamic absmax". The paper does not say what shares a step. Here that is each row, the logits of one query in
one head and map, or each tensor, all logits of a layer for one sequence; in either case only those that are seen.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from diff_transformer.data import Batches, RetrievalBatches, TextBatches
from diff_transformer.eval.logits import Call, LogitBlock, attending, register_logits
from diff_transformer.eval.loss import language_loss
from diff_transformer.eval.retrieval import retrieval_answers
from diff_transformer.results import Result

Granularity = Literal["tensor", "row"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row")
BITS = (16, 8, 6, 4)
# The same attention with its logits as they are: what the others are compared with.
WHOLE_LOGITS = "whole_logits"


def quantised_implementation(bits: int, granularity: Granularity) -> str:
    """The name of an attention implementation, for ``set_attn_implementation``.

    Raises:
        ValueError: not 16, 8, 6 or 4 bits, or neither "tensor" nor "row".
    """
    if bits not in BITS or granularity not in GRANULARITIES:
        raise ValueError(
            f"logits are quantised to {', '.join(map(str, BITS))} bits per {' or per '.join(GRANULARITIES)}, "
            f"got {bits} bits per {granularity}."
        )
    return f"quantised_logits_{bits}_per_{granularity}"


def quantise(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """x rounded to the nearest of 2^bits − 1 values, from −largest to largest in equal steps."""
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
for _bits in BITS:
    for _granularity in GRANULARITIES:
        register_logits(
            quantised_implementation(_bits, _granularity), partial(_quantised, bits=_bits, granularity=_granularity)
        )


def quantised_records(
    model: Any, batches: Batches, arm: str, *, sequences: int = 512, seed: int = 0, bits: tuple[int, ...] = BITS
) -> list[Result]:
    """Figure 8's measurements on text (loss) or on the retrieval task (accuracy).

    Args:
        model: a causal language model of transformers that attends through its interface, in evaluation mode.
        batches: text or the retrieval task.
        arm: what to call the model in the records.
        sequences: how many sequences of the retrieval task.
        seed: of these sequences.
        bits: to how many.

    Returns:
        For each group "8 bits per row" and so on: "quantised/loss", and "quantised/loss_increase" over the same model
        with its logits as they are, in nats per token; or "quantised/accuracy" and "quantised/accuracy_drop", shares.
        The group "whole" has the loss or the accuracy with the logits as they are.

    Raises:
        ValueError: data that is neither, or a model whose logits cannot be seen.
    """
    if not isinstance(batches, TextBatches | RetrievalBatches):
        raise ValueError(f"There is no measurement for data of type {type(batches).__name__}.")
    is_text = isinstance(batches, TextBatches)
    sample = None if isinstance(batches, TextBatches) else batches.sample(sequences, seed)

    def measured(implementation: str) -> tuple[float, int]:
        with attending(model, implementation):
            if isinstance(batches, TextBatches):
                loss = language_loss(model, batches)
                return loss.per_token, loss.targets
            assert sample is not None
            right = retrieval_answers(model, sample)
            return right.float().mean().item(), right.numel()

    name, change = ("loss", "loss_increase") if is_text else ("accuracy", "accuracy_drop")
    unit = "nats/token" if is_text else ""
    shared: dict[str, Any] = {"arm": arm, "unit": unit, "seed": None if is_text else seed}
    whole, n = measured(WHOLE_LOGITS)
    better: Literal["higher", "lower"] = "lower" if is_text else "higher"
    records = [Result(name=f"quantised/{name}", value=whole, n=n, group="whole", better=better, **shared)]
    for granularity in GRANULARITIES:
        for width in bits:
            group = f"{width} bits per {granularity}"
            value, _ = measured(quantised_implementation(width, granularity))
            loss = value - whole if is_text else whole - value
            records.append(Result(name=f"quantised/{name}", value=value, n=n, group=group, better=better, **shared))
            records.append(Result(name=f"quantised/{change}", value=loss, n=n, group=group, better="lower", **shared))
    return records
