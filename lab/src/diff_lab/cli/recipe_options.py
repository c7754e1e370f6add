"""Holds common parts of the laboratory's commands: recipes and their settings, and the progress of tokenising."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

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


def find_recipe(folder: Path) -> "Recipe | None":
    """Return the recipe of the run that made the model in a folder; None if there is none.

    A file of the same name that another program wrote, as llm-compressor does, is passed over. Raises ValueError if
    the recipe is not valid.
    """
    from diff_lab.train.recipe import is_recipe, load_recipe
    from diff_transformer.cli.checkpoints import files_of

    return next((load_recipe(file) for file in files_of(folder, "recipe.yaml") if is_recipe(file)), None)


def parse_options(settings: list[str]) -> dict[str, Any]:
    """Parse options NAME=VALUE into values by name. These are YAML: a number, word or list."""
    from diff_lab.train.recipe import read_yaml

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


@contextmanager
def tokenising_progress(console: "Console") -> Iterator[Callable[[int, int], None]]:
    """Show how many documents and tokens are tokenised, as the function that it yields is called."""
    next_line = -math.inf
    with console.status("Looking for the text's tokens") as status:

        def tell(documents: int, tokens: int) -> None:
            nonlocal next_line
            counts = f"{documents:,} documents, {tokens:,} tokens"
            status.update(counts)
            if not console.is_terminal and monotonic() >= next_line:
                next_line = monotonic() + 30
                console.print(f"tokenised: {counts}", markup=False, soft_wrap=True)

        yield tell
