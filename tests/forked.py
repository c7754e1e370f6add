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
    "diff_lab.cli.app",
    "diff_transformer.cli.app",
    "diff_lab.experiments.runner",
    "diff_lab.measure",
    "diff_lab.train.progress",
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "tensorboard.summary.writer.record_writer",
    "frozen_heap",
]


def start(log: Path, work: Callable[..., None], *arguments: Any, out: Path | None = None) -> BaseProcess:
    """Start WORK(*ARGUMENTS), a function of a module under tests/, in a process with both streams in `log`.

    With `out`, stdout goes there instead.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_logged, args=([str(out or log), str(log)], work, arguments))
    process.start()
    return process


def _logged(streams: list[str], work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for descriptor, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), descriptor)
    work(*arguments)
