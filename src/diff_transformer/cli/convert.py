"""`diff-transformer convert`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

LAYOUT = "microsoft|microsoft-v2|diffllama|llama"
# How often a log gets a line, as a share of the bytes.
_LINES = 10


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; it must not exist.")],
    from_: Annotated[
        str | None, typer.Option("--from", metavar=LAYOUT, help="SRC is in this layout, and DST becomes ours.")
    ] = None,
    to: Annotated[str | None, typer.Option(metavar=LAYOUT, help="SRC is ours, and DST gets this layout.")] = None,
    as_: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="TYPE",
            help="The attention type that a Llama becomes: softmax, its equal; diff_v2 or dex, which compute the same "
            "until training parts the maps of the one, or corrects heads of the other.",
            show_default="softmax",
        ),
    ] = None,
    dex_heads: Annotated[
        str | None,
        typer.Option(
            metavar="HEADS",
            help="With --as dex, the heads to correct: all; a share like 25% of each layer's heads, those that look "
            "most widely on --dex-text; or a list for each layer, [[0, 3], []].",
            show_default="all",
        ),
    ] = None,
    dex_text: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Text to rank the heads on; may be given several times.")
    ] = None,
    dex_lambda_start: Annotated[
        float | None, typer.Option(help="With --as dex, λ_learn at the start.", show_default="λ_init of the layer")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Most bytes of weights in a file; about as much memory is needed.")
    ] = "5GB",
) -> None:
    """Convert a checkpoint from or to somebody else's layout.

    All keys and shapes are checked before anything is written. Weights keep their dtype; tokenizer and generation
    settings go along. DST appears when it is whole; after an interruption the same command goes on where it was.
    """
    if (from_ is None) == (to is None):
        raise ValueError("convert needs one of --from LAYOUT and --to LAYOUT.")
    if as_ is not None and to is not None:
        raise ValueError(f"--as goes with --from; with --to the model stays what it is, got --as {as_}.")

    if as_ != "dex" and any(option is not None for option in (dex_heads, dex_text, dex_lambda_start)):
        raise ValueError("--dex-heads, --dex-text and --dex-lambda-start go with --as dex.")

    from diff_transformer.cli import console
    from diff_transformer.cli.checkpoints import find_checkpoint
    from diff_transformer.cli.heads import chosen_heads
    from diff_transformer.convert import convert_from, convert_to
    from diff_transformer.convert.folder import UnfinishedFolder
    from diff_transformer.data.manifest import require_unchanged_weights

    heads = None
    if as_ == "dex":
        UnfinishedFolder.refuse_existing(target)  # heads may take minutes to rank
        heads = chosen_heads(dex_heads or "all", source, dex_text)
    with _Bar(console.messages()) as bar:
        if from_ is not None:
            done = convert_from(
                from_,
                source,
                target,
                attention_type=as_,
                dex_heads=heads,
                dex_lambda_start=dex_lambda_start,
                max_shard_size=max_shard_size,
                progress=bar.tell,
            )
        else:
            assert to is not None
            folder = find_checkpoint(source)
            require_unchanged_weights(folder)
            done = convert_to(to, folder, target, max_shard_size=max_shard_size, progress=bar.tell)
    console.output().print(
        f"written: {done.folder} ({done.attention_type}, {done.tensors} tensors, {done.bytes:,} bytes of weights in "
        f"{done.shards} {'file' if done.shards == 1 else 'files'})",
        markup=False,
        soft_wrap=True,
    )


class _Bar:
    """Bytes of weights that are written: a bar in a terminal, a line now and then in a log."""

    def __init__(self, messages: "Console") -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        self._messages = messages
        self._bar = Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=messages, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._told = 0

    def __enter__(self) -> "_Bar":
        if self._messages.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._messages.is_terminal:
            self._bar.stop()
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt("Interrupted; the same command goes on where it was.") from None

    def tell(self, done: int, total: int) -> None:
        """Show that ``done`` bytes of ``total`` are written."""
        self._bar.update(self._task, completed=done, total=total)
        tenth = done * _LINES // max(1, total)
        if not self._messages.is_terminal and tenth > self._told:
            self._told = tenth
            self._messages.print(f"{done:,} of {total:,} bytes", markup=False, soft_wrap=True)
