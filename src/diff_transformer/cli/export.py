"""`diff-transformer export`"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diff_transformer.cli import require_extra

if TYPE_CHECKING:
    from diff_transformer.report.card import Form, SharedModel
    from diff_transformer.results import ResultsFile
    from diff_transformer.train import Recipe

DTYPES = ("float32", "bfloat16", "float16")
# Under which section a run on this kind of data is measured.
SECTIONS = {"text": "language", "retrieval": "retrieval"}
# What the Hub calls that which our models do; the base model does nothing of its own.
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


def export(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A run folder, or a folder with config.json and weights.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make; it must not exist.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write an ONNX graph with its cache instead, compared with the model.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help=f"Of the weights: {', '.join(DTYPES)}.", show_default="the checkpoint's own")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Most bytes of weights in a file, like 500MB.", show_default="5GB")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="A results file for the model card (may be repeated).", show_default="the run's or demo's results.json"
        ),
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", help="The licence the card names, by the Hub's name for it, e.g. mit.")
    ] = None,
) -> None:
    """Write a model as a folder to share: weights, tokenizer and a model card filled from what was measured."""
    _check_options(onnx, dtype, max_shard_size)
    if onnx:
        require_extra("onnx")
    from diff_transformer.cli import console
    from diff_transformer.cli.checkpoints import find_checkpoint, find_recipe, load_model, load_tokenizer
    from diff_transformer.convert import MAX_SHARD_SIZE, export_folder, export_onnx
    from diff_transformer.convert.export import check_shard_size
    from diff_transformer.convert.folder import UnfinishedFolder
    from diff_transformer.report.card import model_card

    console.quiet_libraries()
    shard_size = max_shard_size or MAX_SHARD_SIZE
    check_shard_size(shard_size)
    UnfinishedFolder.refuse_existing(target)
    folder = find_checkpoint(checkpoint)
    recipe = find_recipe(folder)
    measured = _results(folder, recipe, results or [])
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    auto_class = _auto_class(folder)
    if onnx and auto_class != "AutoModelForCausalLM":
        raise ValueError(f"--onnx writes language models, and {str(folder)!r} loads with {auto_class}.")
    model = load_model(folder, "cpu", auto_class, "float32" if onnx else dtype)
    form: Form = "onnx" if onnx else "package"
    shared = _describe(model, form, target, folder, auto_class, tokenizer is not None)
    settings = recipe.model_dump(mode="json") if recipe else None
    card = model_card(shared, settings, measured, license=license_name)
    if onnx:
        console.messages().print(f"Writing {target} and comparing it with the model …")
        files = export_onnx(model, tokenizer, target, card=card)
    else:
        files = export_folder(model, tokenizer, target, card=card, max_shard_size=shard_size)
    for file in files:
        console.output().print(f"{file} ({file.stat().st_size:,} bytes)")


def _check_options(onnx: bool, dtype: str | None, max_shard_size: str | None) -> None:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    if not onnx:
        return
    if dtype not in (None, "float32"):
        raise ValueError(f"--onnx writes float32, so --dtype cannot be {dtype}.")
    if max_shard_size:
        raise ValueError("--max-shard-size is for folders of safetensors, and --onnx writes none.")


def _auto_class(folder: Path) -> str:
    """The name of transformers' class that loads the model in a folder."""
    from diff_transformer.files import read_json
    from diff_transformer.model.remote_code import AUTO_CLASSES

    named = read_json(folder / "config.json").get("architectures") or [""]
    return next((auto for auto, ours in AUTO_CLASSES.items() if ours == named[0]), "AutoModelForCausalLM")


def _describe(model: Any, form: "Form", target: Path, folder: Path, auto_class: str, tokenizer: bool) -> "SharedModel":
    from diff_transformer import __version__
    from diff_transformer.report.card import SharedModel

    step = folder.name.removeprefix("step-")
    return SharedModel(
        name=target.name,
        form=form,
        needed=__version__,
        config=model.config.to_dict(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        task=TASKS.get(auto_class),
        auto_class=auto_class,
        has_tokenizer=tokenizer,
        step=int(step) if step != folder.name and step.isdigit() else None,
    )


def _results(folder: Path, recipe: "Recipe | None", named: list[Path]) -> "list[ResultsFile]":
    """The results files that the user names, or those about this very model: beside it, of its run or of its demo."""
    from diff_transformer.results import read_results

    if named:
        return [read_results(file) for file in named]
    # A checkpoint from the middle of a run is not what was measured at its end.
    places = [folder, *(list(folder.resolve().parents)[:2] if folder.name == "model" else [])]
    found = [read_results(place / "results.json") for place in places if (place / "results.json").is_file()]
    return [about for results in found if (about := _about(results, folder, recipe)) is not None]


def _about(results: "ResultsFile", folder: Path, recipe: "Recipe | None") -> "ResultsFile | None":
    """What of a results file is about the model in a folder; None where it is about others."""
    settings = results.settings
    if "checkpoint" in settings:
        return results if Path(settings["checkpoint"]).resolve() == folder.resolve() else None
    if recipe is None:
        return None
    # A demo's settings hold the recipe that its twins share, by name.
    trained = recipe.model_dump(mode="json", exclude={"model": {"attention_type"}})
    shared = settings.get(recipe.name)
    if not isinstance(shared, dict) or any(shared.get(part) != trained[part] for part in ("model", "data", "train")):
        return None
    section = SECTIONS[recipe.data.kind]
    return replace(
        results, records=tuple(record for record in results.records if record.name.startswith(f"{section}/"))
    )
