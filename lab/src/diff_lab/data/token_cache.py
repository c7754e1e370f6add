"""Tokenises a corpus once, into files that are mapped into memory."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import grouped
from diff_lab.data.corpus import Corpus
from diff_lab.data.prepared_cache import build_cached, cache_key
from diff_lab.data.split import DOCUMENT, with_digests
from diff_lab.data.tokenizers import encode_documents, plain_text_tokenizer
from diff_transformer.utils.files import cache_folder

# A piece of a document in the cache: where its tokens end (a last piece's with the end of text), whether the document
# ends with it, and, where it does, what `split` needs.
RECORD = np.dtype([("end", "<i8"), ("ends", "?"), *DOCUMENT.descr])
_TOKENS, _PIECES, _SETTINGS = "tokens.bin", "pieces.bin", "cache.json"
_CACHE_VERSION = 1
_BATCH_CHARACTERS = 1 << 22  # encoded together: many pieces for the threads, and bounded memory

# (documents, tokens) so far.
Tell = Callable[[int, int], None]


class TokenCache(NamedTuple):
    """A tokenised corpus, whose files lie in a folder.

    `tokens` are (tokens,) uint16 or uint32, mapped from the file: all documents, each followed by the end of text.
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
) -> TokenCache:
    """Tokenise the corpus into a cache in `folder` (`cache_folder()` unless given), or find it there.

    A cache is found by the content of the corpus and the tokenizer. One process prepares while others wait for it; the
    tokenizer's own threads use all cores (RAYON_NUM_THREADS limits them). An interruption, be it `kill -9`, loses the
    last few documents alone: the next call resumes. `tell` is called with the progress.

    Raises:
        ValueError: the corpus cannot be read or holds no text; the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-text token (eos_token), which has to stand between documents.")
    encoder = plain_text_tokenizer(tokenizer).to_str()
    key = cache_key(_CACHE_VERSION, corpus.fingerprint(), encoder, tokenizer.eos_token_id)
    target = (folder or cache_folder()) / "tokens" / key
    build_cached(target, lambda unfinished: _tokenise(corpus, tokenizer, unfinished, tell))
    settings = json.loads((target / _SETTINGS).read_text(encoding="utf-8"))
    tokens: np.ndarray = np.memmap(target / _TOKENS, dtype=settings["dtype"], mode="r")
    return TokenCache(tokens, target, corpus.name)


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the dtype of a token in a vocabulary of so many."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def _tokenise(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path, tell: Tell | None) -> None:
    dtype = token_dtype(len(tokenizer))
    with (folder / _TOKENS).open("ab") as tokens, (folder / _PIECES).open("ab") as pieces:
        done = _cut_back(folder, tokens, pieces, dtype)
        documents = int(done["ends"].sum())
        for records, ids in _encoded(corpus, tokenizer, done, dtype):
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
    """Cut an interrupted cache back to its complete pieces, and return their records."""
    records = np.fromfile(folder / _PIECES, dtype=RECORD)  # a torn record at the end is not read
    records = records[records["end"] * dtype.itemsize <= (folder / _TOKENS).stat().st_size]
    pieces.truncate(len(records) * RECORD.itemsize)
    tokens.truncate((int(records["end"][-1]) if len(records) else 0) * dtype.itemsize)
    return records


def _encoded(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, done: np.ndarray, dtype: np.dtype
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield records and tokens of the pieces after those that are done, a batch at a time."""
    ends = np.append(0, done["end"])
    complete = int(np.flatnonzero(done["ends"]).max(initial=-1)) + 1  # pieces, those of documents that have ended
    total, begin = int(ends[-1]), int(ends[complete])  # tokens, and those before the document that is being read
    pieces = with_digests(corpus.pieces(int(done["ends"].sum())))
    for _ in itertools.islice(pieces, len(done) - complete):
        pass  # tokenised already, and needed for its document's digest
    end_of_text = np.array([tokenizer.eos_token_id], dtype=dtype)
    for batch in grouped(pieces, lambda piece: len(piece[0].text), _BATCH_CHARACTERS):
        ids_of_batch = encode_documents(tokenizer, [piece.text for piece, _ in batch])
        records: list[tuple[Any, ...]] = []
        parts: list[np.ndarray] = []
        for (piece, document), ids in zip(batch, ids_of_batch, strict=True):
            total += len(ids)
            parts.append(np.asarray(ids, dtype=dtype))
            if piece.ends and total > begin:  # not of an empty document
                total += 1
                parts.append(end_of_text)
            records.append((total, piece.ends, *(document or (0, 0))))
            begin = total if piece.ends else begin
        yield np.array(records, dtype=RECORD), np.concatenate(parts)
