"""`diff-transformer demo`"""

from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli import LARGEST_SEED


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for everything the demo writes.", show_default="runs/demo, with --fast runs/demo-fast"
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text for the language part: a .txt, .jsonl or .parquet file or a folder of them; may be repeated. "
            "By default the source of Python's standard library."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of weights and data.")] = 0,
    fast: Annotated[
        bool, typer.Option("--fast", help="A tiny setting: shows that everything runs, measures nothing.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the demo in the output folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the demo in the output folder.")] = False,
) -> None:
    """Train a Differential Transformer beside its twin and compare them.

    Takes 8 to 15 minutes on two processor cores; ends with a table and a page to open in a browser.
    """
    from diff_transformer.cli import console
    from diff_transformer.cli.progress import Bars
    from diff_transformer.experiments.demo import run_demo
    from diff_transformer.report import build_demo_report, demo_table
    from diff_transformer.results import read_results

    console.quiet_libraries()
    output = output or Path("runs/demo-fast" if fast else "runs/demo")
    folder = run_demo(
        output, text=text, seed=seed, fast=fast, resume=resume, overwrite=overwrite, progress=Bars(console.messages())
    )
    page = build_demo_report(folder)
    out = console.output()
    out.print(demo_table(read_results(folder / "results.json")))
    models = sorted(path for path in folder.glob("*/model") if path.is_dir())
    for name, paths in {"page": [page], "numbers": [folder / "results.json"], "models": models}.items():
        out.print(f"{name + ':':<9}{' '.join(map(str, paths))}", markup=False, soft_wrap=True)
