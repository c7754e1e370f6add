"""The command `plan` prints the cost of a training run without running it."""

import json
from typing import Annotated

import typer

from diff_lab.cli.recipe_options import RecipeName, RecipeSettings, fill_text, read_recipe
from diff_transformer.cli import console
from diff_transformer.cli.console import optional


def plan(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs.")] = 1,
    gpu: Annotated[
        str, typer.Option(help="The GPU: h200, a100-80, rtx-4090 …; or cpu for the processor of this machine.")
    ] = "cpu",
    utilisation: Annotated[float, typer.Option(help="The share of the GPUs' peak that training reaches.")] = 0.4,
    parallel: Annotated[
        str | None, optional("How the run is parallel: ddp or fsdp.", "the recipe's train.parallel")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the parameters, operations, memory, time and disk space that a recipe would take."""
    from diff_lab.train.plan import Plan

    if parallel is not None:
        settings = [*(settings or ()), f"train.parallel={parallel}"]
    planned = Plan(read_recipe(recipe, settings), gpu, gpus, utilisation=utilisation)
    if as_json:
        console.print_line(json.dumps(vars(planned), default=vars, indent=1))
        return
    is_large = max(way.memory.total for way in planned.ways) >= 1 << 30
    unit, unit_bytes = ("GiB", 1 << 30) if is_large else ("MiB", 1 << 20)
    console.print_line(fill_text("plan.txt", plan=planned, unit=unit, unit_bytes=unit_bytes))
