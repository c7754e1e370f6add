"""Divides the documents of a corpus into those to train on and those to validate with, by their content alone."""

import hashlib
from collections.abc import Iterator
from functools import partial

import numpy as np

from diff_lab.data.corpus import Corpus

SPLIT_VERSION = 2  # of the rule below, in the names of what is made by it

# What is known of each document: bytes of UTF-8, and the first 64 bits of the SHA-256 of its text.
DOCUMENT = np.dtype([("bytes", "<i8"), ("digest", "<u8")])


def document_row(text: str) -> tuple[int, int]:
    """Return the fields of `DOCUMENT` for a text."""
    encoded = text.encode()
    return len(encoded), int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little")


def split(documents: np.ndarray, validation_fraction: float) -> np.ndarray:
    """Return how many bytes of each document, from its beginning, are for training: (documents,) int64.

    It depends on the documents' content alone: there is no seed, and the order does not matter. Documents are ranked by
    their digest; the first ones are for validation as long as they fit into `validation_fraction` of all bytes. If that
    is less than half of the fraction (few documents, or long ones), others follow that still fit. If it still is less
    than half, the end of the longest document for training follows. Copies of a document are treated alike. Raises
    ValueError if there is no text, or the fraction is not above 0 and at most 1.
    """
    if not 0 < validation_fraction <= 1:
        raise ValueError(f"validation_fraction must be above 0 and at most 1, got {validation_fraction}.")
    sizes = documents["bytes"]
    if not len(documents) or not sizes.any():
        raise ValueError("There is no text to divide into training and validation.")
    if validation_fraction == 1:
        return np.zeros_like(sizes)
    # Ranked, with all copies of a document as one.
    _, first, number, copies = np.unique(
        documents["digest"], return_index=True, return_inverse=True, return_counts=True
    )
    together = sizes[first] * copies
    wanted = validation_fraction * int(sizes.sum())
    held_out = np.cumsum(together) <= wanted
    held = int(together[held_out].sum())
    if held < wanted / 2:
        for later in np.flatnonzero(~held_out):
            if held + together[later] <= wanted:
                held_out[later] = True
                held += int(together[later])
    training = np.where(held_out, 0, sizes[first])
    if held < wanted / 2:
        longest = np.argmax(training)
        training[longest] -= max(1, round((wanted - held) / int(copies[longest])))
    return training[number]


def _part(corpus: Corpus, validation_fraction: float, *, validation: bool) -> Iterator[str]:
    rows = np.array([document_row(text) for text in corpus.documents()], dtype=DOCUMENT)
    for text, boundary in zip(corpus.documents(), split(rows, validation_fraction), strict=True):
        encoded = text.encode()
        # Of a character that is cut, neither side has anything.
        if part := encoded[boundary:] if validation else encoded[:boundary]:
            yield part.decode(errors="ignore")


# The text to train on and the text to validate with, document by document; the corpus is read twice. See `split`.
training_text = partial(_part, validation=False)
validation_text = partial(_part, validation=True)
