"""Commands in processes of their own, and what tests ask of their results."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked

SECONDS = 300  # a machine may be busy with other tests
RETRIEVAL = """
name: mine
model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, head_dim: 8}
data: {kind: retrieval, length: 32, num_pairs: 2, batch_size: 2, validation_sequences: 4}
"""  # a recipe without what it says of training


def interrupt(
    folder: Path, arguments: list[str], has_begun: Callable[[], bool], batch_characters: int | None = None
) -> str:
    """Run a command, press Ctrl-C once it has begun, and return its stderr. It has to end as a program should.

    `batch_characters` are how many a process that tokenises gets at once.
    """
    out, err = folder / "stdout.log", folder / "stderr.log"
    process = forked.start(err, main, arguments, batch_characters, out=out)
    try:
        end = time.monotonic() + SECONDS
        while not has_begun():
            assert process.is_alive(), err.read_text()
            assert time.monotonic() < end, err.read_text()
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(SECONDS)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 130
    assert out.read_text() == ""
    message = err.read_text()
    assert "Traceback" not in message
    assert "\x1b" not in message
    return message


def main(arguments: list[str], batch_characters: int | None = None) -> None:
    """Run a command in this process, which it ends."""
    import torch

    from diff_lab import cli as lab
    from diff_lab.data import token_cache
    from diff_transformer import cli
    from diff_transformer.cli.app import COMMANDS

    torch.set_num_threads(1)
    if batch_characters is not None:
        token_cache._BATCH_CHARACTERS = batch_characters
    program, main = ("diff-transformer", cli.main) if arguments[0] in COMMANDS else ("diff-lab", lab.main)
    sys.argv = [program, *arguments]
    main()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What the kernel says of a larger one is what it says of a full disk, with another number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails(result: Any, *parts: str) -> None:
    """A command ended with exit code 2, nothing on stdout, and one line on stderr that holds all `parts`: the last, if
    the command has said what it was doing ("Loading …").
    """
    assert result.exit_code == 2
    assert result.stdout == ""
    *before, error = result.stderr.splitlines()
    assert all(line.endswith(" …") for line in before)
    assert error.startswith("error: ")
    for part in parts:
        assert part in error


def succeeds(result: Any, *parts: str) -> Any:
    """A command ended with exit code 0, and stdout holds all `parts`; its result."""
    assert result.exit_code == 0, result.stderr
    for part in parts:
        assert part in result.stdout
    return result
