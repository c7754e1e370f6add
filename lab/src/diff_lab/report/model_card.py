"""Writes the model card, README.md of a shared folder, from results files and a recipe and from nothing else."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData

from diff_lab.record import CardRecord, Result, ResultsFile
from diff_lab.report.documents import Table, fill
from diff_lab.report.tables import NOTE, UNPAIRED, rows_of
from diff_lab.report.wording import LEVELS, levels_text, variant_label, variants_of
from diff_transformer._version import INSTALL
from diff_transformer.attention_types import ATTENTION_TYPES

# A folder for this package, such a folder inside the package, or a graph of ONNX.
Form = Literal["package", "shipped", "onnx"]

# The settings of a recipe's retrieval task that tell what its sequences are.
_TASK = ("num_pairs", "length", "num_queries", "repeats", "num_keys", "num_values", "num_noise")


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """The facts of a model's card that are neither in its recipe nor in its results.

    `needed` is the version of this package that loads it, `config` the content of its config.json, `task` the Hub's
    name of its task, and `step` that of a run's checkpoint, None for the run's end. Of its recipe there are the data in
    a few words and the tokens of a training sequence.
    """

    name: str
    form: Form
    needed: str
    config: Mapping[str, Any]
    parameters: int
    task: str | None
    auto_class: str
    has_tokenizer: bool
    step: int | None = None
    data: str | None = None
    length: int | None = None

    @property
    def variant(self) -> str:
        return str(self.config["attention_type"])


def model_card(
    model: SharedModel,
    recipe: Mapping[str, Any] | None,
    results: Sequence[ResultsFile] = (),
    *,
    license: str | None = None,  # noqa: A002  # the front matter's own word
    facts: CardRecord | None = None,
) -> str:
    """Return the text of README.md: front matter for the Hub, how to load the model, its training and measurements.

    All of `results` is shown, whichever model is better; no licence is claimed unless the Hub's name of one is given,
    here or by `facts`. Raises ValueError if two files hold the same measurement.
    """
    records = _all_records(results)
    front = ModelCardData(
        license=license or (facts.license if facts else None),
        library_name="onnx" if model.form == "onnx" else "transformers",
        pipeline_tag=model.task if model.has_tokenizer else None,
        tags=["diff-transformer", "arxiv:2410.05258", *(["onnx"] if model.form == "onnx" else [])],
    )
    variants = variants_of(records)
    heads = [variant_label(variant) + " (this model)" * (variant == model.variant) for variant in variants]
    baselines = [level for file in results for level in file.baselines if level.is_accuracy]
    levels = {level.name: f" ({levels_text(level)})" for level in baselines}
    rows = [[f"{row.section}: {row.label}{levels.get(row.name, '')}", *row.texts(variants)] for row in rows_of(records)]
    notes = [UNPAIRED if len(variants) > 1 else "No other model was measured beside it.", *([LEVELS] if levels else [])]
    caption = " ".join([f"{NOTE}.", *notes])
    described = ATTENTION_TYPES.get(model.variant)
    return fill(
        "model_card.md",
        front=front.to_yaml(),
        model=model,
        kind=f"with attention of the type {model.variant!r}." if described is None else described.summary,
        install=INSTALL,
        attention=variant_label(model.variant),
        recipe=recipe,
        recipe_text=yaml.safe_dump(dict(recipe or {}), sort_keys=False, allow_unicode=True),
        measured=Table(head=("measure", *heads), rows=rows, caption=caption) if records else None,
        is_measured=model.variant in variants,
        files=results,
        facts=facts,
        task={} if recipe is None else {name: value for name, value in recipe["data"].items() if name in _TASK},
    )


def _all_records(results: Sequence[ResultsFile]) -> list[Result]:
    """Return the records of all files: models that were measured by two commands stand in one table."""
    records = [record for file in results for record in file.records]
    counts = Counter((record.name, record.variant, record.coordinates, record.seed) for record in records)
    for (name, variant, *_), count in counts.items():
        if count > 1:
            raise ValueError(
                f"Two results hold {name} of {variant_label(variant)}; give one of the files that hold it."
            )
    return records
