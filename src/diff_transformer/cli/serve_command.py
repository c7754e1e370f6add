"""The command `serve` answers requests of OpenAI's API with a model."""

from typing import Annotated

import typer

from diff_transformer.cli import console, require_extra
from diff_transformer.cli.console import Device, TextCheckpoint, optional
from diff_transformer.cli.generate_command import shipped_language_model

API_KEY_VARIABLE = "DIFF_TRANSFORMER_API_KEY"


def serve(
    checkpoint: TextCheckpoint = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is all of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 is any free one.")] = 8000,
    name: Annotated[
        str | None, optional("The name of the model in requests.", "the name of the run's or the model's folder")
    ] = None,
    api_key: Annotated[
        str | None, optional("The API key that clients must send.", "none", envvar=API_KEY_VARIABLE)
    ] = None,
    without_key: Annotated[
        bool, typer.Option("--without-key", help="Listen beyond this machine although there is no API key.")
    ] = False,
    device: Device = None,
    log_requests: Annotated[bool, typer.Option("--log-requests", help="Print a line for each request.")] = False,
) -> None:
    """Answer requests of OpenAI's API with a model: /v1/completions, /v1/chat/completions and /v1/models.

    Ctrl-C or SIGTERM stops the server."""
    if api_key is not None and not (api_key.strip() == api_key > "" and api_key.isprintable() and api_key.isascii()):
        key = f"The API key (--api-key or {API_KEY_VARIABLE})"
        raise ValueError(f"{key} must be printable ASCII text, not empty, and without spaces at its ends.")
    require_extra("serve")
    from diff_transformer.utils.servers import bound_socket, is_loopback, root_url

    if not is_loopback(host) and api_key is None and not without_key:
        raise ValueError(
            f"On {host} anybody who reaches this machine can use the server: give an --api-key "
            f"(or {API_KEY_VARIABLE}), or say --without-key."
        )
    if checkpoint is None:
        checkpoint = shipped_language_model()
    with bound_socket(host, port) as bound:
        from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer, shown_folder
        from diff_transformer.serve.completion import ServedModel
        from diff_transformer.serve.server import ModelServer
        from diff_transformer.utils.servers import in_short_lived_thread

        folder = find_checkpoint(checkpoint)
        console.say(f"Loading {shown_folder(folder)} …")
        path = folder.resolve()
        of_run = path.parent.name if path.name == "model" else path.name  # or of the model's folder
        if path.parent.name == "checkpoints":
            of_run = f"{path.parents[1].name}-{path.name}"
        served = in_short_lived_thread(
            lambda: ServedModel(load_model(folder, device), load_tokenizer(folder), name or of_run)
        )
        bound.listen()  # who comes before the server has begun waits for it
        console.say(f"Serving {served.name} at {root_url(host, bound)}/v1 (Ctrl-C stops it).")
        ModelServer(served, api_key, log_requests=log_requests).run(sockets=[bound])
