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
        results: the results files to show; of none, those about this model beside it or in its run.

    Raises:
        ValueError, OSError: a file of results, or the recipe, is not valid.
    """

    def __init__(self, folder: Path, results: list[Path]) -> None:
        self._folder = folder
        self._recipe = find_recipe(folder)
        self._results = _results(folder, results)
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
        parameters=exported.parameters,
        task=exported.task,
        auto_class=exported.auto_class,
        has_tokenizer=exported.tokenizer is not None,
        data=recipe.data.describe() if recipe else None,
        length=recipe.data.length if recipe else None,
    )


def _results(folder: Path, named: list[Path]) -> list[ResultsFile]:
    """Return the results files that the user names, or those beside the model or in its run that are of this model."""
    if named:
        return [read_results(file) for file in named]
    # The results of a run are about its final model, not about a checkpoint from the middle.
    found = [read_results(folder / "results.json")] if (folder / "results.json").is_file() else []
    if folder.name == "model":
        with suppress(OSError, ValueError):  # there is none, or another program's
            found.append(read_results(folder.parent / "results.json"))
    return [results for results in found if _is_about(results, folder)]


def _is_about(results: ResultsFile, folder: Path) -> bool:
    measured = results.settings.get("checkpoint")
    if not isinstance(measured, str) or not measured:
        return False
    path = pretrained(measured) if measured in pretrained_names() else measured
    return Path(path).resolve() == folder.resolve()
