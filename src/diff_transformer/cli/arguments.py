"""The arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

LARGEST_SEED = (1 << 63) - 1  # the largest seed that torch's generators take

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A run folder, or a folder with config.json and weights.")
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
Device = Annotated[str | None, typer.Option(help="The device to run on.", show_default="the GPU, if any")]
