"""So many tokens of the validation data, few at a time."""

from collections.abc import Iterator

from torch import Tensor

from diff_transformer.data import Batches

# For one pass, unless a sequence has more: the logits of all of them are held at once.
_AT_A_TIME = 1 << 14


def first_tokens(batches: Batches, tokens: int) -> Iterator[dict[str, Tensor]]:
    """The validation batches up to so many tokens, in parts. The last sequence is cut where they end.

    Args:
        batches: the data.
        tokens: how many; all there are if they are fewer.

    Raises:
        ValueError: a number below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be 1 or more, got {tokens}.")
    return _parts(batches, tokens)


def _parts(batches: Batches, left: int) -> Iterator[dict[str, Tensor]]:
    for batch in batches.validation_batches():
        count, length = batch["input_ids"].shape
        whole = min(count, left // length)
        rows = max(1, _AT_A_TIME // length)
        for start in range(0, whole, rows):
            yield {name: values[start : min(whole, start + rows)] for name, values in batch.items()}
        left -= whole * length
        if whole < count:
            if left:
                yield {name: values[whole : whole + 1, :left] for name, values in batch.items()}
            return
