"""Tokenises a corpus once, into files that are mapped into memory, and divides it into training and validation."""

import hashlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.corpus import Corpus, Piece
from diff_transformer.data.packing import Packed
from diff_transformer.data.prepared_cache import cache_folder, made_once
from diff_transformer.data.split import DOCUMENT, Digest, split
from diff_transformer.data.tokenizers import encode_documents, plain_text_tokenizer
from diff_transformer.text_workers import encode_in_processes

# A piece of a document in the cache: where its tokens end (a last piece's with the end of text), whether the document
# ends with it, and, where it does, what `split` needs.
RECORD = np.dtype([("end", "<i8"), ("ends", "?"), *((name, DOCUMENT[name]) for name in DOCUMENT.names or ())])
_TOKENS, _PIECES, _SETTINGS = "tokens.bin", "pieces.bin", "cache.json"
_CACHE_VERSION = _TABLES_VERSION = 1
_BATCH_CHARACTERS = 1 << 22  # encoded together: many pieces for the threads, and bounded memory
_BATCH_TOKENS = 1 << 20  # whose sizes are added up together
_PARTS = ("training", "validation")
_SOURCE = "source.sha256"

# (documents, tokens) so far.
Tell = Callable[[int, int], None]


class TokenCache(NamedTuple):
    """A tokenised corpus.

    Attributes:
        tokens: (tokens,) uint16 or uint32, mapped from the file: all documents, each followed by the end of text.
        folder: where its files are.
        name: of the corpus, for messages.
    """

    tokens: np.ndarray
    folder: Path
    name: str

    @property
    def documents(self) -> np.ndarray:
        """(documents,) with the fields of `RECORD`, read from the file; an empty document has no tokens."""
        pieces = np.fromfile(self.folder / _PIECES, dtype=RECORD)
        return pieces[pieces["ends"]]


