"""Output of the commands: results go to stdout, everything else to stderr; and values of options."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console


def parse_options(given: list[str]) -> dict[str, Any]:
    """Options as a mapping of names to values, which are YAML: a number, a word or a list.

    Raises:
        ValueError: one that is not NAME=VALUE, or a name given twice.
    """
    import yaml

    from diff_transformer.train.recipe import read_yaml

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{text!r} is not a setting; write NAME=VALUE.")
        if name in options:
            raise ValueError(f"The option {name!r} is given twice.")
        try:
            options[name] = read_yaml(value)
        except yaml.YAMLError:
            raise ValueError(f"The value of {text!r} is not valid YAML.") from None
    return options


def output() -> Console:
    """The console on stdout. Lines are not wrapped where stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_line(text: str) -> None:
    """Print a line to stdout as it is: nothing in it is markup, and a long line is not broken."""
    output().print(text, markup=False, soft_wrap=True)


def messages(*, quiet: bool = False) -> Console:
    """The console on stderr. A quiet one prints nothing, for all but the first of several processes."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers and datasets."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    # datasets, which few commands import, reads this variable when it is imported.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()


def refuse_existing(paths: Iterable[Path], what: str, *, overwrite: bool) -> None:
    """Raise FileExistsError for the first path that exists, unless --overwrite was given."""
    for path in paths:
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{str(path)!r} is there already; choose another --output, or replace the {what} with --overwrite."
            )


def refuse_repeated(settings: Iterable[str]) -> None:
    """Raise ValueError where one key is given twice as KEY=VALUE."""
    given: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        if key in given:
            raise ValueError(f"{key!r} is set twice, by {given[key]!r} and by {setting!r}; give it once.")
        given[key] = setting
