"""The commands `explore` and `maps` show attention maps of a checkpoint in the browser, or write them into a file."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli import console, require_extra
from diff_transformer.cli.console import Checkpoint, Device, optional

LOOPBACK = "127.0.0.1"


def explore(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="The differential model: the folder of a run or of a model, or a model of the package. A DiffLlama "
            "works, too.",
            show_default="the pairs of models that come with the package",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        optional("The model beside it: any causal language model of transformers.", "none", metavar="TRANSFORMER"),
    ] = None,
    text: Annotated[str | None, optional("The text that the page opens with.", "an example")] = None,
    port: Annotated[int | None, optional("The port to listen on.", "a free one", min=1, max=65535)] = None,
    host: Annotated[
        str | None, optional("The address to listen on; with any but the default, other machines may ask.", LOOPBACK)
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
    output: Annotated[
        Path | None,
        optional("Write one HTML file that works without a server, and serve nothing.", "none", metavar="PAGE.HTML"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    device: Device = None,
) -> None:
    """Explore the attention maps of each head: both softmax maps, and their difference.

    The page lets you move λ and follow the next token's distribution, the loss, the attention on the answer and, of a
    model of the retrieval or recall task, the accuracy. It opens at the head whose λ = 0 changes the prediction most.
    It is served on this machine alone, under an address with a random part, until Ctrl-C.
    """
    if output is None:
        require_extra("explore")
    else:
        console.refuse("--output", {"--port": port, "--host": host, "--no-browser": no_browser})
        console.refuse_existing([output], "page", overwrite=overwrite)
    if checkpoint is None:
        console.refuse("the models of the package: name a CHECKPOINT", {"--compare": compare, "--text": text})
    from diff_transformer.cli.explored_checkpoints import build_explorer, shipped_pairs, write_recorded_page

    pairs = shipped_pairs() if checkpoint is None else {"": (checkpoint, compare)}
    if output is not None:
        write_recorded_page(*next(iter(pairs.values())), output, text=text, device=device)
        console.print_line(f"{output} shows the maps without a server or a network.")
        return

    from diff_transformer.explorer.server import ExplorerServer
    from diff_transformer.utils.servers import bound_socket, in_short_lived_thread

    host = host or LOOPBACK
    with bound_socket(host, port or 0) as bound:
        explorers = in_short_lived_thread(
            lambda: {name: build_explorer(*pair, text, device) for name, pair in pairs.items()}
        )
        server = ExplorerServer(explorers, bound, host)
        console.print_line(server.address)
        console.say("Ctrl-C ends it.")
        if not no_browser:  # which waits for the server, as the socket listens already
            threading.Thread(target=open_browser, args=(server.address,), name="browser", daemon=True).start()
        server.serve()


def open_browser(address: str) -> None:
    """Show an address in the browser, in a process without a terminal, which a browser for terminals would take.

    Ctrl-C there ends the server alone.
    """
    command = [sys.executable, "-c", "import sys, webbrowser; webbrowser.get().open(sys.argv[1])", address]
    nothing = subprocess.DEVNULL
    subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True, check=False)


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
