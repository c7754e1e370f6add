"""`diff-transformer prepare`"""

import os
from typing import Annotated

import typer


def prepare(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped recipe such as small.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's: data.cache=/shared/cache"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenise.", show_default="one for each processor core")
    ] = None,
) -> None:
    """Train a recipe's tokenizer and tokenise its text, so that training finds both. Interrupted, it goes on."""
    from diff_transformer.cli import console, refuse_repeated
    from diff_transformer.cli.progress import preparing
    from diff_transformer.data import NeedleBatches, TextBatches
    from diff_transformer.train import build_data, load_recipe
    from diff_transformer.train.schema import TextData

    console.quiet_libraries()
    refuse_repeated(settings or ())
    resolved = load_recipe(recipe, settings or ())
    if not isinstance(resolved.data, TextData):
        raise ValueError(
            f"There is nothing to prepare: {resolved.name!r} makes its data as it trains (data.kind is "
            f"{resolved.data.kind!r}; 'text' and 'needles' have text)."
        )
    done = [0, 0]
    try:
        with preparing(console.messages()) as tell:

            def note(documents: int, tokens: int) -> None:
                done[:] = documents, tokens
                tell(documents, tokens)

            data = build_data(resolved, tell=note, workers=workers or _cores())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted after {done[0]:,} documents, {done[1]:,} tokens: the same command, or training, goes on from "
            "there."
        ) from None
    batches = data.batches
    text = batches.text if isinstance(batches, NeedleBatches) else batches
    out = console.output()
    if not isinstance(text, TextBatches):
        out.print(
            "There is no text to tokenise: every sequence of a step holds needles (data.share).",
            markup=False,
            soft_wrap=True,
        )
    else:
        found = f"{len(text.cache.tokens):,} tokens, {text.train_tokens:,} of them to train on"
        out.print(f"{found}, vocabulary of {batches.vocab_size:,}", markup=False, soft_wrap=True)
        out.print(f"cache: {text.cache.folder}", markup=False, soft_wrap=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
