"""Multi-needle retrieval at the level of tokens: key–value pairs hidden among noise, then queried (Section 3.4)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Streams of random numbers that never meet: (seed, stream, step).
_TRAIN, _VALIDATION, _SAMPLE = range(3)


@dataclass(frozen=True)
class RetrievalSample:
    """Sequences with the positions that an evaluation needs. n sequences of N tokens, Q queries each; all int64.

    Attributes:
        input_ids: (n, N).
        labels: (n, N), −100 except where an answer stands; to be shifted by the model, as in transformers.
        answer_spans: (n, Q), the position in the context of the value that answers the query.
        query_positions: (n, Q), the position whose prediction is the answer (the queried key, at the end).
        depth: (n, Q) float32 in [0, 1], where in the context the needle lies: 0 the first possible place, 1 the last.
    """

    input_ids: Tensor
    labels: Tensor
    answer_spans: Tensor
    query_positions: Tensor
    depth: Tensor


class RetrievalBatches:
    """Sequences of `num_pairs` needles in noise, then queries for them.

        noise … k3 v3 noise … k1 v1 … noise | ? k1 v1 ? k3 v3 …

    A needle is a key token and, right after it, a value token. Needles lie at random positions that do not overlap, all
    arrangements equally likely. A sequence's keys are distinct, its values are drawn independently. At the end come
    the queries: the marker, a key, and its value, which is the only kind of token that has a label.

    The vocabulary, in this order: the marker, keys, values, noise tokens.

    Args:
        num_pairs: needles in a sequence.
        length: tokens in a sequence, queries included.
        num_queries: needles that are asked for, distinct and in random order; None means all.
        repeats: whether each query is drawn from all needles, so that there may be more queries than needles. Distinct
            queries for all needles reward elimination: each answer that was given leaves one fewer.
        vary: whether each sequence has its own number of needles, from 1 to `num_pairs`; noise stands in place of the
            others. Only with `repeats`, as the number of queries stays. Not in `sample`.
        batch_size: sequences in a batch.
        seed: of the training sequences; the validation sequences do not depend on it.
        num_keys, num_values, num_noise: sizes of the three parts of the vocabulary.
        validation_sequences: sequences in `validation_batches`.

    Attributes:
        source: there is none but the settings.

    Raises:
        ValueError: a number is out of range, there are fewer keys than pairs, or `length` has no room for it all.
    """

    source = ""

    def __init__(
        self,
        num_pairs: int = 4,
        length: int = 128,
        *,
        num_queries: int | None = None,
        repeats: bool = False,
        vary: bool = False,
        batch_size: int = 32,
        seed: int = 0,
        num_keys: int = 64,
        num_values: int = 64,
        num_noise: int = 128,
        validation_sequences: int = 1024,
    ) -> None:
        queries = num_pairs if num_queries is None else num_queries
        if min(num_pairs, batch_size, num_keys, num_values, num_noise, validation_sequences) < 1:
            raise ValueError("All numbers of a retrieval task (pairs, batch size, keys, values, noise) are at least 1.")
        if queries < 1 or not (repeats or queries <= num_pairs):
            raise ValueError(
                f"num_queries is at least 1 and, without repeats, at most num_pairs={num_pairs}, got {queries}."
            )
        if vary and not repeats:
            raise ValueError("vary=True needs repeats=True: a sequence may have fewer needles than queries.")
        if num_keys < num_pairs:
            raise ValueError(f"{num_pairs} pairs need as many different keys, but num_keys={num_keys}.")
        if length < 2 * num_pairs + 3 * queries:
            raise ValueError(
                f"length={length} has no room for {num_pairs} pairs and {queries} queries: "
                f"these alone take {2 * num_pairs + 3 * queries} tokens."
            )
        self.num_pairs, self.num_queries, self.repeats, self.length = num_pairs, queries, repeats, length
        self.vary = vary
        self.num_keys, self.num_values, self.num_noise = num_keys, num_values, num_noise
        self.batch_size, self.seed, self.validation_sequences = batch_size, seed, validation_sequences
        self.marker = 0
        self.first_key = 1
        self.first_value = self.first_key + num_keys
        self.first_noise = self.first_value + num_values
        self.vocab_size = self.first_noise + num_noise
        self.context_length = length - 3 * queries

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The sequences of a step; see `Batches.train_batch`."""
        return _batch(self._draw(self.batch_size, (self.seed, _TRAIN, step), vary=self.vary))

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """`validation_sequences` fixed sequences; the last batch may be smaller."""
        for start in range(0, self.validation_sequences, self.batch_size):
            size = min(self.batch_size, self.validation_sequences - start)
            yield _batch(self._draw(size, (0, _VALIDATION, start)))

    def sample(self, n: int, seed: int) -> RetrievalSample:
        """Draw `n` sequences to evaluate on; none of them is drawn for training or validation on purpose."""
        return self._draw(n, (seed, _SAMPLE, 0))

    def asking(self, num_pairs: int, num_queries: int, context_length: int | None = None) -> "RetrievalBatches":
        """The same task with other numbers of needles and of distinct queries, in a context of the same length unless
        another is given.

        Raises:
            ValueError: there is no room for so many.
        """
        return RetrievalBatches(
            num_pairs,
            (context_length or self.context_length) + 3 * num_queries,
            num_queries=num_queries,
            batch_size=self.batch_size,
            seed=self.seed,
            num_keys=self.num_keys,
            num_values=self.num_values,
            num_noise=self.num_noise,
            validation_sequences=self.validation_sequences,
        )

    def names(self, input_ids: Tensor) -> list[str]:
        """How to print a sequence (N,): "?" for the marker, "k3" and "v3" for keys and values, "·" for noise."""
        return [self._name(int(token)) for token in input_ids]

    def _name(self, token: int) -> str:
        if token == self.marker:
            return "?"
        if token >= self.first_noise:
            return "·"
        if token >= self.first_value:
            return f"v{token - self.first_value}"
        return f"k{token - self.first_key}"

    def _draw(self, n: int, stream: tuple[int, int, int], *, vary: bool = False) -> RetrievalSample:
        random = np.random.default_rng(stream)
        rows = np.arange(n)[:, None]
        keys = self.first_key + _distinct(random, n, self.first_value - self.first_key, self.num_pairs)
        values = random.integers(self.first_value, self.first_noise, size=(n, self.num_pairs))

        # Merge each needle into one slot, choose slots, and unfold: every arrangement is equally likely.
        slots = np.sort(_distinct(random, n, self.context_length - self.num_pairs, self.num_pairs), axis=1)
        needles = slots + np.arange(self.num_pairs)
        input_ids = random.integers(self.first_noise, self.vocab_size, size=(n, self.length))
        input_ids[rows, needles] = keys
        input_ids[rows, needles + 1] = values

        counts = np.full((n, 1), self.num_pairs)
        if vary:
            counts = random.integers(1, self.num_pairs + 1, size=(n, 1))
            # Which needles go does not depend on where they lie: positions are drawn for a random order of keys.
            gone = _distinct(random, n, self.num_pairs, self.num_pairs) >= counts
            for offset in (0, 1):
                noise = random.integers(self.first_noise, self.vocab_size, size=gone.shape)
                hidden = input_ids[rows, needles + offset]
                input_ids[rows, needles + offset] = np.where(gone, noise, hidden)
            present = gone.argsort(axis=1, kind="stable")
        if self.repeats:
            queried = (random.random((n, self.num_queries)) * counts).astype(np.int64)
            queried = present[rows, queried] if vary else queried
        else:
            queried = _distinct(random, n, self.num_pairs, self.num_queries)
        markers = self.context_length + 3 * np.arange(self.num_queries)
        input_ids[:, markers] = self.marker
        input_ids[:, markers + 1] = keys[rows, queried]
        input_ids[:, markers + 2] = values[rows, queried]
        labels = np.full_like(input_ids, -100)
        labels[:, markers + 2] = values[rows, queried]

        positions = needles[rows, queried]
        return RetrievalSample(
            input_ids=torch.from_numpy(input_ids),
            labels=torch.from_numpy(labels),
            answer_spans=torch.from_numpy(positions + 1),
            query_positions=torch.from_numpy(np.tile(markers + 1, (n, 1))),
            depth=torch.from_numpy(positions / max(1, self.context_length - 2)).float(),
        )


def _distinct(random: np.random.Generator, rows: int, population: int, count: int) -> np.ndarray:
    """`count` different numbers below `population` in random order, for each row: (rows, count)."""
    return random.random((rows, population)).argsort(axis=1)[:, :count]


def _batch(sample: RetrievalSample) -> dict[str, Tensor]:
    return {"input_ids": sample.input_ids, "labels": sample.labels}
