"""Packs documents into blocks of one length, and says where each document begins."""

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the label of what is not to be predicted, as in transformers


class Packed(NamedTuple):
    """Documents of a token cache, one after the other.

    Attributes:
        tokens: (cache,) of the cache.
        begins: (documents,) where each document begins in the cache.
        ends: (documents + 1,) where each document ends in the packed stream, after a 0.
    """

    tokens: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> "Packed":
        """Documents (documents,) that begin in the cache at `begins` and have `lengths` tokens; not the empty ones."""
        nonempty = lengths > 0
        return cls(tokens, begins[nonempty], np.concatenate([[0], np.cumsum(lengths[nonempty])]))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def documents(self) -> Iterator[np.ndarray]:
        """The tokens of each document in turn, as the cache holds them."""
        for number, begin in enumerate(self.begins):
            yield self.tokens[begin : begin + self.ends[number + 1] - self.ends[number]]

    def blocks(self, length: int) -> int:
        """How many blocks there are: each begins with the last token of the one before, so that all tokens but the
        first (and a rest shorter than a block) are predicted once.
        """
        return max(0, (len(self) - 1) // (length - 1))

    def block(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Block `index`: tokens and positions, both (length,) int64. Positions restart where a document begins; the
        block's first token has position 0.
        """
        start = index * (length - 1)
        positions = np.arange(start, start + length)
        first, last = np.searchsorted(self.ends, (start, start + length - 1), side="right") - 1
        document = first + np.searchsorted(self.ends[first + 1 : last + 1], positions, side="right")
        begins = self.ends[document]
        tokens = self.tokens[self.begins[document] + positions - begins]
        return tokens.astype(np.int64), positions - np.maximum(begins, start)

    def batch(self, indices: np.ndarray, length: int, isolated: bool) -> dict[str, Tensor]:
        """Blocks (blocks,) as a batch.

        Returns:
            `input_ids` and `labels`, (blocks, length) int64. Isolated, also `position_ids`, which restart with each
            document, and the first token of a document is not to be predicted: nothing before it can be seen.
        """
        blocks = [self.block(int(index), length) for index in indices]
        input_ids = torch.from_numpy(np.stack([tokens for tokens, _ in blocks]))
        if not isolated:
            return {"input_ids": input_ids, "labels": input_ids.clone()}
        position_ids = torch.from_numpy(np.stack([positions for _, positions in blocks]))
        labels = input_ids.masked_fill(position_ids == 0, IGNORED)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def flattened(batch: dict[str, Tensor]) -> dict[str, Any]:
    """A batch whose rows hold several documents as one row, for a model that attends by document: no mask is needed.

    Args:
        batch: on the CPU, of tensors (B, N): `input_ids`, `labels` and `position_ids` as `Packed.batch` gives them, or
            some of its rows.

    Returns:
        The same tensors as (1, B·N), `labels` with −100 at the first token of every document (which would be predicted
        from the document before), and where the documents are, by transformers' names: `cu_seq_lens_q` and
        `cu_seq_lens_k`, int32, the first token of each and B·N at the end; `max_length_q` and `max_length_k`, the
        longest one's length. The end is repeated until there are 2, 4, 8 … entries, so that compiled code meets few
        shapes. A batch without `position_ids` as it is.
    """
    if "position_ids" not in batch:
        return dict(batch)
    begins = torch.ones_like(batch["position_ids"], dtype=torch.bool)
    begins[:, 1:] = batch["position_ids"].diff(dim=1) != 1
    row: dict[str, Any] = {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    row["labels"] = batch["labels"].masked_fill(begins, IGNORED).reshape(1, -1)
    tokens = begins.numel()
    ends = F.pad(begins.flatten().nonzero().squeeze(1), (0, 1), value=tokens).to(torch.int32)
    longest = int(ends.diff().max())
    ends = F.pad(ends, (0, (1 << (len(ends) - 1).bit_length()) - len(ends)), value=tokens)
    return row | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def shuffled(index: int, size: int, seed: tuple[int, ...]) -> int:
    """Where `index` goes in a permutation of 0 … size − 1 that the seed chooses, without a table of it.

    A Feistel network permutes the next larger power of 4; what falls beyond `size` goes through it again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = repr(seed).encode()
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(
                key, digest_size=8, salt=turn.to_bytes(16, "big"), person=right.to_bytes(16, "big")
            )
            left, right = right, left ^ (int.from_bytes(digest.digest(), "big") & mask)
        index = left << half | right
        if index < size:
            return index
