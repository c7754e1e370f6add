"""Draws multi-query associative recall: answers among distractors of their own form (Section 3.4 in small)."""

from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED, SAMPLE, TRAINING, GeneratedBatches, Stream
from diff_lab.data.retrieval_task import RetrievalSample

PAIR = 2  # tokens of a pair
SHORTEST = 4  # pairs and questions of a sequence to train on, at least


@dataclass(eq=False)
class RecallBatches(GeneratedBatches):
    """Draw pairs of a key and a value, then questions: keys again, each followed by its value.

        4 G  7 A  2 G  5 E … | 7 A  4 G …

    All pairs have one form and one vocabulary, so nothing but the question tells a pair that is asked for from one that
    is not. The keys of a sequence are different, its values are drawn independently. Only answers have labels.

    The vocabulary, in this order: keys, as many values.

    The sequences of a step have one length, drawn for each step: from `SHORTEST` pairs and questions to `pairs` and
    `questions`, as often below the geometric mean as above. Each has its own number of pairs, from 2 to two thirds of
    that; questions, drawn with repeats, fill the rest. In short sequences a model begins to find answers (docs/log.md).
    Sequences to validate with have `pairs` and `questions`.

    Raises ValueError if a number is out of range, or there are fewer keys than pairs.
    """

    pairs: int = 32  # in a context, at most
    _: KW_ONLY
    questions: int = 16  # after a context of `pairs`
    tokens: int = 64  # different keys, and as many values
    validation_sequences: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_pairs(self.pairs)
        self.vocab_size = 2 * self.tokens
        self.length = PAIR * (self.pairs + self.questions)
        self.validation_size = self.validation_sequences

    def check_pairs(self, pairs: int) -> None:
        """Raise ValueError for a number of pairs that a context cannot have."""
        if not 2 <= pairs <= self.tokens:
            raise ValueError(f"A context has 2 pairs or more, and at most tokens={self.tokens}, got pairs={pairs}.")

    def words(self) -> list[str]:
        """Return the word of each token, all different: "k0" … for keys and "v0" … for values."""
        return [f"{kind}{i}" for kind in "kv" for i in range(self.tokens)]

    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        random = np.random.default_rng(stream)
        length, pairs = self.pairs + self.questions, np.full((count, 1), self.pairs)
        if stream[1] == TRAINING:
            shortest = min(SHORTEST, length)
            length = int(np.exp(random.uniform(np.log(shortest), np.log(length + 1))))
            pairs = random.integers(2, max(2, min(self.pairs, 2 * length // 3)), (count, 1), endpoint=True)
        places = np.arange(length)
        asked = (random.random((count, length)) * pairs).astype(np.int64)
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
        most = int(pairs.max())
        keys = _shuffled(random, n, self.tokens)[:, :most]
        values = random.integers(self.tokens, 2 * self.tokens, size=keys.shape)
        input_ids = np.take_along_axis(np.stack((keys, values), axis=-1), shown[:, :, None], axis=1)
        labels = np.full_like(input_ids, IGNORED)
        labels[:, :, -1] = np.where(np.arange(places) < pairs, IGNORED, input_ids[:, :, -1])
        queries, asked = PAIR * np.tile(np.arange(most, places), (n, 1)), shown[:, most:]
        return RetrievalSample(
            input_ids=torch.from_numpy(input_ids.reshape(n, -1)),
            labels=torch.from_numpy(labels.reshape(n, -1)),
            answer_spans=torch.from_numpy(PAIR * asked + 1),
            query_positions=torch.from_numpy(queries),
            depth=torch.from_numpy(asked / (pairs - 1)).float(),
        )


def _shuffled(random: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Draw an order of the numbers below `count` for each row: (rows, count)."""
    return random.random((rows, count)).argsort(axis=1)
