"""Measures the loss on whole documents: by position (Figure 4), and on repeated bigrams, AR-hit (Table 6).

A token x_t is a *hit* if the pair (x_{t−1}, x_t) stands earlier in its own context, so that looking back for its
predecessor finds it (associative recall). Pairs that the training text holds often can be known without looking: they
count among the *others*. The paper follows Arora et al., "Zoology" (arXiv 2312.04927), and does not say from which
frequency on a pair is left out; here it is the setting `frequent`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import Batches
from diff_lab.data.batches import grouped
from diff_lab.measure.measurement import Count, EvalInput, Measurement, Several
from diff_lab.measure.standard import text_part
from diff_lab.record import Result
from diff_lab.statistics import bootstrap_interval

CUMULATIVE_LOSS = "positions/cumulative_loss"
# Table 6's columns: of all tokens, of hits, of others.
WHOLE, AR_HIT, OTHER = REPEAT_COLUMNS = ("repeats/loss", "repeats/ar_hit", "repeats/other")
_BIGRAMS = 1 << 24  # to count at a time


def chosen_documents(documents: Iterable[np.ndarray], shortest: int, most: int) -> list[np.ndarray]:
    """Choose at most `most` of the documents with `shortest` tokens or more. Raises ValueError for fewer than two."""
    documents = list(documents)
    long = [document for document in documents if len(document) >= shortest]
    if len(long) < 2:
        raise ValueError(
            f"This needs two documents of {shortest} tokens or more, and of {len(documents)} the longest has "
            f"{max(map(len, documents), default=0)}: give more or longer text, or ask for shorter contexts."
        )
    numbers = np.linspace(0, len(long) - 1, min(most, len(long))).round().astype(int)
    return [long[number] for number in numbers]


@torch.no_grad()
def token_losses(model: Any, rows: Sequence[np.ndarray] | np.ndarray) -> list[np.ndarray]:
    """Return −ln p of each token of each row but the first, given those before it: (n − 1,) float64 in nats."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if (largest := max(int(row.max()) for row in rows)) >= vocabulary:
        raise ValueError(f"The text has the token {largest}, and the model has {vocabulary} tokens.")
    device = next(model.parameters()).device
    losses = []
    for row in rows:
        tokens = torch.from_numpy(row.astype(np.int64)).to(device)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        losses.append(F.cross_entropy(logits.float(), tokens[1:], reduction="none").double().cpu().numpy())
    return losses


def loss_record(name: str, sums: np.ndarray, measured: EvalInput, coordinates: Coordinates = NO_COORDINATES) -> Result:
    """Return the mean loss of a token, from each document's summed loss and number of tokens: (documents, 2)."""
    parts = [(float(loss), float(tokens)) for loss, tokens in sums]
    total, count = sums.sum(0)
    return measured.record(
        name,
        float(total / count),
        interval=bootstrap_interval(parts),
        n=int(count),
        unit="nats/token",
        better="lower",
        coordinates=coordinates,
        method="bootstrap over documents",
        documents=tuple(parts),
    )


