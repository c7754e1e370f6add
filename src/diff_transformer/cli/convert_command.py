"""The commands `convert` and `export` write a model as a folder: in another layout, to share, or as an ONNX graph."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.cli import console, require_extra
from diff_transformer.cli.console import Checkpoint, optional

LAYOUT = "microsoft|microsoft-v2|diffllama|llama|motif|motif-2"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; it must not exist.")],
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar=LAYOUT, help="The layout of SRC; DST gets the layout of this project."),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar=LAYOUT, help="The layout that DST gets; SRC has the layout of this project.")
    ] = None,
    as_: Annotated[
        str | None,
        optional(
            "The attention type that a Llama gets: softmax, which is the same model; or diff_v2 or dex, which "
            "start with the same outputs and become differential in training.",
            "softmax",
            "--as",
            metavar="TYPE",
        ),
    ] = None,
    dex_heads: Annotated[
        str | None,
        optional(
            "With --as dex, the heads to correct: all, or a list for each layer, [[0, 3], []].", "all", metavar="HEADS"
        ),
    ] = None,
    dex_lambda_start: Annotated[
        float | None, optional("With --as dex, λ_learn at the start.", "λ_init of the layer")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="The largest size of a weights file; about as much memory is needed.")
    ] = "5GB",
) -> None:
    """Convert a checkpoint from or to the layout of another project.

    All keys and shapes are checked before anything is written. Weights keep their dtype, and the tokenizer and the
    generation settings are copied. DST appears when it is complete.

    Layouts: microsoft and microsoft-v2 are those of the authors' two versions, diffllama and llama are transformers',
    motif is Motif-2.6B's, and motif-2 Motif-2-12.7B's.
    """
    if (from_ is None) == (to is None):
        given = "neither" if to is None else "both"
        raise ValueError(f"convert needs either --from LAYOUT or --to LAYOUT, got {given}.")
    if as_ is not None and to is not None:
        raise ValueError(f"--as goes with --from; with --to the attention type does not change, got --as {as_}.")

    corrects_heads = as_ in ATTENTION_TYPES and ATTENTION_TYPES[as_].corrects_heads
    if not corrects_heads and (dex_heads is not None or dex_lambda_start is not None):
        raise ValueError("--dex-heads and --dex-lambda-start go with --as dex.")
    try:
        heads = None if dex_heads in (None, "all") else list(json.loads(dex_heads))
    except (TypeError, ValueError):
        raise ValueError(f"--dex-heads must be all, or a list for each layer like [[0, 3]], got {dex_heads}.") from None

    from diff_transformer.cli.checkpoints import find_checkpoint
    from diff_transformer.convert import convert_from, convert_to
    from diff_transformer.utils.manifest import require_unchanged_weights

    messages = console.messages()
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if from_ is not None:
            dex: dict[str, Any] = {"dex_heads": heads, "dex_lambda_start": dex_lambda_start}
            done = convert_from(
                from_, source, target, attention_type=as_, **dex, max_shard_size=max_shard_size, progress=tell
            )
        elif to is not None:
            folder = find_checkpoint(source)
            require_unchanged_weights(folder)
            done = convert_to(to, folder, target, max_shard_size=max_shard_size, progress=tell)
    console.print_line(
        f"written: {done.folder} ({done.attention_type}, {done.tensors} tensors, {done.bytes:,} bytes of weights in "
        f"{done.shards} {'file' if done.shards == 1 else 'files'})"
    )


def export(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; it must not exist.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write an ONNX graph with a cache instead; it is compared with the model.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, optional("The dtype of the weights.", "the checkpoint's own")
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Write the weights of layers and output head in eight bits, for a CPU.")
    ] = False,
    max_shard_size: Annotated[str | None, optional("The largest size of a weights file, such as 500MB.", "5GB")] = None,
    results: Annotated[
        list[Path] | None, optional("With diff-transformer-lab: results for the model card.", "the run's results.json")
    ] = None,
    license_name: Annotated[
        str | None,
        typer.Option("--license", help="The licence in the model card, by its name on the Hub, such as mit."),
    ] = None,
) -> None:
    """Write a model as a folder to share, with weights, tokenizer and a model card that shows its measurements."""
    if onnx:
        if dtype not in (None, "float32"):
            raise ValueError(f"--onnx writes float32, so --dtype cannot be {dtype}.")
        if max_shard_size:
            raise ValueError("--max-shard-size is for folders of safetensors, and --onnx writes none.")
        require_extra("onnx")
    if int8 and (onnx or dtype not in (None, "bfloat16")):
        other = "--onnx" if onnx else f"--dtype {dtype}"
        raise ValueError(f"--int8 writes a folder that computes in bfloat16, without {other}.")
    from diff_transformer.cli.checkpoints import auto_class_of, find_checkpoint, load_model, load_tokenizer
    from diff_transformer.convert import MAX_SHARD_SIZE, Exported, export_card, export_folder, export_onnx
    from diff_transformer.convert.conversion import shard_bytes
    from diff_transformer.model import Int8Config
    from diff_transformer.utils.files import read_json, refuse_existing

    shard_size = shard_bytes(max_shard_size or MAX_SHARD_SIZE)
    refuse_existing(target)
    folder = find_checkpoint(checkpoint)
    card = export_card(folder, results or [])
    tokenizer = load_tokenizer(folder, required=False)
    auto_class = auto_class_of(folder)
    if onnx and auto_class != "AutoModelForCausalLM":
        raise ValueError(f"--onnx writes language models, and {str(folder)!r} loads with {auto_class}.")
    if (int8 or onnx or dtype) and "quantization_config" in read_json(folder / "config.json"):
        raise ValueError(
            f"{str(folder)!r} has quantised weights, which are written as they are: without --int8, --onnx and --dtype."
        )
    model = load_model(folder, "cpu", auto_class, "float32" if onnx else dtype, Int8Config() if int8 else None)
    text = card(Exported(target.name, model, tokenizer, auto_class, onnx, license_name))
    if onnx:
        console.say(f"Writing {target} and comparing it with the model …")
        files = export_onnx(model, tokenizer, target, card=text)
    else:
        files = export_folder(model, tokenizer, target, card=text, max_shard_size=shard_size)
    for file in files:
        console.print_line(f"{file} ({file.stat().st_size:,} bytes)")
