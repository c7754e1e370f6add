"""Tiny models with peaked attention, in float64, and a text that they read."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import SIZES, sharpen, sizes_for

WORDS = tuple(f"w{number}" for number in range(SIZES["vocab_size"]))
TEXT = "w3 w7 w1 w12 w7 w9 w3 w7 w20 w11 w3"
TOKENS = [int(word[1:]) for word in TEXT.split()]
ANSWER = {"query": 10, "begin": 1, "end": 2}


def sharpened(model: Any) -> Any:
    """The model with weights that make attention uneven, in float64."""
    torch.manual_seed(42)  # λ of DIFF is above 0
    model = model.double().eval()
    sharpen(model)
    return model


def make(kind: str = "diff", **config: Any) -> DiffTransformerForCausalLM:
    sizes = sizes_for(kind, **{**SIZES, **config})
    return sharpened(DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes)))


@contextmanager
def serving(explorer: Any, host: str = "127.0.0.1") -> Iterator[Any]:
    """The server of an explorer, or of several by their names, which answers until the block ends."""
    from diff_transformer.explorer.server import ExplorerServer
    from diff_transformer.utils.servers import bound_socket

    explorers = explorer if isinstance(explorer, dict) else {"": explorer}
    server = ExplorerServer(explorers, bound_socket(host, 0), host)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