class Positions(Measurement):
    """Loss by position in long documents, and cumulated up to it (Figure 4), in nats per token.

    "positions/cumulative_loss" at 256 first tokens is the mean over all tokens with fewer than 256 before them;
    "positions/loss" at the positions 128 to 255 that of the tokens with so many before them.
    """

    needs = "text"

    length: Count | None = Field(default=None, description="tokens of a context; as in training unless given")
    first: Count = Field(default=64, description="the first position that is reported; then twice as many, and so on")
    documents: Several = Field(default=100, description="documents, at most")
    windows: Count = Field(default=1, description="contexts of each document, at most")

    def check(self, batches: Batches | None, tokenizer: Any) -> tuple[list[np.ndarray], int]:
        """Return the documents whose loss by position is measured, and the tokens of a context."""
        text = text_part(batches)
        length = self.length or text.length
        if not 2 <= self.first <= length:
            raise ValueError(f"first must lie in 2 … length = {length}, got {self.first}.")
        return chosen_documents(text.documents(), length, self.documents), length

    def run(self, measured: EvalInput) -> list[Result]:
        documents, length = self.check(measured.batches, None)
        sums = np.zeros((len(documents), length - 1, 2))  # at each position the losses, and how many there are
        for of_document, document in zip(sums, documents, strict=True):
            windows = min(self.windows, len(document) // length)
            losses = token_losses(measured.model, document[: windows * length].reshape(windows, length))
            of_document[:] = np.stack((np.sum(losses, axis=0), np.full(length - 1, windows)), axis=-1)
        records = []
        before = 1  # the token at the very beginning is not predicted
        marks = [self.first << n for n in range(length.bit_length()) if self.first << n < length]
        for mark in (*marks, length):
            cumulated, between = sums[:, : mark - 1].sum(1), sums[:, before - 1 : mark - 1].sum(1)
            records.append(loss_record(CUMULATIVE_LOSS, cumulated, measured, Coordinates(first_tokens=mark)))
            records.append(loss_record("positions/loss", between, measured, Coordinates(position=(before, mark - 1))))
            before = mark
        return records


def bigrams(tokens: np.ndarray) -> np.ndarray:
    """Encode each token with the one before it as one number: (n,) → (n − 1,) int64."""
    wide = tokens.astype(np.int64)
    return wide[:-1] << 32 | wide[1:]


def frequent_bigrams(documents: Iterable[np.ndarray], most: int) -> np.ndarray:
    """Return the bigrams that stand more than `most` times in all documents together, sorted."""
    numbers, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for parts in grouped(map(bigrams, documents), len, _BIGRAMS):
        new_numbers, new_counts = np.unique(np.concatenate(parts), return_counts=True)
        numbers, indices = np.unique(np.concatenate([numbers, new_numbers]), return_inverse=True)
        counts = np.bincount(indices, weights=np.concatenate([counts, new_counts])).astype(np.int64)
    return numbers[counts > most]


class Repeats(Measurement):
    """AR-hit (Table 6): the loss on tokens that complete an earlier bigram of their context, and on others."""

    needs = "text"

    length: Count | None = Field(default=None, description="tokens of a context; as in training unless given")
    documents: Several = Field(default=200, description="documents, at most")
    frequent: Count = Field(default=100, description="how often a bigram may stand in the text and be left in the hits")
    longest: Count = Field(default=16384, description="tokens of a document, at most")

    def check(self, batches: Batches | None, tokenizer: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return each context with the number of its document, and which of its tokens but the first are hits."""
        text = text_part(batches)
        documents = [document[: self.longest] for document in chosen_documents(text.documents(), 2, self.documents)]
        # The training part says which bigrams are frequent; the measured part where there is none.
        frequent = frequent_bigrams(text.documents(training=bool(text.train_tokens)), self.frequent)
        length, contexts = self.length or text.length, []
        for number, document in enumerate(documents):
            # Contexts overlap by one token, so that each but the first is predicted once.
            for start in range(0, len(document) - 1, length - 1):
                row = document[start : start + length]
                pairs = bigrams(row)
                _, first = np.unique(pairs, return_index=True)
                hits = ~np.isin(pairs, frequent)
                hits[first] = False
                contexts.append((number, row, hits))
        hit, tokens = sum(int(hits.sum()) for *_, hits in contexts), sum(len(hits) for *_, hits in contexts)
        for name, count in {"hit": hit, "other": tokens - hit}.items():
            if not count:
                raise ValueError(
                    f"None of {tokens} tokens is a {name!r} token where bigrams that occur more than {self.frequent} "
                    "times in the text are no hits: give more text, or another limit as `frequent`."
                )
        return contexts

    def run(self, measured: EvalInput) -> list[Result]:
        contexts = self.check(measured.batches, None)
        # Of each document the summed loss and the number of tokens, of hits and of others.
        hit, other = np.zeros((2, contexts[-1][0] + 1, 2))
        all_losses = token_losses(measured.model, [row for _, row, _ in contexts])
        for (number, _, hits), losses in zip(contexts, all_losses, strict=True):
            hit[number] += losses[hits].sum(), hits.sum()
            other[number] += losses[~hits].sum(), (~hits).sum()
        columns = zip(REPEAT_COLUMNS, (hit + other, hit, other), strict=True)
        records = [loss_record(name, column, measured) for name, column in columns]
        tokens, found = (record.n or 0 for record in records[:2])
        return [*records, measured.record("repeats/share", found / tokens, n=tokens)]
