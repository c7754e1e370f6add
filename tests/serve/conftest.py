"""Servers of a tiny model."""

from collections.abc import Callable, Iterator

import openai
import pytest
import torch
import transformers

from diff_lab.data import byte_tokenizer
from running_server import client_of, new_model, new_served, running

transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def alone() -> Callable[..., str]:
    """(prompt, new tokens) → the text that `generate` writes, one token after another the most likely."""
    model, tokenizer = new_model(), byte_tokenizer()

    def generated(prompt: str, new: int) -> str:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        return str(tokenizer.decode(out, skip_special_tokens=True))

    return generated


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(new_served(chat=True)) as address:
        yield address


@pytest.fixture(scope="module")
def sequential_url() -> Iterator[str]:
    with running(new_served()) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with client_of(url) as opened:
        yield opened


@pytest.fixture
def sequential(sequential_url: str) -> Iterator[openai.OpenAI]:
    with client_of(sequential_url) as opened:
        yield opened
