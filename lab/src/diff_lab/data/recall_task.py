"""Draws associative recall among distractors of the same form as the answers (Section 3.4 in small)."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED, SAMPLE, TRAINING, GeneratedBatches, Stream
from diff_lab.data.retrieval_task import RetrievalSample

PAIR = 3  # tokens of a pair: two of its key, one value


@dataclass(eq=False)
class RecallBatches(GeneratedBatches):
    """Draw pairs of a key of two tokens and a value, then questions: keys again, each followed by its value.

        4 1 G  4 3 A  2 1 G  5 3 E … | 2 1 G  4 3 A …

    All pairs have one form and one vocabulary, so nothing but the question tells a pair that is asked for from one that
    is not. The keys of P pairs are different cells of a square grid with 2 P cells or just more, whose rows and columns
    are tokens drawn anew for each sequence. So about √(P/2) other keys have the first token of an asked key, and as
    many its second: near misses, in every length of context. Only answers have labels.

    The vocabulary, in this order: tokens of keys, values.

    Sequences have one length. Those to train on have their own numbers of pairs, from 2 to `pairs` and as often below
    the geometric mean as above; questions, drawn with repeats, fill the rest. Those to validate with have `pairs`.

    Raises ValueError if a number is out of range, or there are fewer tokens than the grid of so many pairs needs.
    """

    pairs: int = 32  # in a context, at most
    _: KW_ONLY
    questions: int = 16  # after a context of `pairs`
    tokens: int = 16  # that keys are made of, and as many values
    validation_sequences: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pairs(self.pairs)
        self.vocab_size = 2 * self.tokens
        self.length = PAIR * (self.pairs + self.questions)
        self.validation_size = self.validation_sequences

    def check_pairs(self, pairs: int) -> None:
        """Raise ValueError for a number of pairs that a context cannot have."""
        most = self.tokens**2 // 2
        if not 2 <= pairs <= most:
            raise ValueError(f"A context has 2 pairs or more, and of tokens={self.tokens} at most {most}, got {pairs}.")

    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        random = np.random.default_rng(stream)
        pairs = np.full((count, 1), self.pairs)
        if stream[1] == TRAINING:
            pairs = np.exp(random.uniform(np.log(2), np.log(self.pairs + 1), size=(count, 1))).astype(np.int64)
        places = np.arange(self.pairs + self.questions)
        asked = (random.random((count, len(places))) * pairs).astype(np.int64)
        sample = self._sequences(random, np.where(places < pairs, places, asked), pairs)
        return {"input_ids": sample.input_ids, "labels": sample.labels}

    def sample(self, n: int, seed: int, pairs: int | None = None) -> RetrievalSample:
        """Draw `n` sequences of one number of pairs (`self.pairs` unless given) for an evaluation.

        All questions are different, so at most as many as pairs. Raises ValueError if no context has so many pairs.
        """
        pairs = self.pairs if pairs is None else pairs
        self.check_pairs(pairs)
        random = np.random.default_rng((seed, SAMPLE, pairs))
        asked = _shuffled(random, n, pairs)[:, : self.questions]
        shown = np.concatenate((np.tile(np.arange(pairs), (n, 1)), asked), axis=1)
        return self._sequences(random, shown, np.full((n, 1), pairs))

    def _sequences(self, random: np.random.Generator, shown: np.ndarray, pairs: np.ndarray) -> RetrievalSample:
        """Make sequences of the pairs (n, T) `shown` at each place; the first (n, 1) `pairs` are the context."""
        n, places = shown.shape
        most, widths = int(pairs.max()), part_tokens(pairs)
        row, column = np.divmod(np.arange(widths.max() ** 2), widths.max())
        # Cells outside of a sequence's own grid come last, and are not among its first pairs.
        drawn = random.random((n, len(row))) + (np.maximum(row, column) >= widths)
        cells = drawn.argsort(axis=1)[:, :most]
        firsts, seconds = (_shuffled(random, n, self.tokens) for _ in range(2))
        keys = [np.take_along_axis(firsts, row[cells], axis=1), np.take_along_axis(seconds, column[cells], axis=1)]
        values = random.integers(self.tokens, 2 * self.tokens, size=cells.shape)
        of_pairs = np.stack((*keys, values), axis=-1)
        input_ids = np.take_along_axis(of_pairs, shown[:, :, None], axis=1)
        labels = np.full_like(input_ids, IGNORED)
        labels[:, :, -1] = np.where(np.arange(places) < pairs, IGNORED, input_ids[:, :, -1])
        queries, asked = PAIR * np.tile(np.arange(most, places), (n, 1)) + PAIR - 2, shown[:, most:]
        return RetrievalSample(
            input_ids=torch.from_numpy(input_ids.reshape(n, -1)),
            labels=torch.from_numpy(labels.reshape(n, -1)),
            answer_spans=torch.from_numpy(PAIR * asked + PAIR - 1),
            query_positions=torch.from_numpy(queries),
            depth=torch.from_numpy(asked / (pairs - 1)).float(),
        )


def part_tokens(pairs: Any) -> Any:
    """Count the tokens that the first parts of so many keys are drawn from, and likewise the second; takes arrays."""
    return np.ceil(np.sqrt(2 * pairs)).astype(int)


def _shuffled(random: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Draw an order of the numbers below `count` for each row: (rows, count)."""
    return random.random((rows, count)).argsort(axis=1)
