"""Holds common parts of the laboratory's commands: recipes and their settings, text, texts from templates."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diff_transformer.cli.console import optional
from diff_transformer.utils.suggestions import quoted

if TYPE_CHECKING:
    from rich.console import Console

    from diff_lab.train import Recipe

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
Workers = Annotated[
    int | None,
    optional(
        "How many trainings run at the same time, each in a process of its own.",
        "one for each processor core, on a GPU 1",
        min=1,
    ),
]


def read_recipe(name: str, settings: list[str] | None) -> "Recipe":
    """Return a command's recipe, with its KEY=VALUE settings. Raises ValueError if a key is given twice."""
    from diff_lab.train import load_recipe

    _refuse_repeated(settings or ())
    return load_recipe(name, settings or ())


def find_recipe(folder: Path) -> "Recipe | None":
    """Return the recipe of the run that made the model in a folder; None if there is none.

    A file of the same name that another program wrote, as llm-compressor does, is passed over. Raises ValueError if
    the recipe is not valid.
    """
    from diff_lab.train.recipe import is_recipe, load_recipe
    from diff_transformer.cli.checkpoints import files_of

    return next((load_recipe(file) for file in files_of(folder, "recipe.yaml") if is_recipe(file)), None)


def parse_options(settings: list[str]) -> dict[str, Any]:
    """Parse options NAME=VALUE, each given once, into values by name. These are YAML: a number, word or list."""
    from diff_lab.train.recipe import read_yaml

    _refuse_repeated(settings)
    options: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{quoted(text)} is not a setting; write NAME=VALUE.")
        try:
            options[name] = read_yaml(value)
        except ValueError:
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


@contextmanager
def tokenising_progress(console: "Console") -> Iterator[Callable[[int, int], None]]:
    """Show how many documents and tokens are tokenised, as the function that it yields is called, and at Ctrl-C."""
    counts, next_line = "", -math.inf
    with console.status("Looking for the text's tokens") as status:

        def tell(documents: int, tokens: int) -> None:
            nonlocal counts, next_line
            counts = f"{documents:,} documents, {tokens:,} tokens"
            status.update(counts)
            if not console.is_terminal and monotonic() >= next_line:
                next_line = monotonic() + 30
                console.print(f"tokenised: {counts}", markup=False, soft_wrap=True)

        try:
            yield tell
        except KeyboardInterrupt as interrupt:
            if not counts:
                raise
            raise KeyboardInterrupt(f"Interrupted after {counts}: the same command resumes from there.") from interrupt


# Units from the largest to the smallest.
_UNITS = {
    "count": {"B": 1e9, "M": 1e6},
    "rate": {"M": 1e6, "k": 1e3, "": 1},
    "bytes": {" TB": 1e12, " GB": 1e9, " MB": 1e6, " kB": 1e3, " bytes": 1},
    "days": {" days": 1, " hours": 1 / 24, " minutes": 1 / (24 * 60), " seconds": 1 / (24 * 60 * 60)},
}


def _scaled(value: float, kind: str) -> str:
    """Write a value in the largest unit that it reaches, or in the smallest one."""
    units = _UNITS[kind]
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    return f"{value / units[unit]:.3g}{unit}"


def fill_text(template: str, **values: Any) -> str:
    """Return the text for a terminal that a template in the folder `templates` makes of some values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("diff_lab.cli")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "thousands": "{:,}".format,
        "digits": "{:.3g}".format,
        "percent": "{:.0%}".format,
        "scaled": _scaled,
    }
    return environment.get_template(template).render(values).rstrip()
