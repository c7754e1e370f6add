"""`diff-transformer bench`"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from diff_transformer.bench.records import Row

# What only the operator's benchmark can vary, since the whole model has one size; and what only the model's can.
OPERATOR_ONLY = {"heads": "--heads", "head_dims": "--head-dim", "memory_length": "--memory-length"}
MODEL_ONLY = {"compile": "--compile"}


def bench(
    what: Annotated[str, typer.Argument(metavar="operator|model", help="The operator alone, or whole models.")],
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be repeated.", show_default="float32 and bfloat16; on CUDA bfloat16")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(
            help="Length of the sequence, and when decoding of the cache; may be repeated.",
            show_default="256 to 8192, decoding 512, 2048, 8192; for the model 1024, decoding 2048; "
            "on CUDA 512 to 65536; for the model 2048 and 4096",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences at a time.",
            show_default="1; the operator decodes 1 and 8; on CUDA 16384 tokens for the operator, 4096 for the model",
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="The twin's heads (operator).", show_default="16")] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option(help="Width of a query (operator); may be repeated.", show_default="64; on CUDA 64 and 128"),
    ] = None,
    pass_: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            help="forward, backward, forward+backward or decode; for the model forward, step or decode. "
            "May be repeated.",
            show_default="all; on the CPU without backward",
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Measure only this beside the twin; may be repeated.", show_default="all")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Alternated rounds, 5 or more.", show_default="5 to 25, by the time they take")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of torch.", show_default="all")] = None,
    memory_length: Annotated[
        int | None, typer.Option(help="Length for peak memory, 0 for none (operator).", show_default="16384")
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the decoder layers with torch.compile (model, without decoding).")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the results, as JSON and Markdown.", show_default="only printed"),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of this benchmark that are in the output folder.")
    ] = False,
) -> None:
    """Measure times relative to the twin, in alternated runs, after checking that the results are right.

    Takes about twelve minutes (operator) or five (model) on two processor cores. With `--device cuda` it takes sizes
    for a GPU, which nobody has timed yet. A candidate with wrong results is not timed, and named by the error that the
    command then ends with.
    """
    if what not in ("operator", "model"):
        raise ValueError(f"bench can measure 'operator' or 'model', got {what!r}.")
    if overwrite and output is None:
        raise ValueError("--overwrite goes with --output, which names the folder of the results.")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads must be 1 or more, got {threads}.")

    import torch

    from diff_transformer.bench.files import results_path, write_document
    from diff_transformer.bench.records import refuse_wrong
    from diff_transformer.bench.tables import bar_line
    from diff_transformer.cli import console

    if threads is not None:
        torch.set_num_threads(threads)
    options: dict[str, Any] = {"dtypes": dtype, "batch": batch, "heads": heads, "head_dims": head_dim}
    options |= {"passes": pass_, "candidates": candidate, "rounds": rounds, "memory_length": memory_length}
    options |= {"compile": compile_ or None}
    # What was not given is left to the settings' own defaults.
    given = {name: value for name, value in options.items() if value not in (None, [])}
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    measure = (_operator if what == "operator" else _model)(device, chosen, tuple(length or ()))
    path = None if output is None else results_path(output, what, device, overwrite=overwrite)
    if path is None:
        console.messages().print("The results are printed and not written: --output names a folder for them.")
    out, watch = console.output(), _Watch(console.output(), console.messages())
    try:
        document, rows = measure(watch)
    finally:
        watch.stop()
    for bar in document["bars"]:
        out.print(bar_line(bar), markup=False, soft_wrap=True)
    if path is not None:
        out.print(f"written: {' '.join(map(str, write_document(path, document)))}", markup=False, soft_wrap=True)
    refuse_wrong(rows)


def _operator(device: str, options: dict[str, Any], lengths: tuple[int, ...]) -> Any:
    from functools import partial

    from diff_transformer.bench.operator import OperatorSettings, measure_operator

    _refuse(options, MODEL_ONLY, "is an option of bench model.")
    if lengths:
        options |= {"lengths": lengths, "caches": lengths}
    return partial(measure_operator, OperatorSettings.on(device, **options))


def _model(device: str, options: dict[str, Any], lengths: tuple[int, ...]) -> Any:
    from functools import partial

    from diff_transformer.bench.model import ModelSettings, measure_model

    _refuse(options, OPERATOR_ONLY, "is an option of bench operator; bench model has one size.")
    if lengths:
        options |= {"lengths": lengths, "contexts": lengths}
    return partial(measure_model, ModelSettings.on(device, **options))


def _refuse(options: dict[str, Any], names: dict[str, str], text: str) -> None:
    for name, option in names.items():
        if name in options:
            raise ValueError(f"{option} {text}")


class _Watch:
    """Rows to stdout as they are finished, under a line for their case; what runs now to stderr."""

    def __init__(self, out: "Console", messages: "Console") -> None:
        import sys

        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._out, self._messages = out, messages
        self._case: tuple[Any, ...] = ()
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=messages,
            # A thread that draws by itself would disturb what is measured.
            auto_refresh=False,
            redirect_stdout=False,
            disable=not messages.is_terminal,
        )
        if messages.is_terminal and sys.stdout.isatty():  # one terminal: lines appear above the bar
            self._out = messages
        self._task = self._bar.add_task("", total=None)
        self._bar.start()

    def stage(self, text: str, done: int, total: int) -> None:
        if self._messages.is_terminal:
            self._bar.update(self._task, description=text, completed=done, total=total, refresh=True)
        else:
            self._messages.print(f"part {done + 1} of {total}: {text}", markup=False, soft_wrap=True)

    def row(self, row: "Row") -> None:
        from diff_transformer.bench.tables import row_line

        case = (row.pass_, row.dtype, row.sizes)
        if case != self._case:
            self._case = case
            self._out.print(", ".join(case), markup=False, soft_wrap=True)
        self._out.print(f"  {row_line(row)}", markup=False, soft_wrap=True)

    def stop(self) -> None:
        self._bar.stop()
