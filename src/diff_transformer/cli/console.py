"""Holds what the commands share: arguments, values of options, and output (results to stdout, all else to stderr)."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diff_transformer.shipped_models import LANGUAGE_MODEL, pretrained_names
from diff_transformer.suggestions import quoted

if TYPE_CHECKING:
    from diff_transformer.train import Recipe

LARGEST_SEED = (1 << 63) - 1  # the largest seed that torch's generators take


def optional(help_text: str, default: str, *names: str, **settings: Any) -> Any:
    """An option that is None where it is left out; `default` says what the command does then."""
    return typer.Option(*names, help=help_text, show_default=default, **settings)


def checkpoint_help(shipped: Sequence[str]) -> str:
    """What a command takes as CHECKPOINT, with the models that come with this copy of the package."""
    named = f", or a model that comes with the package: {', '.join(shipped)}" if shipped else ""
    return f"The folder of a run, or a folder with config.json and weights{named}."


def default_checkpoint(shipped: Sequence[str]) -> str:
    """What a command that writes text takes where no CHECKPOINT is named."""
    if LANGUAGE_MODEL in shipped:
        return f"{LANGUAGE_MODEL}, which comes with the package"
    return "none: no model that writes text comes with this copy of the package"


_CHECKPOINT: dict[str, Any] = {"metavar": "CHECKPOINT", "help": checkpoint_help(pretrained_names())}
Checkpoint = Annotated[Path, typer.Argument(**_CHECKPOINT)]
TextCheckpoint = Annotated[
    Path | None, typer.Argument(**_CHECKPOINT, show_default=default_checkpoint(pretrained_names()))
]
RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe such as tiny.")
]
RecipeSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, such as train.steps=100."),
]
TextPaths = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to train on: a .txt, .jsonl or .parquet file, or a folder of them; may be repeated. "
        "By default the source of Python's standard library."
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of weights, data and sampling.")]
Workers = Annotated[
    int | None,
    optional(
        "How many trainings go side by side, each in a process of its own.",
        "one for each processor core, on a GPU 1",
        min=1,
    ),
]
Device = Annotated[str | None, optional("The device to run on.", "the GPU, if any")]


def read_recipe(name: str, settings: list[str] | None) -> "Recipe":
    """The recipe that a command names, with its KEY=VALUE settings. Raises ValueError where a key is given twice."""
    from diff_transformer.train import load_recipe

    _refuse_repeated(settings or ())
    return load_recipe(name, settings or ())


def parse_options(settings: list[str]) -> dict[str, Any]:
    """Options NAME=VALUE, each given once, as a mapping of names to values. These are YAML: a number, word or list."""
    import yaml

    from diff_transformer.train.recipe import read_yaml

    _refuse_repeated(settings)
    options: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{quoted(text)} is not a setting; write NAME=VALUE.")
        try:
            options[name] = read_yaml(value)
        except yaml.YAMLError:
            raise ValueError(f"The value of {quoted(text)} is not valid YAML.") from None
    return options


def _refuse_repeated(settings: Iterable[str]) -> None:
    by_name: dict[str, str] = {}
    for setting in settings:
        name = setting.partition("=")[0]
        if name in by_name:
            raise ValueError(
                f"{name!r} is set twice, by {quoted(by_name[name])} and by {quoted(setting)}; give it once."
            )
        by_name[name] = setting


def refuse(subject: str, options: Mapping[str, object]) -> None:
    """Raise ValueError for an option that was given, since none of these goes with the `subject`."""
    for option, value in options.items():
        if value not in (None, []) and value is not False:
            raise ValueError(f"{option} does not go with {subject}.")


def refuse_existing(paths: Iterable[Path], subject: str, *, overwrite: bool) -> None:
    """Raise FileExistsError for the first path that exists, unless --overwrite was given."""
    for path in paths:
        if path.exists() and not overwrite:
            raise FileExistsError(
                f"{str(path)!r} is there already; choose another --output, or replace the {subject} with --overwrite."
            )


def output() -> Console:
    """The console on stdout. Lines are not wrapped where stdout is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_line(text: str) -> None:
    """Print a line to stdout as it is: nothing in it is markup, and a long line is not broken."""
    output().print(text, markup=False, soft_wrap=True)


# Units from the largest to the smallest.
_UNITS = {
    "count": {"B": 1e9, "M": 1e6},
    "bytes": {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3, " bytes": 1},
    "days": {" days": 1, " hours": 1 / 24, " minutes": 1 / (24 * 60), " seconds": 1 / (24 * 60 * 60)},
}


def _scaled(value: float, kind: str) -> str:
    """A value in the largest unit that it reaches, or in the smallest one."""
    units = _UNITS[kind]
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:.3g}{unit}"


def fill_text(template: str, **values: Any) -> str:
    """The text for a terminal that a template in the folder `templates` makes of some values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("diff_transformer.cli")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "thousands": "{:,}".format,
        "digits": "{:.3g}".format,
        "billions": lambda value: f"{value / 1e9:.3g}",
        "percent": "{:.0%}".format,
        "scaled": _scaled,
    }
    return environment.get_template(template).render(values).rstrip()


def messages(*, quiet: bool = False) -> Console:
    """The console on stderr. A quiet one prints nothing, for all but the first of several processes."""
    return Console(stderr=True, highlight=False, quiet=quiet)


def say(text: str) -> None:
    """Print a line to stderr as it is: nothing in it is markup, and a long line is not broken."""
    messages().print(text, markup=False, soft_wrap=True)


def quiet_libraries() -> None:
    """Turn off the progress bars of transformers and datasets, imported already or when they are."""
    for library, variable in {"transformers": "HF_HUB", "datasets": "HF_DATASETS"}.items():
        os.environ.setdefault(f"{variable}_DISABLE_PROGRESS_BARS", "1")
        if (module := sys.modules.get(f"{library}.utils.logging")) is not None:
            module.disable_progress_bar()
