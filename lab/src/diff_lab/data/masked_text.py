"""Hides tokens of text for an encoder to find: masked language modelling (Devlin et al., arXiv 1810.04805)."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import ALL_ROWS, IGNORED, TRAINING, VALIDATION, Stream
from diff_lab.data.text_batches import TextBatches

MASK_TOKEN = "<|mask|>"
# Of the tokens to find, as BERT's authors have it: these shares do not become the mask token, so that an encoder has
# something to say of every token, and not of masks alone.
_REPLACED = 0.1  # another token, drawn at random, stands there
_KEPT = 0.1  # the token itself stands there


def with_mask_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer, with a mask token added if it has none."""
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


@dataclass(eq=False, repr=False)
class MaskedTextBatches:
    """Blocks of text in which a share of each block's tokens is to be found.

    Labels stand in place of hidden tokens: nothing is shifted. The first token of a block and of a document that sees
    itself alone is never hidden, so that a block has as many targets here as for the model of the next token. Nor is an
    end of text.

    """

    text: TextBatches  # whether documents see themselves alone is its setting
    tokenizer: PreTrainedTokenizerFast  # of the text, with a mask token (see `with_mask_token`)
    _: KW_ONLY
    mask_fraction: float = 0.3  # the share of a block's tokens that are to be found, one at least
    seed: int = 0  # of the hidden tokens in training; validation does not depend on it

    def __post_init__(self) -> None:
        self.vocab_size, self.source = self.text.vocab_size, self.text.source
        special = set(self.tokenizer.all_special_ids)
        self._ordinary = np.array([token for token in range(self.vocab_size) if token not in special])

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        """Return rows of the text's batch of a step, with tokens hidden; see `Batches.train_batch`."""
        drawn = self.text.batch_size  # random numbers are drawn for the whole batch
        return self._masked(self.text.train_batch(step, rows), (self.seed, TRAINING, step), drawn, rows)

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the text's validation batches; the same tokens are hidden in each call."""
        for number, batch in enumerate(self.text.validation_batches()):
            yield self._masked(batch, (0, VALIDATION, number), len(batch["input_ids"]))

    def _masked(
        self, batch: dict[str, Tensor], stream: Stream, drawn: int, rows: slice = ALL_ROWS
    ) -> dict[str, Tensor]:
        random = np.random.default_rng(stream)
        tokens = batch["input_ids"].numpy().copy()
        shape = drawn, tokens.shape[1]
        eligible = (batch["labels"].numpy() != IGNORED) & np.isin(tokens, self._ordinary)
        eligible[:, 0] = False
        # Each row's eligible tokens in a random order, of which the first are to be found.
        order = np.where(eligible, random.random(shape)[rows], 2.0).argsort(axis=1).argsort(axis=1)
        available = eligible.sum(axis=1, keepdims=True)
        wanted = np.maximum(1, np.rint(self.mask_fraction * available))
        found = eligible & (order < wanted)
        labels = np.where(found, tokens, IGNORED)
        fate = random.random(shape)[rows]
        others = random.choice(self._ordinary, shape)[rows]
        hidden = np.where(fate < _REPLACED, others, self.tokenizer.mask_token_id)
        tokens = np.where(found & (fate < 1 - _KEPT), hidden, tokens)
        return batch | {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
