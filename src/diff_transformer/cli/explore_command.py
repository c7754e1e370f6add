"""The command `explore` shows the attention maps of a checkpoint in the browser, or writes them as a page."""

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diff_transformer import shipped_models
from diff_transformer.cli import console
from diff_transformer.cli.console import Device, optional
from diff_transformer.cli.extras import require_extra

if TYPE_CHECKING:
    from diff_transformer.explorer import Example, Explorer, Side

# What is opened where no checkpoint is named: DIFF on the left, the Transformer on the right.
SHIPPED_PAIR = ("novels-diff", "novels-softmax")
FIRST_TEXT = (
    "The old house stood at the end of the lane, behind a row of black poplars. Nobody had lived in the old house for "
    "twenty years, and nobody in the village remembered who had planted the row of black"
)
LOOPBACK = "127.0.0.1"
_TRIED = 32  # needles, of which the first that the model finds is shown first


def explore(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="CHECKPOINT",
            help="The differential model: the folder of a run or of a model. DiffLlama works, too.",
            show_default=f"{SHIPPED_PAIR[0]}, which comes with the package",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        optional("The model beside it: any causal language model of transformers.", "none", metavar="TRANSFORMER"),
    ] = None,
    text: Annotated[str | None, optional("The text that the page opens with.", "an example")] = None,
    port: Annotated[int | None, optional("The port to listen on.", "a free one", min=1, max=65535)] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; the default is this machine alone.")] = LOOPBACK,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address and open no browser.")] = False,
    output: Annotated[
        Path | None,
        optional("Write one HTML file that works without a server, and serve nothing.", "none", metavar="PAGE.HTML"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    device: Device = None,
) -> None:
    """See the noise cancel: two attention maps of each head, and what is left when one is taken from the other.

    The page lets you move λ and follow the next token's distribution, the loss and the attention on the answer. It is
    served on this machine alone, under an address with a random part, until Ctrl-C.
    """
    if output is None:
        require_extra("explore")
    else:
        console.refuse("--output", {"--port": port, "--no-browser": no_browser})
        console.refuse_existing([output], "page", overwrite=overwrite)
    if checkpoint is None:
        checkpoint, compare = _shipped_pair(compare)

    if output is not None:
        write_recorded_page(checkpoint, compare, output, text=text, device=device)
        console.print_line(f"{output} shows the maps without a server or a network.")
        return

    explorer = build_explorer(checkpoint, compare, text, device)
    from diff_transformer.explorer.server import ExplorerServer

    server = ExplorerServer(explorer, host, port or 0)
    console.print_line(server.address)
    console.messages().print("Ctrl-C ends it.", markup=False)
    if not no_browser:
        webbrowser.open(server.address)
    server.serve()


def _shipped_pair(compare: Path | None) -> tuple[Path, Path]:
    """The models that come with the package. Raises ValueError where there are none."""
    left, right = SHIPPED_PAIR
    names = shipped_models.pretrained_names()
    if left not in names:
        raise ValueError(
            f"No CHECKPOINT is named, and this copy of the package was built without its model {left}: train one, for "
            "example by `diff-transformer demo`, and name its folder."
        )
    return Path(left), compare or Path(right)


def write_recorded_page(
    checkpoint: Path, compare: Path | None, output: Path, *, text: str | None = None, device: str | None = None
) -> None:
    """Write the page of two models as one file, over a file that is there. Raises ValueError as `build_explorer`."""
    from diff_transformer.explorer.recorded_page import recorded_page
    from diff_transformer.storage.files import write_atomically

    write_atomically(output, recorded_page(build_explorer(checkpoint, compare, text, device)))


def build_explorer(checkpoint: Path, compare: Path | None, text: str | None, device: str | None) -> "Explorer":
    """Load the models and what they read.

    Raises:
        ValueError: the checkpoint is not differential, or a text that it cannot read.
    """
    from diff_transformer.cli.checkpoints import find_checkpoint
    from diff_transformer.explorer import Example, Explorer

    folders = [find_checkpoint(path) for path in (checkpoint, compare) if path is not None]
    sides = [_load_side(folder, device) for folder in folders]
    left = sides[0]
    if not left.model.subtracts:
        raise ValueError(
            f"{str(checkpoint)!r} has ordinary attention, which subtracts nothing; name a differential model as "
            "CHECKPOINT, and this one as --compare."
        )
    examples, draw = _examples(folders[0], left)
    if text is not None:
        left.model.check_tokens(left.vocabulary.encode(text))
        examples.insert(0, Example("Your text", text))
    return Explorer(left, sides[1] if len(sides) > 1 else None, examples, draw)


def _load_side(folder: Path, device: str | None) -> "Side":
    from diff_transformer.cli.checkpoints import load_model, load_tokenizer, shown_folder
    from diff_transformer.explorer import ExploredModel, Side, TokenizerVocabulary, WordVocabulary

    shown = shown_folder(folder)
    model = ExploredModel(load_model(folder, device), (shown.parent.name if shown.name == "model" else shown.name))
    if (folder / "tokenizer.json").is_file():
        return Side(model, TokenizerVocabulary(load_tokenizer(folder)))
    task = _retrieval_task(folder)
    return Side(model, WordVocabulary(task.words() if task else [str(token) for token in range(model.vocab_size)]))


def _retrieval_task(folder: Path) -> Any:
    """The retrieval task that a model was trained on, or None."""
    from diff_transformer.cli.checkpoints import find_recipe
    from diff_transformer.data import RetrievalBatches

    recipe = find_recipe(folder)
    if recipe is None or recipe.data.kind != "retrieval":
        return None
    from diff_transformer.train.run_setup import build_data

    batches = build_data(recipe).batches
    assert isinstance(batches, RetrievalBatches)
    return batches


def _fitting(text: str, side: "Side") -> str:
    """The first words of a text, as many as leave a quarter of the model's context for what it writes."""
    words = text.split()
    while len(words) > 1 and len(side.vocabulary.encode(" ".join(words))) > 0.75 * side.model.most_tokens:
        del words[-1]
    return " ".join(words)


def _examples(folder: Path, side: "Side") -> tuple[list["Example"], Any]:
    """Texts to begin with, and what draws others by a seed."""
    from diff_transformer.explorer import Answer, Example

    if (folder / "tokenizer.json").is_file():
        return [Example("A house at the end of the lane", _fitting(FIRST_TEXT, side))], None
    task = _retrieval_task(folder)
    if task is None:
        length = min(16, side.model.most_tokens)
        return [Example("The first tokens", " ".join(str(i % side.model.vocab_size) for i in range(length)))], None

    def draw(seed: int) -> Example:
        sample = task.sample(1, seed)
        query, place = int(sample.query_positions[0, 0]), int(sample.answer_spans[0, 0])
        tokens = sample.input_ids[0, : query + 1].tolist()
        title = f"Needles {seed + 1}: what was the value of {side.vocabulary.pieces(tokens[-1:])[0]}?"
        return Example(title, " ".join(side.vocabulary.pieces(tokens)), Answer(query, place, place + 1))

    return [next((example for example in map(draw, range(_TRIED)) if _is_answered(side, example)), draw(0))], draw


def _is_answered(side: "Side", example: "Example") -> bool:
    """Whether the model finds the value that an example asks for."""
    assert example.answer is not None
    trace = side.model.trace(side.vocabulary.encode(example.text))
    return int(trace.next_log_probabilities.argmax()) == trace.tokens[example.answer.begin]
