"""The command `bench` measures the operator and whole models, relative to the Transformer."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from diff_transformer.cli import console
from diff_transformer.cli.console import optional


def bench(
    benchmark: Annotated[
        Literal["operator", "model"],
        typer.Argument(metavar="operator|model", help="The operator alone, or whole models."),
    ],
    device: Annotated[str, typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[
        list[str] | None, optional("May be repeated.", "float32, bfloat16; for the model int8, too; on CUDA bfloat16")
    ] = None,
    length: Annotated[
        list[int] | None,
        optional(
            "Length of the sequence, and when decoding of the cache; may be repeated.",
            "256 to 8192; for the model 1024 and 2048; on CUDA 512 to 65536; for the model 2048 and 4096",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        optional(
            "Sequences at a time.", "1; on CUDA 16384 tokens for the operator, 4096 for the model, but when decoding"
        ),
    ] = None,
    heads: Annotated[
        int | None, optional("The Transformer's heads (operator); two make a differential head.", "16")
    ] = None,
    head_dim: Annotated[
        list[int] | None, optional("Width of a query (operator); may be repeated.", "64; on CUDA 64 and 128")
    ] = None,
    pass_: Annotated[
        list[str] | None,
        optional(
            "forward, backward, forward+backward or decode; for the model forward, step or decode. May be repeated.",
            "all; on the CPU without backward",
            "--pass",
        ),
    ] = None,
    candidate: Annotated[
        list[str] | None, optional("Measure only this beside the Transformer; may be repeated.", "all")
    ] = None,
    rounds: Annotated[int | None, optional("Alternated rounds, 5 or more.", "5 to 25, by the time they take")] = None,
    output: Annotated[Path | None, optional("Folder for the results, as JSON and Markdown.", "only printed")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of this benchmark that are in the output folder.")
    ] = False,
) -> None:
    """Measure times relative to the Transformer's, in alternated runs, after checking that all results are right.

    It takes about twelve minutes (operator) or fifteen (model) on two processor cores. With `--device cuda` the default
    sizes are larger, and how long they take is not known. A candidate with wrong results is not timed, and the command
    ends with an error that names it.
    """
    if overwrite and output is None:
        raise ValueError("--overwrite goes with --output, which names the folder of the results.")

    from diff_lab.bench.bench_pages import results_path, write_document
    from diff_lab.bench.benchmark import Recorder, refuse_wrong
    from diff_lab.bench.model_bench import ModelSettings, measure_model
    from diff_lab.bench.operator_bench import OperatorSettings, measure_operator

    several = {"dtypes": dtype, "lengths": length, "head_dims": head_dim, "passes": pass_, "candidates": candidate}
    one = {"batch": batch, "heads": heads, "rounds": rounds}
    # The settings have defaults for what was not given.
    chosen: dict[str, Any] = {name: tuple(values) for name, values in several.items() if values}
    chosen |= {name: value for name, value in one.items() if value is not None}
    benchmarks: dict[str, tuple[Any, Any]] = {
        "operator": (OperatorSettings, measure_operator),
        "model": (ModelSettings, measure_model),
    }
    settings, measure = benchmarks[benchmark]
    # Whole models have one size, and the operator is compiled or not by itself.
    if unknown := [name for name in chosen if name not in settings.__dataclass_fields__]:
        raise ValueError(f"bench {benchmark} does not take {', '.join(unknown)}.")
    on_device = settings.on(device, **chosen)
    path = None if output is None else results_path(output, benchmark, device)
    if path is None:
        console.say("The results are printed and not written: --output names a folder for them.")
    else:
        console.refuse_existing((path, path.with_suffix(".md")), "results", overwrite=overwrite)
    recorder = Recorder(tell=console.say, show=console.print_line)
    document = measure(on_device, recorder)
    if path is not None:
        console.print_line(f"written: {' '.join(map(str, write_document(path, document)))}")
    refuse_wrong(recorder.rows)
