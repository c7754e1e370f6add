"""The command `export` writes a model as a folder to share, or as an ONNX graph."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diff_transformer.cli import console
from diff_transformer.cli.console import Checkpoint, optional
from diff_transformer.cli.extras import require_extra
from diff_transformer.shipped_models import CARD_RECORD, pretrained, pretrained_names

if TYPE_CHECKING:
    from diff_transformer.lab.record import ResultsFile
    from diff_transformer.lab.report.model_card import Form, SharedModel
    from diff_transformer.train import Recipe

# Auto class → the name of its task on the Hub. The base model has no task.
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


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
        optional("A results file for the model card (may be repeated).", "the run's or demo's results.json"),
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
    from diff_transformer.cli.recipe_options import find_recipe
    from diff_transformer.convert import MAX_SHARD_SIZE, export_folder, export_onnx
    from diff_transformer.convert.conversion import shard_bytes
    from diff_transformer.lab.record import CardRecord
    from diff_transformer.lab.report.model_card import model_card
    from diff_transformer.lab.results_files import read_record
    from diff_transformer.storage.files import refuse_existing

    shard_size = shard_bytes(max_shard_size or MAX_SHARD_SIZE)
    refuse_existing(target)
    folder = find_checkpoint(checkpoint)
    recipe = find_recipe(folder)
    measured = _results(folder, recipe, results or [])
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    auto_class = auto_class_of(folder)
    if onnx and auto_class != "AutoModelForCausalLM":
        raise ValueError(f"--onnx writes language models, and {str(folder)!r} loads with {auto_class}.")
    model = load_model(folder, "cpu", auto_class, "float32" if onnx else dtype)
    step = folder.name.removeprefix("step-")
    facts = read_record(folder / CARD_RECORD, CardRecord) if (folder / CARD_RECORD).is_file() else None
    shared = replace(
        described(target.name, "onnx" if onnx else "package", model, tokenizer, recipe, auto_class),
        step=int(step) if step != folder.name and step.isdigit() else None,
    )
    settings = recipe.model_dump(mode="json") if recipe else None
    card = model_card(shared, settings, measured, license=license_name, facts=facts)
    if onnx:
        console.messages().print(f"Writing {target} and comparing it with the model …")
        files = export_onnx(model, tokenizer, target, card=card)
    else:
        files = export_folder(model, tokenizer, target, card=card, max_shard_size=shard_size)
    for file in files:
        console.output().print(f"{file} ({file.stat().st_size:,} bytes)")


def described(
    name: str, form: "Form", model: Any, tokenizer: Any | None, recipe: "Recipe | None", auto_class: str
) -> "SharedModel":
    """What a card says of a model, with its tokenizer and recipe if it has them, that `auto_class` loads."""
    from diff_transformer._version import __version__
    from diff_transformer.lab.report.model_card import SharedModel

    return SharedModel(
        name=name,
        form=form,
        needed=__version__,
        config=model.config.to_dict(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        task=TASKS.get(auto_class),
        auto_class=auto_class,
        has_tokenizer=tokenizer is not None,
        data=recipe.data.describe() if recipe else None,
        length=recipe.data.length if recipe else None,
    )


def _results(folder: Path, recipe: "Recipe | None", named: list[Path]) -> "list[ResultsFile]":
    """The results files that the user names, or those about this model beside it, in its run or in its demo.

    What is named results.json in a folder above the model's may be anybody's: it is passed over where it is no results
    file.
    """
    from diff_transformer.lab.results_files import read_results

    if named:
        return [read_results(file) for file in named]
    # The results of a run are about its final model, not about a checkpoint from the middle.
    beside = folder / "results.json"
    candidates = [read_results(beside)] if beside.is_file() else []
    for parent in list(folder.resolve().parents)[:2] if folder.name == "model" else []:
        if (parent / "results.json").is_file():
            with suppress(OSError, ValueError):
                candidates.append(read_results(parent / "results.json"))
    return [about for results in candidates if (about := _results_about(results, folder, recipe)) is not None]


def _results_about(results: "ResultsFile", folder: Path, recipe: "Recipe | None") -> "ResultsFile | None":
    """The part of a results file that is about the model in a folder; None where there is none."""
    settings = results.settings
    if "checkpoint" in settings:
        measured = [settings["checkpoint"]]
        measured += [pretrained(name) for name in measured if name in pretrained_names()]
        return results if folder.resolve() in [Path(path).resolve() for path in measured] else None
    if recipe is None:
        return None
    # The settings of a demo hold, by name, the recipe that its models share except for the attention type.
    trained = recipe.model_dump(mode="json", exclude={"model": {"attention_type"}})
    shared = settings.get(recipe.name)
    if not isinstance(shared, dict) or any(shared.get(part) != trained[part] for part in ("model", "data", "train")):
        return None
    # The recipe's name begins the names of what was measured of its models.
    about_model = tuple(record for record in results.records if record.name.startswith(f"{recipe.name}/"))
    return replace(results, records=about_model)
