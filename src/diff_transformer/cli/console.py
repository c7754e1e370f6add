"""Where output goes: results to stdout, everything else to stderr."""

import os
import sys

from rich.console import Console


def output() -> Console:
    """Stdout. Where it is no terminal, lines may be as long as they are: a file has no edge to wrap at."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def messages(*, quiet: bool = False) -> Console:
    """Stderr; or nowhere, for a process that leaves the talking to another."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def quiet_libraries() -> None:
    """No progress bars but ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # datasets, which few commands need and import, reads this when it is imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
