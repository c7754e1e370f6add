"""The command `maps` writes the attention maps of a model over a text into a file."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli import console
from diff_transformer.cli.console import Checkpoint, Device, optional


def maps(
    checkpoint: Checkpoint,
    text: Annotated[str, typer.Option(help="The text that the model reads.")],
    output: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="The file to write; it must not exist without --overwrite.")
    ],
    layer: Annotated[list[int] | None, optional("A layer, counted from 1; may be repeated.", "all", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    device: Device = None,
) -> None:
    """Write the attention maps A1, A2 and A1 − λA2 of a text into a safetensors file.

    The tensors are tokens (N,) and, of each layer, layers.1.first, layers.1.second and layers.1.difference, all
    (heads, N, N) in float32; softmax attention has the last alone. The metadata "pieces" are the texts of the tokens.
    """
    if output.suffix != ".safetensors":
        raise ValueError(f"--output must end in .safetensors, got {str(output)!r}.")
    console.refuse_existing([output], "file", overwrite=overwrite)
    import torch
    from safetensors.torch import save_file

    from diff_transformer.cli.checkpoints import find_checkpoint
    from diff_transformer.cli.explored_checkpoints import load_side
    from diff_transformer.model import attention_maps
    from diff_transformer.utils.files import atomic_file

    side = load_side(find_checkpoint(checkpoint), device)
    if unknown := [number for number in layer or () if number > side.model.layers]:
        raise ValueError(f"The model has layers 1 … {side.model.layers}, got --layer {unknown[0]}.")
    ids = side.vocabulary.encode(text)
    side.model.check_tokens(ids)
    tokens = torch.tensor(ids, device=side.model.model.device)
    tensors = {"tokens": tokens.cpu()}
    for number, of_layer in enumerate(attention_maps(side.model.model, tokens.unsqueeze(0)), start=1):
        if layer and number not in layer:
            continue
        for name in ("first", "second", "difference"):
            if (weights := getattr(of_layer, name)) is not None:
                tensors[f"layers.{number}.{name}"] = weights[0].float().cpu().contiguous()
    pieces = json.dumps(side.vocabulary.pieces(ids), ensure_ascii=False)
    with atomic_file(output) as unfinished:
        save_file(tensors, unfinished, metadata={"pieces": pieces})
    shown = len(layer or ()) or side.model.layers
    console.print_line(f"{output}: {shown} layers of {side.model.heads} heads, {len(ids)} tokens")
