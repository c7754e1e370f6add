"""The command `generate` continues a prompt with a checkpoint."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from diff_transformer import shipped_models
from diff_transformer.cli import console
from diff_transformer.cli.console import Device, Seed, TextCheckpoint, optional
from diff_transformer.utils.files import read_json
from diff_transformer.utils.suggestions import quoted
from diff_transformer.utils.token_texts import TokenTexts

DEFAULT_TOKENS = 200  # of new text, or fewer where the context has no space for them


def _list(is_requested: bool) -> None:
    """Print the models that the package ships, and end the command."""
    if not is_requested:
        return
    names = shipped_models.pretrained_names()
    for name in names:
        console.print_line(f"{name:<18}{_summary(shipped_models.pretrained(name))}")
    if not names:
        console.print_line("This copy of the package was built without trained models.")
    raise typer.Exit


def _summary(folder: str) -> str:
    """Describe the model in a folder of the package in a few words."""
    return str(read_json(Path(folder) / shipped_models.CARD_RECORD)["summary"])


def generate(
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    checkpoint: TextCheckpoint = None,
    max_new_tokens: Annotated[
        int | None,
        optional("The largest number of new tokens.", f"{DEFAULT_TOKENS}, or fewer if the context is full", min=1),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Divides the logits before sampling.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens that hold this share of the probability.")
    ] = 1.0,
    seed: Seed = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the most likely token.")] = False,
    device: Device = None,
    list_: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="Say which models the package ships, and stop."),
    ] = False,
) -> None:
    """Continue a prompt. The text appears while it is generated."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature must be above 0, got {temperature}; for the most likely text use --greedy.")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}.")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no character become lone surrogates
        raise ValueError(f"--prompt must be UTF-8 text, got {quoted(prompt)}.") from None

    if checkpoint is None:
        checkpoint = shipped_language_model()

    import torch

    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer

    folder = find_checkpoint(checkpoint)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, device)
    tokens = tokenizer(prompt)["input_ids"] or [model.config.bos_token_id]
    if tokens == [None]:
        raise ValueError("The prompt is empty, and this model has no beginning-of-sequence token to start from.")
    context = model.config.max_position_embeddings
    free = context - len(tokens)
    if free < (max_new_tokens or 1):
        limit = f"; --max-new-tokens can be at most {free}" if free > 0 else ""
        raise ValueError(
            f"The model's context of {context} tokens cannot hold the prompt's {len(tokens)} and "
            f"{max_new_tokens or 'any'} new ones{limit}."
        )

    torch.manual_seed(seed)
    # The options say how tokens are chosen, and not the checkpoint's penalties or beams.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    model.generation_config = type(model.generation_config)(eos_token_id=ends)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": 0}
    input_ids = torch.tensor([tokens], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens or min(DEFAULT_TOKENS, free),
        pad_token_id=tokenizer.pad_token_id,
        streamer=StdoutStreamer(tokenizer),
        do_sample=not greedy,
        **({} if greedy else sampling),
    )


def shipped_language_model() -> Path:
    """Return the package's language model, after a line on stderr that says so. Raises ValueError if there is none."""
    name = shipped_models.LANGUAGE_MODEL
    if name not in shipped_models.pretrained_names():
        raise ValueError(
            f"No CHECKPOINT is named, and this copy of the package was built without its model {name}: train one, for "
            "example by `diff-lab train language`, and name its folder."
        )
    folder = shipped_models.pretrained(name)
    console.say(
        f"No checkpoint is named, so this is {name}: {_summary(folder)}. It comes with the package; "
        f"{Path(folder) / 'README.md'} says what it can do."
    )
    return Path(folder)


class StdoutStreamer:
    """Writes generated text to stdout as it comes; in a terminal control characters show as "�"."""

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)

    def put(self, tokens: Any) -> None:
        """Write the text that the next tokens add: a tensor of the prompt's, and then of each new one."""
        self._write("".join(self._texts.read(token).text for token in tokens.flatten().tolist()))

    def end(self) -> None:
        """Write the text that was held back, and end the line."""
        self._write(self._texts.rest() + "\n")

    def _write(self, text: str) -> None:
        if sys.stdout.isatty():
            text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)
        sys.stdout.write(text)
        sys.stdout.flush()
