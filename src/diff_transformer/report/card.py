"""The model card: README.md of a shared folder, filled from results files and a recipe, and from nothing else."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

import yaml
from huggingface_hub import EvalResult, ModelCardData

from diff_transformer import INSTALL
from diff_transformer.report.rows import UNCLEAR, arm_label, arms_of, lines_of, rows_of
from diff_transformer.report.table import NOTE
from diff_transformer.results import Result, ResultsFile

Form = Literal["package", "onnx"]

PAPER = "[Differential Transformer](https://arxiv.org/abs/2410.05258)"
KINDS = {
    "diff": f"with differential attention ({PAPER}, Equations 1 to 3).",
    "diff_v2": f"with differential attention in its second version, after {PAPER}.",
    "softmax": f"with ordinary attention: the twin that a {PAPER} is compared with.",
    "dex": f"with ordinary attention and a trainable correction of its heads, after {PAPER} "
    "and [DEX](https://arxiv.org/abs/2505.16333).",
}
MEASURED_ON = {"retrieval": ("synthetic", "multi-needle retrieval from a seeded generator")}
# What a recipe's data are, where they are no text; by their kind.
SYNTHETIC = {
    "retrieval": MEASURED_ON["retrieval"][1],
    "many_shot": "many-shot classification from a seeded generator",
    "arithmetic": "sums worked out step by step, from a seeded generator",
}
UNKNOWN_DATA = ("unknown", "not recorded")


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """What a card says about a model that is neither in its recipe nor in its results.

    Attributes:
        name: of the folder.
        form: how it is loaded: "package" with this package, or "onnx".
        needed: version of this package.
        config: the configuration, as config.json has it.
        parameters: how many.
        task: the Hub's name of what it does, e.g. "text-generation", or None.
        auto_class: transformers' class that loads it.
        has_tokenizer: whether one is beside it.
        step: the optimizer step of a run's checkpoint; None for its end.
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

    @property
    def arm(self) -> str:
        return str(self.config["attention_type"])


def model_card(
    model: SharedModel,
    recipe: Mapping[str, Any] | None,
    results: Sequence[ResultsFile] = (),
    *,
    license: str | None = None,  # noqa: A002  # the front matter's own word
) -> str:
    """The text of README.md: front matter for the Hub, how to load the model, how it was trained, what was measured.

    Args:
        model: which model.
        recipe: of the run that trained it, or None where that is not known.
        results: of this model, its twin's too where they were measured; all of it is shown, whoever is better.
        license: the Hub's name of a licence, e.g. "mit"; none is claimed unless it is given.

    Raises:
        ValueError: two files hold the same measurement.
    """
    records = _together(results)
    index = list(_index(model, recipe, results))
    front = ModelCardData(
        license=license,
        library_name="onnx" if model.form == "onnx" else "transformers",
        pipeline_tag=model.task if model.has_tokenizer else None,
        tags=["diff-transformer", "arxiv:2410.05258", *(["onnx"] if model.form == "onnx" else [])],
        model_name=model.name if index else None,
        eval_results=index or None,
    )
    parts = [
        f"# {model.name}",
        f"A {'language model' if model.task == 'text-generation' else 'Transformer'} "
        + KINDS.get(model.arm, f"with attention of the type {model.arm!r}."),
        *_loading(model),
        *_training(model, recipe),
        *_measurements(model, results, records),
    ]
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def _together(results: Sequence[ResultsFile]) -> list[Result]:
    """The records of all files: twins that were measured by two commands stand in one table."""
    found: dict[tuple[Any, ...], Result] = {}
    for record in (record for file in results for record in file.records):
        key = (record.name, record.arm, record.group, record.seed)
        if key in found:
            raise ValueError(
                f"Two results hold {record.name} of {arm_label(record.arm)}; give one of the files that hold it."
            )
        found[key] = record
    return list(found.values())


def _index(
    model: SharedModel, recipe: Mapping[str, Any] | None, results: Sequence[ResultsFile]
) -> Iterator[EvalResult]:
    """What was measured of this model, for the Hub: without times and sizes, and without what is not finite."""
    for file in results:
        for row in rows_of(file.records):
            result = row.cells.get(model.arm)
            if result is None or result.better is None or result.unit == "s" or not math.isfinite(result.value):
                continue
            kind, data = _data(row.section, recipe, file)
            low, high = result.interval or (None, None)
            details = {"n": result.n, "seed": result.seed, "low": low, "high": high}
            yield EvalResult(
                task_type=model.task or "text-generation",
                dataset_type=kind,
                dataset_name=data,
                metric_type=result.name.split("/", 1)[-1],
                metric_name=row.label.rstrip(" ↑↓") + (f", {row.group}" if row.group else ""),
                metric_value=result.value,
                metric_args={name: value for name, value in details.items() if value is not None} or None,
            )


def _data(section: str, recipe: Mapping[str, Any] | None, file: ResultsFile) -> tuple[str, str]:
    """The Hub's kind of a dataset and its name, for what was measured under `section`."""
    if section in MEASURED_ON:
        return MEASURED_ON[section]
    if section == "harness":
        return "lm-evaluation-harness", ", ".join(map(str, file.settings.get("tasks", []))) or "lm-evaluation-harness"
    if file.settings.get("text"):
        return "text", _names(file.settings["text"])
    if section == "language" and recipe is not None and recipe["data"]["kind"] == "text":
        return "text", f"held-out part of {_text_of(recipe['data'])}"
    return UNKNOWN_DATA


