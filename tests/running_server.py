"""Tiny models, and a server of this package in a thread of this process or in a process of its own."""

import copy
import functools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch

import forked
from commands import SECONDS
from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import SIZES

CONTEXT = 96
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@functools.cache
def _first_model(attention_type: str, vocabulary: int) -> Any:
    torch.manual_seed(7)
    sizes = {**SIZES, "vocab_size": vocabulary, "max_position_embeddings": CONTEXT, "initializer_range": 0.4}
    config = DiffTransformerConfig(attention_type=attention_type, eos_token_id=256, **sizes)
    return DiffTransformerForCausalLM(config).double().eval()


def new_model(attention_type: str = "diff", vocabulary: int = 257) -> Any:
    """In float64, so that no rounding chooses between tokens. The threads of servers share torch's random numbers, so
    the weights are drawn once, before there is a server.
    """
    return copy.deepcopy(_first_model(attention_type, vocabulary))


def new_served(*, chat: bool = False, attention_type: str = "diff") -> Any:
    """A `ServedModel` called "tiny"."""
    from diff_transformer.serve.completion import ServedModel

    tokenizer = byte_tokenizer()
    if chat:
        tokenizer.chat_template = TEMPLATE
    return ServedModel(new_model(attention_type), tokenizer, "tiny")


@contextmanager
def running(served: Any, api_key: str | None = None) -> Iterator[str]:
    """The address of a server of a `ServedModel`, which answers until the block ends."""
    from diff_transformer.serve.server import ModelServer
    from diff_transformer.utils.servers import bound_socket, root_url

    bound = bound_socket("127.0.0.1", 0)
    bound.listen()
    server = ModelServer(served, api_key)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield f"{root_url('127.0.0.1', bound)}/v1"
    finally:
        server.should_exit = True
        thread.join()


def _main(arguments: list[str], environment: dict[str, str]) -> None:
    from diff_transformer.cli import main

    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = ["diff-transformer", *arguments]
    main()


@contextmanager
def started(log: Path, *arguments: Any, **environment: str) -> Iterator[tuple[Any, str]]:
    """A server in a process of its own, and its address."""
    log.touch()
    settings = ["serve", "--port", "0", *map(str, arguments)]
    process = forked.start(log, _main, settings, environment)
    try:
        end = time.monotonic() + SECONDS
        while not (ready := re.search(r"^Serving (\S+) at (http://\S+/v1) \(", log.read_text(), re.MULTILINE)):
            assert process.is_alive(), log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.02)
        yield process, ready[2]
    finally:
        process.kill()
        process.join()


def client_of(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=120)
