"""The commands from text to a trained model: `tokenizer train`, `prepare`, `plan` and `train`."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from diff_lab.cli.recipe_options import RecipeName, RecipeSettings, tokenising_progress
from diff_transformer.cli import console
from diff_transformer.cli.app import with_plain_errors
from diff_transformer.cli.console import optional

tokenizer = typer.Typer(name="tokenizer", add_completion=False, no_args_is_help=True)


@tokenizer.callback()  # without a callback typer would turn the only subcommand into the command itself
def root() -> None:
    """Make a tokenizer."""


@tokenizer.command("train")
@with_plain_errors
def train_tokenizer(
    text: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TEXT",
            help="Files (.txt, .jsonl, .parquet) or folders of them.",
            show_default="Python's standard library",
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=258, help="Number of tokens, including the 256 bytes and the end-of-text token.")
    ] = 8192,
    output: Annotated[Path, typer.Option(help="A new folder for the tokenizer.")] = Path("tokenizer"),
    field: Annotated[
        str, typer.Option(help="The field of a .jsonl line or a .parquet row that holds the text.")
    ] = "text",
) -> None:
    """Train a byte-level BPE tokenizer. A recipe uses it with data.tokenizer=FOLDER."""
    from diff_lab.data import TextFiles, train_bpe
    from diff_transformer.utils.files import atomic_directory

    if output.exists() or not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise FileExistsError(f"--output must be a new folder inside one that may be written to, got {str(output)!r}.")
    corpus = TextFiles(text, field)
    with console.messages().status(f"Reading {corpus.name}"):
        trained = train_bpe(filter(None, corpus.documents()), vocab_size)
    with atomic_directory(output) as folder:
        trained.save_pretrained(folder)
    console.print_line(f"{len(trained)} tokens: {output}")


def prepare(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    workers: Annotated[
        int | None, optional("The number of threads that tokenise.", "one for each processor core", min=1)
    ] = None,
) -> None:
    """Train a recipe's tokenizer and tokenise its text before training.

    An interrupted command resumes when it is run again.
    """
    if workers is not None:
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # which the tokenizer reads when it begins its threads
    from diff_lab.train import build_data, load_recipe

    resolved = load_recipe(recipe, settings or ())
    with tokenising_progress(console.messages()) as tell:
        batches: Any = build_data(resolved, tell=tell).batches
    text = getattr(batches, "text", batches)  # of data that is made of text
    if not hasattr(text, "cache"):
        raise ValueError(f"There is nothing to prepare: data of the kind {resolved.data.kind!r} is made in training.")
    counts = f"{len(text.cache.tokens):,} tokens, {text.train_tokens:,} of them to train on"
    console.print_line(f"{counts}, vocabulary of {batches.vocab_size:,}")
    console.print_line(f"cache: {text.cache.folder}")


def plan(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    gpus: Annotated[int, typer.Option(help="The number of GPUs.", min=1)] = 1,
    gpu: Annotated[
        str, typer.Option(help="The GPU: h200, a100-80, rtx-4090 …; or cpu for the processor of this machine.")
    ] = "cpu",
    utilisation: Annotated[
        float, typer.Option(help="The share of the GPUs' peak that training reaches.", min=0.01, max=1)
    ] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the parameters, operations, memory, messages, time and disk space that a recipe would take."""
    from diff_lab.report.documents import fill
    from diff_lab.train import load_recipe
    from diff_lab.train.plan import Plan

    planned = Plan(load_recipe(recipe, settings or ()), gpu, gpus, utilisation=utilisation)
    if as_json:
        console.print_line(json.dumps(vars(planned), default=vars, indent=1))
        return
    is_large = max(counted.total for counted in planned.counted) >= 1 << 30
    unit, unit_bytes = ("GiB", 1 << 30) if is_large else ("MiB", 1 << 20)
    asked = shlex.join([recipe, *(settings or ())])
    console.print_line(fill("plan.txt", plan=planned, asked=asked, unit=unit, unit_bytes=unit_bytes).rstrip())


command = typer.Typer(add_completion=False)


class ResumableCommand(TyperCommand):
    """A command whose `--resume` may stand alone, as an empty value, or be followed by "auto": typer has no such."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in args:
            if word == "auto" and words[-1:] == ["--resume="]:
                words[-1] += word
            else:
                words.append("--resume=" if word == "--resume" else word)
        return super().parse_args(ctx, words)


@command.command("train", cls=ResumableCommand)
@with_plain_errors
def train(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    output: Annotated[Path | None, optional("Folder of the run.", "runs/NAME")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="[auto]", help="Resume from the newest checkpoint; with 'auto', start a new run if there is none."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the output folder.")] = False,
) -> None:
    """Train the model of a recipe. Follow the run with TensorBoard."""
    from diff_lab.measure.standard import validation_callback
    from diff_lab.results_files import number_of
    from diff_lab.train import build_data, load_recipe, open_run
    from diff_lab.train.progress import RunProgress
    from diff_transformer.utils.cpu_count import is_rank0

    resolved = load_recipe(recipe, settings or ())
    folder = output or Path("runs") / resolved.name
    messages = console.messages(quiet=not is_rank0())
    if resume not in (None, "", "auto"):
        raise ValueError(f"--resume takes no value or 'auto', got {resume!r}.")
    resume_mode: bool | Literal["auto"] = "auto" if resume == "auto" else resume is not None
    # A run that cannot begin is refused here, before any text is read or a tokenizer is trained.
    with open_run(resolved, folder, resume=resume_mode, overwrite=overwrite) as opened:
        with tokenising_progress(messages) as tell:
            data = build_data(resolved, tell=tell)
        run = opened.train(data, RunProgress(messages), validation_callback(data.batches))
    if not is_rank0():
        return
    shown = [name for name in run.last if name == "loss" or name.startswith("validation/")]
    measured = ", ".join(f"{name} {number_of(run.last[name]):.4g}" for name in shown)
    console.print_line(f"{run.parameters:,} parameters, {run.seconds:.1f} s, last step: {measured}")
    console.print_line(f"model: {run.model_folder}")
