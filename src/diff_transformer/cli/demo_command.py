"""The command `demo` trains a Differential Transformer beside a Transformer and compares them."""

from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.arguments import Seed, TextPaths


def demo(
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder of everything that the demo writes.", show_default="runs/demo, with --fast runs/demo-fast"
        ),
    ] = None,
    text: TextPaths = None,
    seed: Seed = 0,
    fast: Annotated[
        bool, typer.Option("--fast", help="Train tiny models that only show that everything runs.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the demo in the output folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the demo in the output folder.")] = False,
) -> None:
    """Train a Differential Transformer beside a Transformer of the same size and compare them.

    The demo takes 8 to 15 minutes on two processor cores and ends with a table and a page to open in a browser.
    """
    from diff_transformer.cli import console
    from diff_transformer.cli.terminal_progress import TrainingProgress
    from diff_transformer.lab.experiments.demo import run_demo
    from diff_transformer.lab.report.measured_tables import demo_table
    from diff_transformer.lab.report.run_pages import build_demo_report
    from diff_transformer.lab.results_files import read_results

    console.quiet_libraries()
    output = output or Path("runs/demo-fast" if fast else "runs/demo")
    folder = run_demo(
        output,
        text=text,
        seed=seed,
        fast=fast,
        resume=resume,
        overwrite=overwrite,
        progress=TrainingProgress(console.messages()),
    )
    page = build_demo_report(folder)
    out = console.output()
    out.print(demo_table(read_results(folder / "results.json")))
    models = sorted(path for path in folder.glob("*/model") if path.is_dir())
    for name, paths in {"page": [page], "numbers": [folder / "results.json"], "models": models}.items():
        console.print_line(f"{name + ':':<9}{' '.join(map(str, paths))}")
