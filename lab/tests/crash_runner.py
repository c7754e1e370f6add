"""A run of the command line in a process of its own that ends when a test says so: for tests of what a kill leaves."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")


@dataclass(frozen=True)
class Plan:
    """What happens to a run.

    Attributes:
        signals: a signal that the process sends itself before it changes files for the n-th time, by n from 0.
        delay: how many seconds later it comes.
        largest_file: bytes after which no file grows; None for no limit.
        kills: whether the kernel ends the process there and then, in the middle of a write; else the write fails.
        ignored: a signal that the process ignores from the beginning, as nohup has it.
        same_wish: within how many seconds a second signal is the same wish as the first.
        trace: a file for a line about each change of files, in their order.
    """

    signals: Mapping[int, int] = field(default_factory=dict)
    delay: float = 0.0
    largest_file: int | None = None
    kills: bool = False
    ignored: int | None = None
    trace: Path | None = None
    same_wish: float = 3.0


def start(arguments: list[str], log: Path, plan: Plan) -> BaseProcess:
    """Start `diff-lab train ARGUMENTS` with both streams in `log`."""
    return forked.start(log, _run, arguments, plan)


def _run(arguments: list[str], plan: Plan) -> None:
    import torch

    from diff_lab.cli import main
    from diff_lab.train import loop

    torch.set_num_threads(1)
    if plan.ignored is not None:
        signal.signal(plan.ignored, signal.SIG_IGN)
    loop.SAME_WISH_SECONDS = plan.same_wish
    sys.addaudithook(_Counter(plan, arguments[arguments.index("--output") + 1]))
    if plan.largest_file is not None:
        if plan.kills:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (plan.largest_file, resource.RLIM_INFINITY))
    sys.argv = ["diff-lab", "train", *arguments]
    main()


class _Counter:
    """Python announces changes of files to an audit hook before it makes them.

    TensorBoard's do not count: a thread makes them when it likes.
    """

    def __init__(self, plan: Plan, folder: str) -> None:
        self.signals, self.delay, self.folder, self.count = plan.signals, plan.delay, folder, 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self.trace = None if plan.trace is None else os.open(plan.trace, flags)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES and not (event == "open" and self.is_ours(arguments[0]) and _writes(arguments)):
            return
        if self.trace is not None:
            os.write(self.trace, f"{event} {arguments[0]}\n".encode())
        number = self.signals.get(self.count)
        self.count += 1
        if number is not None and self.delay:
            threading.Timer(self.delay, os.kill, (os.getpid(), number)).start()
        elif number is not None:
            os.kill(os.getpid(), number)

    def is_ours(self, path: object) -> bool:
        return str(path).startswith(self.folder) and "/tensorboard/" not in str(path)


def _writes(arguments: tuple[Any, ...]) -> bool:
    """Whether a file is opened to be written to, by `open` or `os.open`."""
    _, mode, flags = arguments
    return bool(set("wxa+") & set(mode)) if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
