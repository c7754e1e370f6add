"""`diff-transformer tokenizer train`"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli.app import not_needed_by, with_plain_errors

tokenizer = typer.Typer(name="tokenizer", add_completion=False, no_args_is_help=True)


@tokenizer.callback()  # without it, typer would take the only command for the whole
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
    vocab_size: Annotated[int, typer.Option(help="Tokens, with the 256 bytes and the end of text.")] = 8192,
    output: Annotated[Path, typer.Option(help="A new folder for it.")] = Path("tokenizer"),
    field: Annotated[str, typer.Option(help="What holds the text in a line of .jsonl or a row of .parquet.")] = "text",
) -> None:
    """Train byte-level byte-pair encoding; a recipe names the folder: data.tokenizer=FOLDER."""
    from diff_transformer.cli import console
    from diff_transformer.data import TextFiles, train_bpe

    if output.exists() or not output.parent.is_dir():
        raise FileExistsError(f"--output must be a new folder inside one that exists, got {str(output)!r}.")
    console.quiet_libraries()
    corpus = TextFiles(text, field)
    with console.messages().status(f"Reading {corpus.name}"):
        made = train_bpe((piece.text for piece in corpus.pieces() if piece.text), vocab_size)
    made.save_pretrained(output)
    console.output().print(f"{len(made)} tokens: {output}", markup=False, soft_wrap=True)
