"""`diff-transformer generate`"""

from pathlib import Path
from typing import Annotated

import typer

from diff_transformer.cli import LARGEST_SEED

# Unless told: so many tokens, or as many as the context has room for.
DEFAULT_TOKENS = 200


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run folder, or a folder with config.json and weights.")
    ],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many tokens to write at most.", show_default=f"{DEFAULT_TOKENS}, if there is room"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Above 1 bolder, towards 0 more certain.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Another seed draws another text.")] = 0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    device: Annotated[str | None, typer.Option(help="Where to run.", show_default="the GPU, if any")] = None,
) -> None:
    """Write on from a prompt; the text appears as it is written."""
    if not 0 < temperature < float("inf"):
        raise ValueError(f"--temperature must be above 0, got {temperature}; for the likeliest text use --greedy.")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {top_p}.")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no character become lone surrogates
        raise ValueError(f"--prompt must be UTF-8 text, got {prompt!r}.") from None

    import torch

    from diff_transformer.cli import console
    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer
    from diff_transformer.cli.streaming import Writer

    console.quiet_libraries()
    folder = find_checkpoint(checkpoint)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, device)
    tokens = tokenizer(prompt)["input_ids"]
    start = model.config.bos_token_id
    if not tokens and start is None:
        raise ValueError("The prompt is empty, and this model has no token to start a text with.")
    tokens = tokens or [start]
    new = _room(len(tokens), model.config.max_position_embeddings, max_new_tokens)

    torch.manual_seed(seed)
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": temperature, "top_p": top_p}
    input_ids = torch.tensor([tokens], device=model.device)
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new,
        pad_token_id=tokenizer.pad_token_id,
        streamer=Writer(tokenizer, skip_special_tokens=True),
        **sampling,
        **({} if greedy else {"top_k": 0}),
    )


def _room(prompt: int, context: int, wanted: int | None) -> int:
    """How many tokens to write. Raises ValueError where the context has no room for them."""
    if prompt >= context:
        raise ValueError(
            f"The prompt has {prompt} tokens, but the model's context holds {context}, the new ones included."
        )
    if wanted is not None and prompt + wanted > context:
        raise ValueError(
            f"The prompt's {prompt} tokens and {wanted} new ones are more than the model's context of {context}; "
            f"--max-new-tokens can be at most {context - prompt}."
        )
    return wanted if wanted is not None else min(DEFAULT_TOKENS, context - prompt)
