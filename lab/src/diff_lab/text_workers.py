"""Encodes text in several processes, in the order in which it comes, a bounded part of it at a time.

Each process imports this module, and with it the packages that it is in: here that takes 35 MB, and inside of `data`,
which needs torch, it would take 500.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

T = TypeVar("T")
_WAITING = 2  # batches for each process: it does one while the next is on its way

# A worker's own, from `_start` on.
_tokenizer: Tokenizer | None = None


def encode_in_processes(
    tokenizer: Tokenizer,
    batches: Iterable[tuple[T, Sequence[str]]],
    workers: int,
    dtype: np.dtype,
) -> Iterator[tuple[T, list[np.ndarray]]]:
    """The tokens of batches of text, in the batches' order, each beside the label that came with its texts.

    Special tokens in a text are plain text. An OSError says that a process was killed, as where memory is short.
    """
    # Begun anew, as the tokenizer's threads of this process would not be there in a copy of it.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(tokenizer.to_str(),))
    waiting: deque[tuple[T, Future[tuple[np.ndarray, np.ndarray]]]] = deque()
    try:
        for label, texts in batches:
            waiting.append((label, pool.submit(_encode, list(texts), dtype)))
            if len(waiting) >= _WAITING * workers:
                yield _next(waiting)
        while waiting:
            yield _next(waiting)
    except BrokenProcessPool as error:
        raise OSError(
            f"One of {workers} processes that tokenise was killed, as the system does where memory is short: take "
            "fewer workers; what is tokenised stays."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode(tokenizer: Tokenizer, documents: Sequence[str]) -> list[list[int]]:
    """The tokens of each document, which is valid text, without an end of text."""
    encoded: list[list[int]] = []
    for start in range(0, len(documents), 64):  # a few at a time: an encoding takes far more memory than its ids
        batch = tokenizer.encode_batch_fast(documents[start : start + 64], add_special_tokens=False)
        encoded.extend(encoding.ids for encoding in batch)
    return encoded


def _next(waiting: "deque[tuple[T, Future[tuple[np.ndarray, np.ndarray]]]]") -> tuple[T, list[np.ndarray]]:
    label, future = waiting.popleft()
    tokens, ends = future.result()
    return label, np.split(tokens, ends[:-1])


def _start(state: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core is enough
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends its workers
    _tokenizer = Tokenizer.from_str(state)
    _tokenizer.encode_special_tokens = True  # not a part of the state
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _encode(texts: list[str], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """All tokens one after the other, and where each text's end: two arrays are quicker to send than many."""
    assert _tokenizer is not None  # `_start`
    ids = encode(_tokenizer, texts)
    ends = np.cumsum([len(each) for each in ids])
    tokens = np.empty(int(ends[-1]), dtype=dtype)
    for each, end in zip(ids, ends, strict=True):
        tokens[end - len(each) : end] = each
    return tokens, ends