def prepare(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path | None = None,
    tell: Tell | None = None,
    workers: int | None = None,
) -> TokenCache:
    """The corpus in tokens: from the cache, or tokenised into it.

    A cache is found by the content of the corpus and the tokenizer. One process prepares while others wait for it. An
    interruption, be it `kill -9`, loses the last few documents alone: the next call goes on from there.

    Args:
        corpus: the text.
        tokenizer: with an end-of-text token.
        folder: of all caches; `cache_folder()` unless given.
        tell: is told about progress.
        workers: processes that tokenise, beside this one, which reads; none unless given: the tokens are the same.

    Raises:
        ValueError: the corpus cannot be read or holds no text; the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-text token (eos_token), which has to stand between documents.")
    target = (folder or cache_folder()) / "tokens" / _key(corpus, tokenizer)
    made_once(target, lambda unfinished: _tokenise(corpus, tokenizer, unfinished, tell, workers))
    return _open(target, corpus.name)


def token_dtype(vocabulary: int) -> np.dtype:
    """What a token of a vocabulary of so many is kept in."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def _key(corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> str:
    parts = (_CACHE_VERSION, corpus.fingerprint(), tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(folder: Path, name: str) -> TokenCache:
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    tokens: np.ndarray = np.memmap(folder / _TOKENS, dtype=settings["dtype"], mode="r")
    return TokenCache(tokens, folder, name)


def _tokenise(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path, tell: Tell | None, workers: int | None
) -> None:
    dtype = token_dtype(len(tokenizer))
    with ExitStack() as stack:
        tokens = stack.enter_context((folder / _TOKENS).open("ab"))
        pieces = stack.enter_context((folder / _PIECES).open("ab"))
        done = _cut_back(folder, tokens, pieces, dtype)
        documents = int(done["ends"].sum())
        # Closed at an interruption, too: with it the workers end.
        encoded = stack.enter_context(closing(_encoded(corpus, tokenizer, done, dtype, workers)))
        for records, ids in encoded:
            # The tokens first: a piece that is listed has them.
            tokens.write(ids.tobytes())
            tokens.flush()
            pieces.write(records.tobytes())
            pieces.flush()
            documents += int(records["ends"].sum())
            if tell is not None:
                tell(documents, int(records["end"][-1]))
        total = tokens.tell() // dtype.itemsize
    if not total:
        raise ValueError(f"The corpus is empty: {corpus.name} holds no text.")
    (folder / _SETTINGS).write_text(json.dumps({"dtype": dtype.name, "corpus": corpus.name}), encoding="utf-8")


def _cut_back(folder: Path, tokens: BinaryIO, pieces: BinaryIO, dtype: np.dtype) -> np.ndarray:
    """Cut what an interruption left back to the pieces that are all there, and return their records."""
    records = np.fromfile(folder / _PIECES, dtype=RECORD)  # a torn record at the end is not read
    records = records[records["end"] * dtype.itemsize <= (folder / _TOKENS).stat().st_size]
    pieces.truncate(len(records) * RECORD.itemsize)
    tokens.truncate((int(records["end"][-1]) if len(records) else 0) * dtype.itemsize)
    return records


def _encoded(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, done: np.ndarray, dtype: np.dtype, workers: int | None
) -> Generator[tuple[np.ndarray, np.ndarray], None, None]:
    """Records and tokens of the pieces after those that are done, a batch at a time."""
    ended = np.flatnonzero(done["ends"])
    total = int(done["end"][-1]) if len(done) else 0
    begin = int(done["end"][ended[-1]]) if len(ended) else 0  # of the document that is being read
    digest = Digest()
    pieces = corpus.pieces(len(ended))
    for piece in itertools.islice(pieces, len(done) - 1 - (ended[-1] if len(ended) else -1)):
        digest.update(piece.text)  # tokenised already, and needed for its document's digest
    end_of_text = np.array([tokenizer.eos_token_id], dtype=dtype)
    texts = ((batch, [piece.text for piece in batch]) for batch in _batches(pieces))
    encoded: Iterator[tuple[list[Piece], Sequence[Any]]]
    if workers is None:
        encoded = ((batch, encode_documents(tokenizer, each)) for batch, each in texts)
    else:
        encoded = encode_in_processes(plain_text_tokenizer(tokenizer), texts, workers, dtype)
    for batch, ids_of_batch in encoded:
        records: list[tuple[Any, ...]] = []
        parts: list[np.ndarray] = []
        for piece, ids in zip(batch, ids_of_batch, strict=True):
            digest.update(piece.text)
            total += len(ids)
            parts.append(np.asarray(ids, dtype=dtype))
            if piece.ends and total > begin:  # not of an empty document
                total += 1
                parts.append(end_of_text)
            if piece.ends:
                records.append((total, True, *digest.record()))
                digest, begin = Digest(), total
            else:
                records.append((total, False, 0, 0))
        yield np.array(records, dtype=RECORD), np.concatenate(parts)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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
    key = json.dumps([_TABLES_VERSION, cache.folder.name, validation_fraction, vocabulary])
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
        train, held_out = (Packed.of(tokens, begins[part], lengths[part]) for part in (~validation, validation))
        return train, held_out
    # The end of the longest document is the validation part: from the first token that begins at the cut or after it.
    longest = int(np.argmax(documents["bytes"]))
    held_out_bytes = int(documents["bytes"][longest]) - cut
    before = _tokens_before_end(tokens[begins[longest] : ends[longest]], held_out_bytes, sizes)
    rest = np.array([begins[longest] + before]), np.array([lengths[longest] - before])
    lengths[longest] = before
    return Packed.of(tokens, begins, lengths), Packed.of(tokens, *rest)


def _tokens_before_end(tokens: np.ndarray, size: int, sizes: np.ndarray) -> int:
    """How many tokens there are before the last `size` bytes of a text.

    Read from its end, a part at a time: the text may be larger than memory, and what is held out of it is small.
    """
    for end in range(len(tokens), 0, -_BATCH_TOKENS):
        start = max(0, end - _BATCH_TOKENS)
        part = np.cumsum(sizes[tokens[start:end]][::-1])  # bytes from each token to the end, the last one first
        if part[-1] > size:
            return end - int(np.searchsorted(part, size, side="right"))
        size -= int(part[-1])
    return 0
