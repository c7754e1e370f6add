"""Batches of text for training and validation."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.tokenizers import bytes_of_tokens, encode_documents


class Batches(Protocol):
    """What training asks of its data.

    A batch is a dictionary of `input_ids` and `labels`, both (batch, length) int64 on the CPU. Labels are as in
    transformers: the same positions as `input_ids` (the model shifts them), −100 where nothing is to be predicted.
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step: a pure function of the settings, the seed and `step`.

        So resuming needs no state of the data, and twins see the same batches.
        """

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """The validation data, the same in each call."""


class TextBatches:
    """Windows of text: random ones to train on, fixed ones to validate with.

    Documents are divided into training and validation by their content alone (see `split_documents`), encoded, and
    joined with the end-of-text token after each. Validation windows overlap by one token: with all of them, every
    token of the validation text but the first (and a rest shorter than a window) is predicted exactly once.

    Args:
        documents: the corpus.
        tokenizer: one of `diff_transformer.data.tokenizers`.
        length: tokens in a window.
        batch_size: windows in a batch.
        seed: of the training windows; the split and the validation windows do not depend on it.
        validation_fraction: the share of the corpus, in characters, that is kept for validation; 1 keeps all of it,
            and there is nothing to train on.
        validation_tokens: at most about so many tokens are validated with (windows spread evenly over the validation
            text); None means all.

    Raises:
        ValueError: a setting is out of range, or the corpus is too small for one window on either side.
    """

    def __init__(
        self,
        documents: Sequence[str],
        tokenizer: PreTrainedTokenizerFast,
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        validation_fraction: float = 0.05,
        validation_tokens: int | None = None,
    ) -> None:
        if length < 2 or batch_size < 1:
            raise ValueError(f"Need length ≥ 2 and batch_size ≥ 1, got length={length}, batch_size={batch_size}.")
        self.vocab_size = len(tokenizer)
        self.length, self.batch_size, self.seed = length, batch_size, seed
        train, validation = split_documents(documents, validation_fraction)
        self._train = _join(tokenizer, train)
        self._validation = _join(tokenizer, validation)
        for part, tokens in (("training", self._train), ("validation", self._validation)):
            if len(tokens) < length and not (part == "training" and validation_fraction == 1):
                raise ValueError(
                    f"The {part} part of the corpus has {len(tokens)} tokens, fewer than one window of {length}: "
                    "give more text, a shorter length or another validation_fraction."
                )
        starts = np.arange(0, len(self._validation) - length + 1, length - 1)
        if validation_tokens is not None:
            windows = min(len(starts), max(1, validation_tokens // length))
            starts = starts[np.linspace(0, len(starts) - 1, windows).round().astype(int)]
        self._validation_starts = starts
        sizes = np.array(bytes_of_tokens(tokenizer))
        self._validation_bytes = int(sizes[_windows(self._validation, starts, length)[:, 1:]].sum())

    @property
    def train_tokens(self) -> int:
        """Tokens to draw training windows from, ends of text included."""
        return len(self._train)

    @property
    def validation_bytes(self) -> int:
        """Bytes of text that the targets of `validation_batches` stand for.

        Bits per byte are the targets' summed negative log-likelihood / ln 2 / `validation_bytes`. The end of a text
        is a target as well (its cost counts) but holds no bytes.
        """
        return self._validation_bytes

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """`batch_size` windows at random places of the training text; see `Batches.train_batch`."""
        if not len(self._train):
            raise ValueError("There is no training text: all of the corpus is kept for validation.")
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, len(self._train) - self.length + 1, size=self.batch_size)
        return _batch(_windows(self._train, starts, self.length))

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """The validation windows in the order of the text; the last batch may be smaller."""
        for start in range(0, len(self._validation_starts), self.batch_size):
            starts = self._validation_starts[start : start + self.batch_size]
            yield _batch(_windows(self._validation, starts, self.length))


def split_documents(documents: Sequence[str], validation_fraction: float) -> tuple[list[str], list[str]]:
    """Divide documents into (training, validation), by their content alone: no seed, and the order does not matter.

    Documents are ranked by a hash of their text; the first ones are kept for validation as long as they fit into
    `validation_fraction` of all characters. Copies of a document stay on one side. If not even the first fits (few
    documents, or one), validation is the end of the longest document.
    """
    if not 0 < validation_fraction <= 1:
        raise ValueError(f"validation_fraction is above 0 and at most 1, got {validation_fraction}.")
    if validation_fraction == 1:
        return [], list(documents)
    room = validation_fraction * sum(map(len, documents))
    ranked = sorted(documents, key=lambda text: hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    validation: list[str] = []
    for _, copies in groupby(ranked):
        group = list(copies)
        room -= sum(map(len, group))
        if room < 0:
            break
        validation.extend(group)
    chosen = set(validation)
    train = [document for document in documents if document not in chosen]
    if not validation:
        longest = max(range(len(train)), key=lambda index: len(train[index]))
        text = train[longest]
        cut = len(text) - max(1, round(validation_fraction * len(text)))
        train[longest], validation = text[:cut], [text[cut:]]
    return train, validation


def _join(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str]) -> np.ndarray:
    """The tokens of all documents, each followed by the end of text: (tokens,) int32."""
    end = [tokenizer.eos_token_id]
    parts = [np.array(ids + end, dtype=np.int32) for ids in encode_documents(tokenizer, documents)]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return tokens[starts[:, None] + np.arange(length)]


def _batch(windows: np.ndarray) -> dict[str, Tensor]:
    input_ids = torch.from_numpy(windows.astype(np.int64))
    return {"input_ids": input_ids, "labels": input_ids.clone()}
