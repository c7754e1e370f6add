"""Makes batches of text: divides a tokenised corpus, packs documents into blocks, and orders the blocks."""

import hashlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import ALL_ROWS, IGNORED
from diff_lab.data.corpus import split
from diff_lab.data.token_cache import TokenCache
from diff_lab.data.tokenizers import bytes_of_tokens

_VALIDATION_TOKENS = 1 << 14  # of a batch


@dataclass(eq=False, repr=False)
class TextBatches:
    """Blocks of packed documents: in an order of their own each epoch to train on, in the text's to validate with.

    Documents are divided into training and validation by their content alone (see `split`). Blocks overlap by one
    token: an epoch, or the whole of the validation data, predicts every token once, but for the first of each document
    and a rest shorter than a block.

    Raises ValueError if the corpus is too small for one block on either side.
    """

    cache: TokenCache
    tokenizer: PreTrainedTokenizerFast  # of the corpus
    _: KW_ONLY
    length: int  # tokens in a block
    batch_size: int  # blocks in a batch
    seed: int = 0  # of the order of the training blocks; the split and the validation blocks do not depend on it
    validation_fraction: float = 0.05  # in bytes; 1 keeps all of the corpus, and there is nothing to train on
    validation_tokens: int | None = None  # about so many at most, of blocks spread evenly over the text; None: all
    isolated: bool = True  # whether a document sees itself alone (positions restart with it) or all before it

    def __post_init__(self) -> None:
        length = self.length
        self.vocab_size = len(self.tokenizer)
        self._sizes = np.array(bytes_of_tokens(self.tokenizer))
        documents = self.cache.documents
        self.source = hashlib.sha256(documents["digest"].tobytes()).hexdigest()
        self._train, self._validation = _divided(self.cache.tokens, documents, self.validation_fraction, self._sizes)
        for part, packed in (("training", self._train), ("validation", self._validation)):
            if not packed.blocks(length) and not (part == "training" and self.validation_fraction == 1):
                raise ValueError(
                    f"The {part} part of the corpus has {len(packed)} tokens, fewer than one block of {length}: "
                    "give more text, a shorter length or another validation_fraction."
                )
        blocks = chosen = self._validation.blocks(length)
        if self.validation_tokens is not None:
            chosen = min(blocks, max(1, self.validation_tokens // length))
        self._validation_blocks = np.linspace(0, blocks - 1, chosen).round().astype(int)

    @property
    def train_tokens(self) -> int:
        """Tokens to train on, ends of text included."""
        return len(self._train)

    @property
    def validation_bytes(self) -> int:
        """Bytes of text that the targets of `validation_batches` stand for; an end of text is a target without any."""
        targets = (batch["labels"][:, 1:] for batch in self.validation_batches())
        return sum(int(self._sizes[labels[labels != IGNORED].numpy()].sum()) for labels in targets)

    def documents(self, *, training: bool = False) -> Iterator[np.ndarray]:
        """Return the tokens of each document, with its end of text, of the validation part or of the training part."""
        return (self._train if training else self._validation).documents()

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        """Return rows of the next `batch_size` blocks of the order of the epoch; see `Batches.train_batch`."""
        blocks = self._train.blocks(self.length)
        if not blocks:
            raise ValueError("There is no training text: all of the corpus is kept for validation.")
        first = (step - 1) * self.batch_size
        indices = [
            shuffled(number % blocks, blocks, (self.seed, number // blocks))
            for number in range(first, first + self.batch_size)[rows]
        ]
        return self._train.batch(np.array(indices), self.length, self.isolated)

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the validation blocks in order, at most `batch_size` of them and 16,384 tokens, or one block."""
        rows = max(1, min(self.batch_size, _VALIDATION_TOKENS // self.length))
        for start in range(0, len(self._validation_blocks), rows):
            indices = self._validation_blocks[start : start + rows]
            yield self._validation.batch(indices, self.length, self.isolated)


class Packed(NamedTuple):
    """Documents of a token cache, one after the other."""

    tokens: np.ndarray  # (cache,) of the cache
    begins: np.ndarray  # (documents,) where each document begins in the cache
    ends: np.ndarray  # (documents + 1,) where each document ends in the packed stream, after a 0

    @classmethod
    def of(cls, tokens: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> "Packed":
        """Pack documents (documents,) that begin in the cache at `begins` with `lengths` tokens; not the empty ones."""
        nonempty = lengths > 0
        return cls(tokens, begins[nonempty], np.concatenate([[0], np.cumsum(lengths[nonempty])]))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each document in turn, as the cache holds them."""
        for number, begin in enumerate(self.begins):
            yield self.tokens[begin : begin + self.ends[number + 1] - self.ends[number]]

    def blocks(self, length: int) -> int:
        """Count the blocks; each begins with the last token of the one before, to predict every token once."""
        return max(0, (len(self) - 1) // (length - 1))

    def block(self, index: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return block `index`: tokens and positions, both (length,) int64; positions restart with each document."""
        start = index * (length - 1)
        positions = np.arange(start, start + length)
        first, last = np.searchsorted(self.ends, (start, start + length - 1), side="right") - 1
        document = first + np.searchsorted(self.ends[first + 1 : last + 1], positions, side="right")
        begins = self.ends[document]
        tokens = self.tokens[self.begins[document] + positions - begins]
        return tokens.astype(np.int64), positions - np.maximum(begins, start)

    def batch(self, indices: np.ndarray, length: int, isolated: bool) -> dict[str, Tensor]:
        """Make a batch of blocks (blocks,): `input_ids` and `labels`, (blocks, length) int64.

        Isolated, also `position_ids`, and no first token of a document is predicted: nothing before it can be seen.
        """
        blocks = [self.block(int(index), length) for index in indices]
        input_ids = torch.from_numpy(np.stack([tokens for tokens, _ in blocks]))
        if not isolated:
            return {"input_ids": input_ids, "labels": input_ids.clone()}
        position_ids = torch.from_numpy(np.stack([positions for _, positions in blocks]))
        labels = input_ids.masked_fill(position_ids == 0, IGNORED)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def _divided(
    tokens: np.ndarray, documents: np.ndarray, validation_fraction: float, sizes: np.ndarray
) -> tuple[Packed, Packed]:
    """Return the training and the validation part, which is behind it in a document that both share."""
    ends = documents["end"]
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins
    training = split(documents, validation_fraction)
    train_lengths = np.where(training > 0, lengths, 0)
    # The longest document and its copies, or none.
    for shared in np.flatnonzero((training > 0) & (training < documents["bytes"])):
        # Its validation part begins with the first token that begins at the cut or after it.
        held_out_bytes = int(documents["bytes"][shared] - training[shared])
        train_lengths[shared] = _tokens_before_end(tokens[begins[shared] : ends[shared]], held_out_bytes, sizes)
    return Packed.of(tokens, begins, train_lengths), Packed.of(tokens, begins + train_lengths, lengths - train_lengths)


def _tokens_before_end(tokens: np.ndarray, size: int, sizes: np.ndarray) -> int:
    """Return how many tokens there are before the last `size` bytes of a text that ends with the end of text."""
    tail = tokens[-size - 1 :]  # every token but the last one has a byte or more
    from_token = np.cumsum(sizes[tail][::-1])  # bytes from each token to the end, the last one first
    return len(tokens) - int(np.searchsorted(from_token, size, side="right"))


def shuffled(index: int, size: int, seed: tuple[int, ...]) -> int:
    """Return the place of `index` in a permutation of 0 … size − 1 that the seed chooses, without a table of it.

    A Feistel network permutes the next larger power of 4; a result beyond `size` goes through it again.
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
