"""Makes batches of text for training and validation, and says what training asks of any data."""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.packing import IGNORED, shuffled
from diff_transformer.data.token_cache import TokenCache, divided
from diff_transformer.data.tokenizers import bytes_of_tokens

_VALIDATED_TOGETHER = 1 << 14  # tokens


class Batches(Protocol):
    """What training asks of its data.

    A batch is a dictionary of `input_ids` and `labels`, both (batch, length) int64 on the CPU, and of `position_ids` of
    the same shape where sequences hold several documents that do not see each other. Labels are as in transformers:
    the same positions as `input_ids` (the model shifts them), −100 where nothing is to be predicted.
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def source(self) -> str:
        """A fingerprint of what the batches are made of, beside the settings: of all documents, for text."""

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step, counted from 1: a pure function of the settings, the seed and `step`.

        So resuming needs no state of the data, and all models of a comparison see the same batches.
        """

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """The validation data, the same in each call."""


class TextBatches:
    """Blocks of packed documents: in an order of their own each epoch to train on, in the text's to validate with.

    Documents are divided into training and validation by their content alone (see `split`). Blocks overlap by one
    token: an epoch, or the whole of the validation data, predicts every token once, but for the first of each document
    and a rest shorter than a block.

    Args:
        cache: the tokenised corpus.
        tokenizer: what it was tokenised with.
        length: tokens in a block.
        batch_size: blocks in a batch.
        seed: of the order of the training blocks; the split and the validation blocks do not depend on it.
        validation_fraction: the share of the corpus, in bytes, that is kept for validation; 1 keeps all of it, and
            there is nothing to train on.
        validation_tokens: at most about so many tokens are validated with (blocks spread evenly over the validation
            text); None means all.
        isolated: whether a document sees itself alone (positions restart with it) or all that stands before it in
            its block.

    Raises:
        ValueError: a setting is out of range, or the corpus is too small for one block on either side.
    """

    def __init__(
        self,
        cache: TokenCache,
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        validation_fraction: float = 0.05,
        validation_tokens: int | None = None,
        isolated: bool = True,
    ) -> None:
        if length < 2 or batch_size < 1:
            raise ValueError(f"Need length ≥ 2 and batch_size ≥ 1, got length={length}, batch_size={batch_size}.")
        self.vocab_size = len(tokenizer)
        self.cache, self.length, self.batch_size, self.seed, self.isolated = cache, length, batch_size, seed, isolated
        sizes = np.array(bytes_of_tokens(tokenizer))
        self._train, self._validation, self.source = divided(cache, validation_fraction, sizes)
        for part, packed in (("training", self._train), ("validation", self._validation)):
            if not packed.blocks(length) and not (part == "training" and validation_fraction == 1):
                raise ValueError(
                    f"The {part} part of the corpus has {len(packed)} tokens, fewer than one block of {length}: "
                    "give more text, a shorter length or another validation_fraction."
                )
        blocks = self._validation.blocks(length)
        if validation_tokens is not None:
            chosen = min(blocks, max(1, validation_tokens // length))
            self._validation_blocks = np.linspace(0, blocks - 1, chosen).round().astype(int)
        else:
            self._validation_blocks = np.arange(blocks)
        self._sizes = sizes

    @property
    def train_tokens(self) -> int:
        """Tokens to train on, ends of text included."""
        return len(self._train)

    @property
    def validation_bytes(self) -> int:
        """Bytes of text that the targets of `validation_batches` stand for.

        Bits per byte are the targets' summed negative log-likelihood / ln 2 / `validation_bytes`. The end of a text
        is a target as well (its cost counts) but holds no bytes.
        """
        targets = (batch["labels"][:, 1:] for batch in self.validation_batches())
        return sum(int(self._sizes[labels[labels != IGNORED].numpy()].sum()) for labels in targets)

    def documents(self, *, training: bool = False) -> Iterator[np.ndarray]:
        """Whole documents of the validation part, or of the training part: the tokens of each, its end of text
        included, in the corpus' order.
        """
        return (self._train if training else self._validation).documents()

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The next `batch_size` blocks of the order of the epoch; see `Batches.train_batch`."""
        blocks = self._train.blocks(self.length)
        if not blocks:
            raise ValueError("There is no training text: all of the corpus is kept for validation.")
        first = (step - 1) * self.batch_size
        indices = [
            shuffled(number % blocks, blocks, (self.seed, number // blocks))
            for number in range(first, first + self.batch_size)
        ]
        return self._train.batch(np.array(indices), self.length, self.isolated)

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """The validation blocks in the order of the text, `batch_size` or fewer at a time.

        A training batch may be divided among many processes, and these are not: they have 16,384 tokens at the most, or
        one block.
        """
        rows = max(1, min(self.batch_size, _VALIDATED_TOGETHER // self.length))
        for start in range(0, len(self._validation_blocks), rows):
            indices = self._validation_blocks[start : start + rows]
            yield self._validation.batch(indices, self.length, self.isolated)
