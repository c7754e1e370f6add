"""Attention with quantised logits (Figure 8): how much worse a model gets.

The logits are rounded to whole multiples of a step, with a sign, so that the largest in size is the last of 2^(b−1) − 1
steps: "dynamic absmax". The paper does not say what shares a step. Here that is each row, the logits of one query in
one head and map, or each tensor, all logits of a layer for one sequence; in either case only those that are seen.

Each is an attention implementation that this module registers with transformers under the name that
:func:`quantised_implementation` gives, so anything that runs a model can run it so: ``model.set_attn_implementation``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.data import Batches, RetrievalBatches, RetrievalSample, TextBatches
from diff_transformer.data.packing import IGNORED
from diff_transformer.eval.logits import Call, LogitBlock, attending, register_logits
from diff_transformer.eval.measures import Measure, Subject
from diff_transformer.eval.reading import first_tokens
from diff_transformer.eval.retrieval import retrieval_answers
from diff_transformer.results import Better, Result

Granularity = Literal["tensor", "row"]
GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row")
BITS = (16, 8, 6, 4)
# The same attention with its logits as they are: what the others are compared with.
WHOLE_LOGITS, WHOLE = "whole_logits", "whole"
TOKENS = 100_000
_UNITS = {"loss": "nats/token", "accuracy": ""}


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
    model: Any, batches: Batches, arm: str, *, tokens: int = TOKENS, sequences: int = 512, seed: int = 0
) -> list[Result]:
    """Figure 8's measurements on text or on the retrieval task.

    Args:
        model: a causal language model of transformers that attends through its interface, in evaluation mode.
        batches: text or the retrieval task.
        arm: what to call the model in the records.
        tokens: how many tokens of text.
        sequences: how many sequences of the retrieval task.
        seed: of these sequences, and for the records.

    Returns:
        "quantised/accuracy": the share of right answers, or of text the share of tokens that the model holds most
        likely; "quantised/accuracy_drop", how much less than with the logits as they are. Of text also
        "quantised/loss" and "quantised/loss_increase", in nats per token. The groups are "8 bits per row" and so on,
        and "whole" for the logits as they are.

    Raises:
        ValueError: data that is neither, or a model whose logits cannot be seen.
    """
    measure: Callable[[], dict[str, tuple[float, int]]]
    if isinstance(batches, TextBatches):
        measure = partial(_on_text, model, batches, tokens)
    elif isinstance(batches, RetrievalBatches):
        measure = partial(_on_retrieval, model, batches.sample(sequences, seed))
    else:
        raise ValueError(f"There is no measurement for data of type {type(batches).__name__}.")
    implementations = {f"{b} bits per {g}": quantised_implementation(b, g) for g in GRANULARITIES for b in BITS}
    records: list[Result] = []
    whole: dict[str, tuple[float, int]] = {}
    for group, implementation in {WHOLE: WHOLE_LOGITS, **implementations}.items():
        with attending(model, implementation):
            found = measure()
        whole = whole or found
        for name, (value, n) in found.items():
            shared: dict[str, Any] = {"arm": arm, "group": group, "n": n, "seed": seed, "unit": _UNITS[name]}
            better: Better = "lower" if name == "loss" else "higher"
            records.append(Result(name=f"quantised/{name}", value=value, better=better, **shared))
            if group != WHOLE:
                change = value - whole[name][0]
                cost, word = (change, "increase") if better == "lower" else (-change, "drop")
                records.append(Result(name=f"quantised/{name}_{word}", value=cost, better="lower", **shared))
    return records


@torch.no_grad()
def _on_text(model: Any, batches: TextBatches, tokens: int) -> dict[str, tuple[float, int]]:
    device = next(model.parameters()).device
    nats, right, targets = 0.0, 0, 0
    for batch in first_tokens(batches, tokens):
        inputs = {name: value.to(device) for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = batch["labels"][:, 1:].flatten().to(device)
        nats += float(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
        right += int((logits.argmax(-1) == labels).sum())
        targets += int((labels != IGNORED).sum())
    return {"loss": (nats / targets, targets), "accuracy": (right / targets, targets)}


def _on_retrieval(model: Any, sample: RetrievalSample) -> dict[str, tuple[float, int]]:
    right = retrieval_answers(model, sample)
    return {"accuracy": (right.float().mean().item(), right.numel())}


def _measure(subject: Subject) -> list[Result]:
    assert subject.batches is not None  # needs="recipe"
    return quantised_records(subject.model, subject.batches, subject.arm, seed=subject.seed, **subject.options)


QUANTISED = Measure(
    shows="what attention logits of 16, 8, 6 and 4 bits cost (Figure 8)",
    measure=_measure,
    needs="recipe",
    any_model=True,
    options={"tokens": TOKENS, "sequences": 512},
)
