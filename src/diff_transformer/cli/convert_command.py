"""The commands `convert` and `export` write a model as a folder: in another layout, to share, or as an ONNX graph."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.cli import console, require_extra
from diff_transformer.cli.console import Checkpoint, optional

# The text that ranks heads for DEX: at most this many sequences of this many tokens, from its beginning.
SEQUENCES, LENGTH = 16, 512
CHARACTERS = 16  # of a token, at most, of any language's text


def chosen_heads(choice: str, source: Path, text: list[Path] | None) -> list[list[int]] | None:
    """Return the heads of each layer that DEX corrects; None for all. `choice` is the value of --dex-heads."""
    if choice.endswith("%"):
        return _widest_heads(choice, source, text)
    if text:
        raise ValueError(f"--dex-text goes with --dex-heads as a share like 25%, got --dex-heads {choice}.")
    if choice == "all":
        return None
    try:
        return TypeAdapter(list[list[int]]).validate_json(choice, strict=True)
    except ValidationError:
        raise ValueError(
            f"--dex-heads must be all, a share like 25%, or a list for each layer like [[0, 3], []], got {choice}."
        ) from None


def _widest_heads(choice: str, source: Path, text: list[Path] | None) -> list[list[int]]:
    try:
        share = float(choice.removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"--dex-heads as a share must be more than 0% and up to 100%, got {choice}.")
    if not text:
        raise ValueError("--dex-heads as a share needs --dex-text, on which the heads are ranked.")
    import torch

    from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer
    from diff_transformer.convert.loaded_models import head_entropies, widest_heads

    files = [file for path in text for file in text_files(path)]
    folder = find_checkpoint(source, ours=False)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, None)
    model.set_attn_implementation("eager")
    length = min(LENGTH, getattr(model.config, "max_position_embeddings", LENGTH))
    tokens: list[int] = []
    for file in files:
        tokens += tokenizer(beginning(file))["input_ids"]
        if len(tokens) >= SEQUENCES * length:
            break
    if not tokens:
        raise ValueError(f"--dex-text holds no text: {', '.join(map(str, text))}.")
    sequences = list(torch.tensor(tokens[: SEQUENCES * length]).split(length))
    return widest_heads(head_entropies(model, sequences), share)


def text_files(path: Path) -> list[Path]:
    """Return a text file, or those below a folder. Raises ValueError or FileNotFoundError if there is none."""
    if path.is_dir():
        files = sorted(path.rglob("*.txt"))
        if not files:
            raise ValueError(f"--dex-text {str(path)!r} has no .txt file in it.")
        return files
    if not path.is_file():
        raise FileNotFoundError(f"--dex-text {str(path)!r} does not exist.")
    if path.suffix != ".txt":
        raise ValueError(f"--dex-text takes .txt files and folders of them, got {str(path)!r}.")
    return [path]


def beginning(file: Path) -> str:
    """Read as much of a text as can be ranked on. Raises ValueError if the file is not UTF-8."""
    try:
        with file.open(encoding="utf-8-sig") as text:
            return text.read(SEQUENCES * LENGTH * CHARACTERS)
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(file)!r} is not UTF-8: {error.reason} at byte {error.start}.") from None


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
            "With --as dex, the heads to correct: all; a share like 25% of each layer's heads, those that look "
            "most widely on --dex-text; or a list for each layer, [[0, 3], []].",
            "all",
            metavar="HEADS",
        ),
    ] = None,
    dex_text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH", help="Text to rank the heads on: a .txt file, or a folder of them; may be repeated."
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
    generation settings are copied. DST appears when it is complete; an interrupted command resumes when it is run
    again.

    Layouts: microsoft and microsoft-v2 are those of the authors' two versions, diffllama and llama are transformers',
    motif is Motif-2.6B's, and motif-2 Motif-2-12.7B's.
    """
    if (from_ is None) == (to is None):
        given = "neither" if to is None else "both"
        raise ValueError(f"convert needs either --from LAYOUT or --to LAYOUT, got {given}.")
    if as_ is not None and to is not None:
        raise ValueError(f"--as goes with --from; with --to the attention type does not change, got --as {as_}.")

    corrects_heads = as_ in ATTENTION_TYPES and ATTENTION_TYPES[as_].corrects_heads
    if not corrects_heads and any(option is not None for option in (dex_heads, dex_text, dex_lambda_start)):
        raise ValueError("--dex-heads, --dex-text and --dex-lambda-start go with --as dex.")

    from diff_transformer.cli.checkpoints import find_checkpoint
    from diff_transformer.convert import convert_from, convert_to
    from diff_transformer.utils.files import refuse_existing
    from diff_transformer.utils.manifest import require_unchanged_weights

    work: Callable[..., Any]
    if to is not None:
        folder = find_checkpoint(source)
        require_unchanged_weights(folder)
        work = partial(convert_to, to, folder, target)
    else:
        assert from_ is not None
        heads = None
        if corrects_heads:
            refuse_existing(target)  # before heads are ranked, which may take minutes
            heads = chosen_heads(dex_heads or "all", source, dex_text)
        work = partial(
            convert_from, from_, source, target, attention_type=as_, dex_heads=heads, dex_lambda_start=dex_lambda_start
        )
    try:
        with conversion_progress(console.messages()) as tell:
            done = work(max_shard_size=max_shard_size, progress=tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted; the same command resumes.") from None
    console.print_line(
        f"written: {done.folder} ({done.attention_type}, {done.tensors} tensors, {done.bytes:,} bytes of weights in "
        f"{done.shards} {'file' if done.shards == 1 else 'files'})"
    )


@contextmanager
def conversion_progress(messages: Console) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes of weights are written, of how many, as the function that it yields is called.

    A terminal gets a bar, a log ten lines.
    """
    columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal, transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, total: int) -> None:
            before, now = (size * 10 // max(1, total) for size in (int(bar.tasks[0].completed), done))
            bar.update(task, completed=done, total=total)
            if bar.disable and before < now:
                messages.print(f"{done:,} of {total:,} bytes", markup=False, soft_wrap=True)

        yield tell


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
