"""Processes that are forked off one that has loaded everything, so that each costs its work alone and no imports."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PRELOADED = [
    "accelerate",
    "datasets",
    "diff_transformer.cli.app",
    "diff_transformer.cli.terminal_progress",
    "diff_transformer.lab.measure",
    "diff_transformer.train",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.tensorboard",
]


def start(log: Path, work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Start WORK(*ARGUMENTS), a function of a module under tests/, in a process with both streams in `log`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_logged, args=(str(log), work, arguments))
    process.start()
    return process


def _logged(log: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)
    work(*arguments)
