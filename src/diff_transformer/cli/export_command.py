"""The command `export` writes a model as a folder to share, or as an ONNX graph."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from diff_transformer.cli import console, require_extra
from diff_transformer.cli.console import Checkpoint, optional


def export(
    checkpoint: Checkpoint,
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; it must not exist.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write an ONNX graph with a cache instead; it is compared with the model.")
    ] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        optional("The dtype of the weights.", "the checkpoint's own"),
    ] = None,
    max_shard_size: Annotated[str | None, optional("The largest size of a weights file, such as 500MB.", "5GB")] = None,
    results: Annotated[
        list[Path] | None,
        optional("With diff-transformer-lab: results for the model card.", "the run's or demo's results.json"),
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
    from diff_transformer.cli.checkpoints import auto_class_of, find_checkpoint, load_model, load_tokenizer
    from diff_transformer.convert import MAX_SHARD_SIZE, Exported, export_card, export_folder, export_onnx
    from diff_transformer.convert.conversion import shard_bytes
    from diff_transformer.utils.files import refuse_existing

    shard_size = shard_bytes(max_shard_size or MAX_SHARD_SIZE)
    refuse_existing(target)
    folder = find_checkpoint(checkpoint)
    card = export_card(folder, results or [])
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    auto_class = auto_class_of(folder)
    if onnx and auto_class != "AutoModelForCausalLM":
        raise ValueError(f"--onnx writes language models, and {str(folder)!r} loads with {auto_class}.")
    model = load_model(folder, "cpu", auto_class, "float32" if onnx else dtype)
    text = card.text(Exported(target.name, model, tokenizer, auto_class, onnx, license_name))
    if onnx:
        console.messages().print(f"Writing {target} and comparing it with the model …")
        files = export_onnx(model, tokenizer, target, card=text)
    else:
        files = export_folder(model, tokenizer, target, card=text, max_shard_size=shard_size)
    for file in files:
        console.output().print(f"{file} ({file.stat().st_size:,} bytes)")
