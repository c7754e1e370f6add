"""Tokenises a corpus once, into files that are mapped into memory."""

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from diff_lab.data.batches import grouped
from diff_lab.data.corpus import DOCUMENT, Corpus, document_row
from diff_lab.data.prepared_cache import build_cached, cache_key
from diff_lab.data.tokenizers import encode_documents, plain_text_tokenizer
from diff_lab.files import cache_folder

# A document in the cache: the end of its tokens, with the end of text, and what `split` needs.
RECORD = np.dtype([("end", "<i8"), *DOCUMENT.descr])
_TOKENS, _DOCUMENTS = "tokens.bin", "documents.bin"
_CACHE_VERSION = 2
_BATCH_CHARACTERS = 1 << 22  # of documents that are encoded and written together

# (documents, tokens) so far.
Tell = Callable[[int, int], None]


class TokenCache(NamedTuple):
    """A tokenised corpus, mapped from the files of a folder."""

    tokens: np.ndarray  # (tokens,) uint16 or uint32: all documents, each followed by the end of text
    documents: np.ndarray  # (documents,) with the fields of `RECORD`; an empty document has no tokens
    folder: Path


def prepare(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, folder: Path | None = None, tell: Tell | None = None
) -> TokenCache:
    """Tokenise the corpus into a cache in `folder` (`cache_folder()` unless given), or find it there.

    A cache is found by the content of the corpus and the tokenizer. One process prepares while others wait for it. An
    interruption, be it `kill -9`, loses the last few documents alone: the next call resumes. `tell` gets the progress.

    Raises ValueError if the corpus cannot be read, holds no text or changes meanwhile, or the tokenizer is refused.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"The tokenizer is a {type(tokenizer).__name__}, without the tokenizer.json that text needs.")
    if tokenizer.eos_token_id is None:
        raise ValueError("The tokenizer has no end-of-text token (eos_token), which has to stand between documents.")
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    fingerprint = corpus.fingerprint()
    key = cache_key(_CACHE_VERSION, fingerprint, plain_text_tokenizer(tokenizer).to_str(), tokenizer.eos_token_id)
    target = (folder or cache_folder()) / "tokens" / key

    def make(unfinished: Path) -> None:
        _tokenise(corpus, tokenizer, dtype, unfinished, tell)
        if corpus.fingerprint(anew=True) != fingerprint:
            (unfinished / _DOCUMENTS).unlink()  # or the next call would go on from it
            raise ValueError(f"{corpus.name} was changed while it was tokenised: leave it alone, and begin again.")

    build_cached(target, make)
    tokens = np.memmap(target / _TOKENS, dtype=dtype, mode="r")
    return TokenCache(tokens, np.memmap(target / _DOCUMENTS, dtype=RECORD, mode="r"), target)


def _tokenise(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype, folder: Path, tell: Tell | None
) -> None:
    end_of_text = np.array([tokenizer.eos_token_id], dtype=dtype).tobytes()
    with (folder / _TOKENS).open("ab") as tokens, (folder / _DOCUMENTS).open("ab") as documents:
        count, total = _cut_back(tokens, documents, dtype)
        for batch in grouped(corpus.documents(count), len, _BATCH_CHARACTERS):
            records = []
            for text, ids in zip(batch, encode_documents(tokenizer, batch), strict=True):
                if len(ids):
                    tokens.writelines((ids.astype(dtype).tobytes(), end_of_text))
                    total += len(ids) + 1
                records.append((total, *document_row(text)))
            # The tokens first: a document that is listed has them.
            tokens.flush()
            documents.write(np.array(records, dtype=RECORD).tobytes())
            documents.flush()
            count += len(batch)
            if tell is not None:
                tell(count, total)
    if not total:
        raise ValueError(f"The corpus is empty: {corpus.name} holds no text.")


def _cut_back(tokens: BinaryIO, documents: BinaryIO, dtype: np.dtype) -> tuple[int, int]:
    """Cut an interrupted cache back to its complete documents; return how many there are, and their tokens."""
    ends = np.fromfile(documents.name, dtype=RECORD)["end"]  # a torn record at the end is not read
    ends = ends[ends * dtype.itemsize <= tokens.seek(0, 2)]
    total = int(ends.max(initial=0))
    documents.truncate(len(ends) * RECORD.itemsize)
    tokens.truncate(total * dtype.itemsize)
    return len(ends), total
