"""Tokenises a corpus once, into files that are mapped into memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import grouped
from diff_lab.data.corpus import Corpus
from diff_lab.data.prepared_cache import build_cached, cache_key
from diff_lab.data.split import DOCUMENT, document_row
from diff_lab.data.tokenizers import encode_documents, plain_text_tokenizer
from diff_transformer.utils.files import cache_folder

# A document in the cache: where its tokens end, with the end of text, and what `split` needs. Earlier versions wrote a
# record for each piece of a long document, of which the last one alone `ends` it.
RECORD = np.dtype([("end", "<i8"), ("ends", "?"), *DOCUMENT.descr])
_TOKENS, _DOCUMENTS, _SETTINGS = "tokens.bin", "pieces.bin", "cache.json"
_CACHE_VERSION = 1
_BATCH_CHARACTERS = 1 << 22  # of documents that are encoded and written together

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
        records = np.fromfile(self.folder / _DOCUMENTS, dtype=RECORD)
        return records[records["ends"]]


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
    end_of_text = np.array([tokenizer.eos_token_id], dtype=dtype).tobytes()
    with (folder / _TOKENS).open("ab") as tokens, (folder / _DOCUMENTS).open("ab") as documents:
        count, total = _cut_back(folder, tokens, documents, dtype)
        for batch in grouped(corpus.documents(count), len, _BATCH_CHARACTERS):
            records = []
            for text, ids in zip(batch, encode_documents(tokenizer, batch), strict=True):
                if len(ids):
                    tokens.writelines((ids.astype(dtype).tobytes(), end_of_text))
                    total += len(ids) + 1
                records.append((total, True, *document_row(text)))
            # The tokens first: a document that is listed has them.
            tokens.flush()
            documents.write(np.array(records, dtype=RECORD).tobytes())
            documents.flush()
            count += len(batch)
            if tell is not None:
                tell(count, total)
    if not total:
        raise ValueError(f"The corpus is empty: {corpus.name} holds no text.")
    (folder / _SETTINGS).write_text(json.dumps({"dtype": dtype.name, "corpus": corpus.name}), encoding="utf-8")


def _cut_back(folder: Path, tokens: BinaryIO, documents: BinaryIO, dtype: np.dtype) -> tuple[int, int]:
    """Cut an interrupted cache back to its complete documents; return how many there are, and their tokens."""
    records = np.fromfile(folder / _DOCUMENTS, dtype=RECORD)  # a torn record at the end is not read
    written = records["end"] * dtype.itemsize <= (folder / _TOKENS).stat().st_size
    records = records[: int(np.flatnonzero(records["ends"] & written).max(initial=-1)) + 1]
    total = int(records["end"].max(initial=0))
    documents.truncate(len(records) * RECORD.itemsize)
    tokens.truncate(total * dtype.itemsize)
    return int(records["ends"].sum()), total
