"""The commands `tokenizer train` and `prepare` make a tokenizer and tokenised text before training."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.app import not_needed_by, with_plain_errors
from diff_transformer.cli.arguments import RecipeName, RecipeSettings

tokenizer = typer.Typer(name="tokenizer", add_completion=False, no_args_is_help=True)


@tokenizer.callback()  # without a callback typer would turn the only subcommand into the command itself
def root() -> None:
    """Make a tokenizer."""


@tokenizer.command()
@partial(with_plain_errors, without=not_needed_by("tokenizer"))
def train(
    text: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="TEXT",
            help="Files (.txt, .jsonl, .parquet) or folders of them.",
            show_default="Python's standard library",
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(help="Number of tokens, including the 256 bytes and the end-of-text token.")
    ] = 8192,
    output: Annotated[Path, typer.Option(help="A new folder for the tokenizer.")] = Path("tokenizer"),
    field: Annotated[
        str, typer.Option(help="The field of a .jsonl line or a .parquet row that holds the text.")
    ] = "text",
) -> None:
    """Train a byte-level BPE tokenizer. A recipe uses it with data.tokenizer=FOLDER."""
    from diff_transformer.cli import console
    from diff_transformer.data import TextFiles, train_bpe

    if output.exists() or not output.parent.is_dir():
        raise FileExistsError(f"--output must be a new folder inside one that exists, got {str(output)!r}.")
    console.quiet_libraries()
    corpus = TextFiles(text, field)
    with console.messages().status(f"Reading {corpus.name}"):
        trained = train_bpe((piece.text for piece in corpus.pieces() if piece.text), vocab_size)
    trained.save_pretrained(output)
    console.print_line(f"{len(trained)} tokens: {output}")


def prepare(
    recipe: RecipeName,
    settings: RecipeSettings = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="The number of processes that tokenise.", show_default="one for each processor core"),
    ] = None,
) -> None:
    """Train a recipe's tokenizer and tokenise its text before training.

    An interrupted command continues where it stopped when it is run again.
    """
    from diff_transformer.cli import console
    from diff_transformer.cli.console import refuse_repeated
    from diff_transformer.cli.terminal_progress import tokenising_progress
    from diff_transformer.data import NeedleBatches, TextBatches
    from diff_transformer.train import build_data, load_recipe
    from diff_transformer.train.data_kinds import KINDS, TextData

    console.quiet_libraries()
    refuse_repeated(settings or ())
    resolved = load_recipe(recipe, settings or ())
    if not isinstance(resolved.data, TextData):
        with_text = " and ".join(repr(name) for name, kind in KINDS.items() if issubclass(kind, TextData))
        raise ValueError(
            f"There is nothing to prepare: {resolved.name!r} makes its data as it trains (data.kind is "
            f"{resolved.data.kind!r}; {with_text} have text)."
        )
    done = (0, 0)
    try:
        with tokenising_progress(console.messages()) as tell:

            def report(documents: int, tokens: int) -> None:
                nonlocal done
                done = documents, tokens
                tell(documents, tokens)

            data = build_data(resolved, tell=report, workers=workers or _cores())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted after {done[0]:,} documents, {done[1]:,} tokens: the same command, or training, goes on from "
            "there."
        ) from None
    batches = data.batches
    text = batches.text if isinstance(batches, NeedleBatches) else batches
    if not isinstance(text, TextBatches):
        console.print_line("There is no text to tokenise: every sequence of a step holds needles (data.share).")
    else:
        counts = f"{len(text.cache.tokens):,} tokens, {text.train_tokens:,} of them to train on"
        console.print_line(f"{counts}, vocabulary of {batches.vocab_size:,}")
        console.print_line(f"cache: {text.cache.folder}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
