"""Text in several processes: the same tokens in the same order, little in hand, and nothing left running."""

import subprocess
import sys

import numpy as np
import pytest

from diff_lab import text_workers
from diff_lab.data import byte_tokenizer, encode_documents
from diff_lab.data.tokenizers import plain_text_tokenizer
from diff_lab.text_workers import encode_in_processes

TOKENIZER = byte_tokenizer()
DTYPE = np.dtype(np.uint16)


def test_tokens_come_in_order_and_few_batches_are_in_hand() -> None:
    numbers = []

    def batches():  # a generator
        for number in range(12):
            numbers.append(number)
            yield number, [f"{number} é" * (12 - number), "", "<|endoftext|>"]

    done = []
    for number, tokens in encode_in_processes(plain_text_tokenizer(TOKENIZER), batches(), 2, DTYPE):
        done.append(number)
        assert len(numbers) - len(done) < 2 * text_workers._WAITING
        texts = [f"{number} é" * (12 - number), "", "<|endoftext|>"]
        assert [each.tolist() for each in tokens] == encode_documents(TOKENIZER, texts)
        assert {each.dtype for each in tokens} == {DTYPE}
    assert done == list(range(12))


def test_a_process_that_ends_is_told() -> None:
    class Broken:
        """Ends a process before it begins."""

        def to_str(self) -> str:
            return "no tokenizer"

    with pytest.raises(OSError, match="One of 1 processes"):
        list(encode_in_processes(Broken(), iter([(0, ["text"])]), 1, DTYPE))  # type: ignore[arg-type]


def test_a_worker_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, diff_lab.text_workers; print({'torch', 'transformers'} & sys.modules.keys())"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"
