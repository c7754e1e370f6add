"""Draws multi-needle retrieval at the level of tokens: pairs hidden among noise, then queried (Section 3.4)."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from diff_lab.data.batches import IGNORED, SAMPLE, TRAINING, GeneratedBatches, Stream


@dataclass(frozen=True)
class RetrievalSample:
    """Sequences with the positions that an evaluation needs. n sequences of N tokens, Q queries each; all int64 but
    `depth`, float32 in [0, 1]: the needle's place, from 0, the first possible one, to 1, the last."""

    input_ids: Tensor  # (n, N)
    labels: Tensor  # (n, N), −100 except where an answer stands; to be shifted by the model, as in transformers
    answer_spans: Tensor  # (n, Q), the position in the context of the value that answers the query
    query_positions: Tensor  # (n, Q), the position whose prediction is the answer (the queried key, at the end)
    depth: Tensor  # (n, Q)


@dataclass(eq=False)
class RetrievalBatches(GeneratedBatches):
    """Sequences of `num_pairs` needles in noise, then queries for them.

        noise … k3 v3 noise … k1 v1 … noise | ? k1 v1 ? k3 v3 …

    A needle is a key token and, right after it, a value token. Needles lie at random positions that do not overlap, all
    arrangements equally likely. A sequence's keys are distinct, its values are drawn independently. At the end come
    the queries: the marker, a key, and its value, which is the only kind of token that has a label.

    The vocabulary, in this order: the marker, keys, values, noise tokens. Raises ValueError if a number is out of
    range, there are fewer keys than pairs, or `length` is too short for it all.
    """

    num_pairs: int = 4  # needles in a sequence
    length: int = 128  # tokens in a sequence, queries included
    _: KW_ONLY
    num_queries: int | None = None  # queried needles, distinct and in random order; None means all
    # Whether each query is drawn from all needles, so that there may be more queries than needles. Distinct queries for
    # all needles reward elimination: each answer that was given leaves one fewer.
    repeats: bool = False
    # Whether each sequence to train on has its own number of needles, from 1, with noise in place of the others. Only
    # with `repeats`, as the number of queries stays.
    vary: bool = False
    num_keys: int = 64
    num_values: int = 64
    num_noise: int = 128
    validation_sequences: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queries = queries = self.num_queries or self.num_pairs
        if queries > self.num_pairs and not self.repeats:
            raise ValueError(f"Without repeats, num_queries is at most num_pairs={self.num_pairs}, got {queries}.")
        if self.vary and not self.repeats:
            raise ValueError("vary=True needs repeats=True: a sequence may have fewer needles than queries.")
        if self.num_keys < self.num_pairs:
            raise ValueError(f"{self.num_pairs} pairs need as many different keys, but num_keys={self.num_keys}.")
        needed = 2 * self.num_pairs + 3 * queries
        if self.length < needed:
            raise ValueError(
                f"length={self.length} has no room for {self.num_pairs} pairs and {queries} queries: "
                f"these alone take {needed} tokens."
            )
        self.marker = 0
        self.first_key = 1
        self.first_value = self.first_key + self.num_keys
        self.first_noise = self.first_value + self.num_values
        self.vocab_size = self.first_noise + self.num_noise
        self.context_length = self.length - 3 * queries
        self.validation_size = self.validation_sequences

    def draw(self, count: int, stream: Stream) -> dict[str, Tensor]:
        sample = self._draw(count, stream)
        return {"input_ids": sample.input_ids, "labels": sample.labels}

    def sample(self, n: int, seed: int) -> RetrievalSample:
        """Draw `n` sequences to evaluate on; none of them is drawn for training or validation on purpose."""
        return self._draw(n, (seed, SAMPLE, 0))

    def asking(self, num_queries: int) -> "RetrievalBatches":
        """Return the task with another number of queries, which are distinct, in contexts as long. Raises ValueError
        for more than there are pairs."""
        length = self.context_length + 3 * num_queries
        return replace(self, length=length, num_queries=num_queries, repeats=False, vary=False)

    def names(self, input_ids: Tensor) -> list[str]:
        """Name the tokens of a sequence (N,): "?" for the marker, "k3" and "v3" for keys and values, "·" for noise."""
        words = self.words()
        return [words[token] if token < self.first_noise else "·" for token in input_ids.tolist()]

    def words(self) -> list[str]:
        """Return the word of each token, all different: "?" for the marker, "k0" …, "v0" …, and "n0" … for noise."""
        kinds = (("k", self.num_keys), ("v", self.num_values), ("n", self.num_noise))
        return ["?", *(f"{kind}{i}" for kind, count in kinds for i in range(count))]

    def _draw(self, n: int, stream: Stream) -> RetrievalSample:
        random = np.random.default_rng(stream)
        rows = np.arange(n)[:, None]
        keys = self.first_key + _distinct(random, n, self.num_keys, self.num_pairs)
        values = random.integers(self.first_value, self.first_noise, size=(n, self.num_pairs))

        # Merge each needle into one slot, choose slots, and unfold: every arrangement is equally likely.
        slots = np.sort(_distinct(random, n, self.context_length - self.num_pairs, self.num_pairs), axis=1)
        needles = slots + np.arange(self.num_pairs)
        input_ids = random.integers(self.first_noise, self.vocab_size, size=(n, self.length))
        input_ids[rows, needles] = keys
        input_ids[rows, needles + 1] = values

        is_removed = np.zeros((n, self.num_pairs), dtype=bool)
        if self.vary and stream[1] == TRAINING:
            counts = random.integers(1, self.num_pairs + 1, size=(n, 1))
            # Which needles go does not depend on where they lie: positions are drawn for a random order of keys.
            is_removed = _distinct(random, n, self.num_pairs, self.num_pairs) >= counts
            for offset in (0, 1):
                noise = random.integers(self.first_noise, self.vocab_size, size=is_removed.shape)
                hidden = input_ids[rows, needles + offset]
                input_ids[rows, needles + offset] = np.where(is_removed, noise, hidden)
        if self.repeats:
            present = is_removed.argsort(axis=1, kind="stable")  # those that are there come first
            counts = self.num_pairs - is_removed.sum(axis=1, keepdims=True)
            queried = present[rows, (random.random((n, self.queries)) * counts).astype(np.int64)]
        else:
            queried = _distinct(random, n, self.num_pairs, self.queries)
        markers = self.context_length + 3 * np.arange(self.queries)
        input_ids[:, markers] = self.marker
        input_ids[:, markers + 1] = keys[rows, queried]
        input_ids[:, markers + 2] = values[rows, queried]
        labels = np.full_like(input_ids, IGNORED)
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
    """Draw `count` different numbers below `population` in random order, for each row: (rows, count)."""
    return random.random((rows, population)).argsort(axis=1)[:, :count]


