"""Divides the documents of a corpus into those to train on and those to validate with, by their content alone."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np

from diff_lab.data.corpus import Corpus, Piece

SPLIT_VERSION = 2  # of the rule below, in the names of what is made by it

# What is known of each document: bytes of UTF-8, and the first 64 bits of the SHA-256 of its text.
DOCUMENT = np.dtype([("bytes", "<i8"), ("digest", "<u8")])

# A piece, and the fields of `DOCUMENT` where its document ends; else None.
DigestedPiece = tuple[Piece, tuple[int, int] | None]


def with_digests(pieces: Iterable[Piece]) -> Iterator[DigestedPiece]:
    """Yield the pieces, with the digests of their documents."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        encoded = piece.text.encode()
        digest.update(encoded)
        size += len(encoded)
        if not piece.ends:
            yield piece, None
            continue
        yield piece, (size, int.from_bytes(digest.digest()[:8], "little"))
        digest, size = hashlib.sha256(), 0


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
    rows = [document for _, document in with_digests(corpus.pieces()) if document is not None]
    training = split(np.array(rows, dtype=DOCUMENT), validation_fraction)
    number = before = 0
    for piece in corpus.pieces():
        encoded = piece.text.encode()
        # Of a character that is cut, neither side has anything.
        boundary = min(len(encoded), max(0, int(training[number]) - before))
        part = encoded[boundary:] if validation else encoded[:boundary]
        if part:
            yield part.decode(errors="ignore")
        before += len(encoded)
        if piece.ends:
            number, before = number + 1, 0


# The text to train on and the text to validate with, in pieces; the corpus is read twice. See `split`.
training_text = partial(_part, validation=False)
validation_text = partial(_part, validation=True)
