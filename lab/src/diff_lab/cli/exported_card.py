"""Writes the model card of a model that `diff-transformer export` shares, with its recipe and its measurements."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from diff_lab.cli.recipe_options import find_recipe
from diff_lab.record import CardRecord, ResultsFile
from diff_lab.report.model_card import Form, SharedModel, model_card
from diff_lab.results_files import read_record, read_results
from diff_transformer._version import __version__
from diff_transformer.convert import Exported
from diff_transformer.shipped_models import CARD_RECORD, pretrained, pretrained_names

if TYPE_CHECKING:
    from diff_lab.train import Recipe


class ExportedCard:
    """The card of the model in a folder, which `diff-transformer export` finds as the entry point of its group.

    Args:
        folder: the model's, as `find_checkpoint` gives it.
        results: the results files to show; of none, those about this model beside it, in its run or in its demo.

    Raises:
        ValueError, OSError: a file of results, or the recipe, is not valid.
    """

    def __init__(self, folder: Path, results: list[Path]) -> None:
        self._folder = folder
        self._recipe = find_recipe(folder)
        self._results = _results(folder, self._recipe, results)
        self._facts = read_record(folder / CARD_RECORD, CardRecord) if (folder / CARD_RECORD).is_file() else None

    def text(self, exported: Exported) -> str:
        """Return the card, README.md."""
        form: Form = "onnx" if exported.is_graph else "package"
        step = self._folder.name.removeprefix("step-")
        shared = replace(
            shared_model(exported, form, self._recipe),
            step=int(step) if step != self._folder.name and step.isdigit() else None,
        )
        settings = self._recipe.model_dump(mode="json") if self._recipe else None
        return model_card(shared, settings, self._results, license=exported.license, facts=self._facts)


def shared_model(exported: Exported, form: Form, recipe: "Recipe | None") -> SharedModel:
    """Return a model's facts for its card, with its recipe, if it has one."""
    return SharedModel(
        name=exported.name,
        form=form,
        needed=__version__,
        config=exported.model.config.to_dict(),
        parameters=sum(parameter.numel() for parameter in exported.model.parameters()),
        task=exported.task,
        auto_class=exported.auto_class,
        has_tokenizer=exported.tokenizer is not None,
        data=recipe.data.describe() if recipe else None,
        length=recipe.data.length if recipe else None,
    )


def _results(folder: Path, recipe: "Recipe | None", named: list[Path]) -> list[ResultsFile]:
    """Return the results files that the user names, or those about this model beside it, in its run or in its demo.

    A results.json in a folder above the model's may be anybody's: it is passed over if it is no results file.
    """
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


def _results_about(results: ResultsFile, folder: Path, recipe: "Recipe | None") -> ResultsFile | None:
    """Return the part of a results file that is about the model in a folder; None if there is none."""
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