def _text_of(data: Mapping[str, Any]) -> str:
    return _names(data["paths"]) if data.get("paths") else "the source of Python's standard library"


def _names(paths: Sequence[str]) -> str:
    """Names of files; the folders that they lay in are in the recipe."""
    return ", ".join(PurePath(path).name or path for path in paths)


def _loading(model: SharedModel) -> Iterator[str]:
    yield "## Load it"
    if model.form == "onnx":
        yield (
            f'```python\nimport onnxruntime\n\nsession = onnxruntime.InferenceSession("{model.name}/model.onnx")\n'
            "print([slot.name for slot in session.get_inputs()], [slot.name for slot in session.get_outputs()])\n```"
        )
        yield (
            "Inputs are `input_ids` and `position_ids` (batch, tokens), `attention_mask` (batch, cached + tokens), all "
            "int64, and float32 keys and values of each layer (batch, heads, cached, width), with nothing cached at "
            "first. Outputs are `logits`, and the keys and values to hand in with the next tokens."
        )
        return
    lines = ["import diff_transformer  # which makes transformers know the model"]
    lines += [f"from transformers import {model.auto_class}" + (", AutoTokenizer" if model.has_tokenizer else ""), ""]
    lines += [f'model = {model.auto_class}.from_pretrained("{model.name}")']
    if model.has_tokenizer:
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("{model.name}")']
    yield f"It needs the Python package diff-transformer, {model.needed} or later: {INSTALL}."
    yield "\n".join(["```python", *lines, "```"])
    yield "Without that import, `trust_remote_code=True` loads it: the folder's two code files import the package."


def _training(model: SharedModel, recipe: Mapping[str, Any] | None) -> Iterator[str]:
    yield "## What was trained"
    config = model.config
    sizes = f"{config['num_hidden_layers']} of width {config['hidden_size']}"
    heads = f"{config['num_attention_heads']} of width {config['head_dim']} (as the twin Transformer counts them)"
    facts = {
        "attention": f"{arm_label(model.arm)} (`{model.arm}`)",
        "parameters": f"{model.parameters:,}",
        "layers": sizes,
        "heads": heads,
        "context": f"{config['max_position_embeddings']:,} tokens",
    }
    if (norm := config.get("headwise_norm")) is not None:  # a row of Table 6 that is not the type's usual form
        facts["norm of each head"] = "yes" if norm else "no"
    if recipe is None:
        yield _table(["", ""], facts.items())
        yield "No recipe belongs to this checkpoint, so how it was trained is not recorded."
        return
    data, train = recipe["data"], recipe["train"]
    steps = min(train["steps"], model.step or train["steps"])
    part = f" of {train['steps']:,}, so it is not finished" if steps < train["steps"] else ""
    text = _text_of(data) if data["kind"] in ("text", "needles") else SYNTHETIC[data["kind"]]
    length = data["shots"] * (data["item_length"] + 1) if data["kind"] == "many_shot" else data["length"]
    facts |= {
        "data": f"{text}, with needle documents among it" if data["kind"] == "needles" else text,
        "steps": f"{steps:,}{part}",
        "tokens seen": f"{steps * data['batch_size'] * length:,} ({data['batch_size']} sequences of {length} a step)",
        "learning rate": f"{train['learning_rate']:g}, {train['schedule']}",
        "mixed precision": str(train["precision"]),
        "seed": str(train["seed"]),
    }
    yield _table(["", ""], facts.items())
    text = yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True)
    yield f"<details><summary>The whole recipe</summary>\n\n```yaml\n{text}```\n\n</details>"


def _measurements(model: SharedModel, results: Sequence[ResultsFile], records: Sequence[Result]) -> Iterator[str]:
    yield "## What was measured"
    if not records:
        yield "There are no results for this checkpoint, so nothing is claimed about how good it is."
        return
    arms = arms_of(records)
    heads = [f"{arm_label(arm)} (this model)" if arm == model.arm else arm_label(arm) for arm in arms]
    twins = len(arms) > 1
    lines = [
        [f"{line.section}: {line.label}", *(line.cells[arm] for arm in arms), *([line.verdict.text] if twins else [])]
        for line in lines_of(records)
    ]
    yield _table(["measure", *heads, *(["better"] if twins else [])], lines)
    yield f"{NOTE}; where they overlap, “{UNCLEAR}”." if twins else f"{NOTE}. Nothing was measured beside it."
    if model.arm not in arms:
        yield "This model itself is not among them."
    for file in results:
        yield from (str(note) for note in file.settings.get("notes", []))
        versions = ", ".join(f"{name} {version}" for name, version in file.versions.items())
        commit = f"commit {file.commit}" if file.commit else "not from a git checkout"
        yield f"Measured on {file.device}, {file.created}, with {versions}, {commit}, by"
        yield f"```\n{file.command}\n```"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |" for line in lines)