@cache
def most_frequent(drawn: int, values: int) -> float:
    """Compute E[the largest number of equal ones among so many independent draws] / draws.

    It is what guessing among the values of the context gives: they are drawn independently, so that some occur twice,
    and whoever knows them all and no key answers best with the most frequent.
    """
    counts, mean = np.arange(drawn + 1), drawn / values
    # How often each value was drawn counts as if it were Poisson's, which is the same for a known total.
    likely = np.exp(counts * math.log(mean) - mean - [math.lgamma(count + 1) for count in counts])
    total = math.exp(drawn * math.log(drawn) - drawn - math.lgamma(drawn + 1))
    expected = 0.0
    for most in counts:  # the sum of how likely the largest number is to exceed 0, 1, …
        exceeds = 1 - _of_sum(np.where(counts <= most, likely, 0), values)[drawn] / total
        if exceeds < 1e-12:
            break
        expected += exceeds
    return float(expected) / drawn


def _of_sum(likely: np.ndarray, terms: int) -> np.ndarray:
    """Return how likely a sum of so many independent terms is, from how likely each of their values 0, 1, … is."""
    if terms == 1:
        return likely
    half = _of_sum(np.convolve(likely, likely)[: len(likely)], terms // 2)
    return half if terms % 2 == 0 else np.convolve(half, likely)[: len(likely)]
