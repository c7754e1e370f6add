"""The loss of each token of whole documents, by any causal language model of transformers."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from diff_transformer.data import Batches, NeedleBatches, TextBatches
from diff_transformer.eval.options import check_counts

# Logits to hold at a time, in float32.
_LOGITS = 1 << 27


def chosen_documents(documents: Iterable[np.ndarray], shortest: int, most: int) -> list[np.ndarray]:
    """At most `most` of the documents with `shortest` tokens or more, spread evenly over their order.

    Raises:
        ValueError: fewer than two are asked for or so long, which leaves nothing to draw other documents from.
    """
    check_counts(2, documents=most)
    lengths = []
    long = []
    for document in documents:
        lengths.append(len(document))
        if len(document) >= shortest:
            long.append(document)
    if len(long) < 2:
        raise ValueError(
            f"This needs two documents of {shortest} tokens or more, and of {len(lengths)} the longest has "
            f"{max(lengths, default=0)}: give more or longer text, or ask for shorter contexts."
        )
    places = np.linspace(0, len(long) - 1, min(most, len(long))).round().astype(int)
    return [long[place] for place in places]


def text_part(batches: Batches | None) -> TextBatches:
    """Validation data as text alone: of a run that has needle documents beside its text, the text.

    Raises:
        ValueError: there is no text in it.
    """
    text = batches.text if isinstance(batches, NeedleBatches) else batches
    if not isinstance(text, TextBatches):
        raise ValueError("This is measured on whole documents of text, and the data holds none: name some with --text.")
    return text


@torch.no_grad()
def token_losses(
    model: Any, rows: Sequence[np.ndarray], tell: Callable[[int, int], object] | None = None
) -> list[np.ndarray]:
    """−ln p of each token of each row but the first, given all that stands before it in the row.

    Rows of similar lengths go through the model together, shorter ones with anything after their end, which causal
    attention cannot see: no mask is needed, so that every implementation of attention will do.

    Args:
        model: a causal language model of transformers in evaluation mode.
        rows: (n,) tokens each, n ≥ 2.
        tell: is told how many rows are done, of how many.

    Returns:
        For each row (n − 1,) float64 on the CPU, in nats.

    Raises:
        ValueError: a row of fewer than two tokens, or a token that the model has not.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for row in rows:
        if len(row) < 2 or int(row.max()) >= vocabulary:
            raise ValueError(
                f"A row must have two tokens or more, all of them below {vocabulary}, got {len(row)} of up to "
                f"{int(row.max()) if len(row) else 'none'}."
            )
    # Nothing is to be padded: a model's rule for what is not told may look for padding tokens.
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    device = next(model.parameters()).device
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    losses: list[np.ndarray] = [np.empty(0)] * len(rows)
    done = 0
    while done < len(order):
        longest = len(rows[order[done]])
        some = order[done : done + max(1, _LOGITS // (longest * vocabulary))]
        padded = np.zeros((len(some), longest), dtype=np.int64)
        for place, index in enumerate(some):
            padded[place, : len(rows[index])] = rows[index]
        input_ids = torch.from_numpy(padded).to(device)
        logits = model(input_ids=input_ids, **options).logits
        for place, index in enumerate(some):
            size = len(rows[index])
            loss = F.cross_entropy(logits[place, : size - 1].float(), input_ids[place, 1:size], reduction="none")
            losses[index] = loss.double().cpu().numpy()
        done += len(some)
        if tell is not None:
            tell(done, len(order))
    return losses
