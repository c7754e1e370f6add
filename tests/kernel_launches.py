"""Which Triton kernels a call launches, and block sizes that make many blocks of a short sequence."""

import pytest

from diff_transformer.ops.triton.kernel_arguments import Blocks
from diff_transformer.ops.triton.launch import Launch


def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """A list that every launch of a kernel is added to before it runs."""
    launches: list[Launch] = []
    run = Launch.run

    def recorded(self: Launch) -> None:
        launches.append(self)
        run(self)

    monkeypatch.setattr(Launch, "run", recorded)
    return launches


def names(launches: list[Launch]) -> list[str]:
    """Of their kernels, in order."""
    return [each.kernel.fn.__name__ for each in launches]


def set_blocks(monkeypatch: pytest.MonkeyPatch, blocks: Blocks) -> None:
    """For every kernel."""
    monkeypatch.setattr("diff_transformer.ops.triton.kernel_arguments.Problem.blocks", lambda *_: blocks)
