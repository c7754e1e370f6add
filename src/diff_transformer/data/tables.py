"""Where the documents of training and of validation are in a token cache: tables that are mapped into memory."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diff_transformer.data.cache import made_once
from diff_transformer.data.packing import Packed
from diff_transformer.data.split import split
from diff_transformer.data.token_cache import TokenCache

_AT_A_TIME = 1 << 20  # tokens whose sizes are added up together
_VERSION = 1
_PARTS = ("training", "validation")
_SOURCE = "source.sha256"


class Parts(NamedTuple):
    """A corpus divided.

    Attributes:
        training, validation: the documents of each part.
        source: a hash of all documents' digests.
    """

    training: Packed
    validation: Packed
    source: str


def divided(cache: TokenCache, validation_fraction: float, sizes: np.ndarray) -> Parts:
    """The training and the validation part of a corpus, see :func:`diff_transformer.data.split.split`.

    The tables are made once, by one process, beside the cache's folder. All others map them: a process holds the pages
    of them that it reads, which it shares with the machine's other processes.

    Args:
        cache: the tokenised corpus.
        validation_fraction: of the bytes.
        sizes: (vocabulary,) bytes of text that each token stands for.

    Raises:
        ValueError: as `split`.
    """
    vocabulary = hashlib.sha256(sizes.tobytes()).hexdigest()
    key = json.dumps([_VERSION, cache.folder.name, validation_fraction, vocabulary])
    folder = cache.folder.parents[1] / "tables" / hashlib.sha256(key.encode()).hexdigest()[:32]

    made_once(folder, lambda unfinished: _write(unfinished, cache, validation_fraction, sizes))
    return _mapped(folder, cache.tokens)


def _mapped(folder: Path, tokens: np.ndarray) -> Parts:
    training, validation = (
        Packed(tokens, *(np.load(file, mmap_mode="r") for file in _files(folder, part))) for part in _PARTS
    )
    return Parts(training, validation, (folder / _SOURCE).read_text(encoding="ascii"))


def _files(folder: Path, part: str) -> Iterator[Path]:
    """Of the fields of `Packed` after its tokens."""
    yield from (folder / f"{part}-{name}.npy" for name in ("begins", "ends"))


def _write(folder: Path, cache: TokenCache, validation_fraction: float, sizes: np.ndarray) -> None:
    documents = cache.documents
    parts = _parts(cache.tokens, documents, validation_fraction, sizes)
    for part, packed in zip(_PARTS, parts, strict=True):
        for file, table in zip(_files(folder, part), (packed.begins, packed.ends), strict=True):
            np.save(file, table)
    (folder / _SOURCE).write_text(hashlib.sha256(documents["digest"].tobytes()).hexdigest(), encoding="ascii")


def _parts(
    tokens: np.ndarray, documents: np.ndarray, validation_fraction: float, sizes: np.ndarray
) -> tuple[Packed, Packed]:
    """The training and the validation part."""
    ends = documents["end"]
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins
    validation, cut = split(documents, validation_fraction)
    if cut is None:
        kept = [(begins[chosen], lengths[chosen]) for chosen in (~validation, validation)]
        train, held_out = (Packed.of(tokens, *part) for part in kept)
        return train, held_out
    # The end of the longest document is the validation part: from the first token that begins at the cut or after it.
    longest = int(np.argmax(documents["bytes"]))
    room = int(documents["bytes"][longest]) - cut
    before = _tokens_before_end(tokens[begins[longest] : ends[longest]], room, sizes)
    rest = np.array([begins[longest] + before]), np.array([lengths[longest] - before])
    lengths[longest] = before
    return Packed.of(tokens, begins, lengths), Packed.of(tokens, *rest)


def _tokens_before_end(tokens: np.ndarray, room: int, sizes: np.ndarray) -> int:
    """How many tokens there are before the last `room` bytes of a text.

    Read from its end, a part at a time: the text may be larger than memory, and what is kept of it is small.
    """
    for end in range(len(tokens), 0, -_AT_A_TIME):
        start = max(0, end - _AT_A_TIME)
        part = np.cumsum(sizes[tokens[start:end]][::-1])  # bytes from each token to the end, the last one first
        if part[-1] > room:
            return end - int(np.searchsorted(part, room, side="right"))
        room -= int(part[-1])
    return 0
