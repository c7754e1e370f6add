"""Where output goes: results to stdout, everything else to stderr."""

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
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
