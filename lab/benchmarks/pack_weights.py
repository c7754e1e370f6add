"""Pack a trained run as a model that comes with the package, src/diff_transformer/weights/NAME.

    python lab/benchmarks/pack_weights.py novels-diff RUN --commit SHA
    python lab/benchmarks/fill_readme.py

NAME is a family, "novels" or "needles", and the run's attention type. The folder has all that `from_pretrained` loads,
the recipe, text of the run's held-out part for a model of text (`held_out.jsonl`), the numbers that `diff-transformer
eval NAME` takes of the stored weights (`results.json`), and the card, for people (`README.md`) and for programs
(`card.json`). Of files and folders it has the names alone, not where they lie on this machine. It has no code files for
`trust_remote_code`: whoever finds the folder has imported the package, and `diff-transformer export NAME DST` writes a
copy with them.

Models of text are stored in bfloat16, half of the size, but for λ. They are computed in float32, as config.json says:
so the numbers hold on every processor. What the rounding costs is measured, and no more than ROUNDING is allowed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diff_lab.cli.eval_command import evaluate_measures
from diff_lab.cli.exported_card import shared_model
from diff_lab.cli.recipe_options import find_recipe
from diff_lab.data import TextFiles
from diff_lab.data.corpus import DOCUMENT, document_row, split
from diff_lab.files import read_metrics
from diff_lab.measure.standard import LANGUAGE_LOSS
from diff_lab.record import CardRecord, ResultsFile
from diff_lab.report.model_card import model_card
from diff_lab.results_files import write_json, write_text
from diff_lab.train import Recipe, build_data
from diff_lab.train.recipe import dump_recipe
from diff_lab.train.run_setup import METRICS, write_examples
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.cli.checkpoints import find_checkpoint, load_model, load_tokenizer
from diff_transformer.cli.console import quiet_libraries
from diff_transformer.convert import Exported
from diff_transformer.model.configuration import code_files
from diff_transformer.shipped_models import CARD_RECORD, HELD_OUT, WEIGHTS
from diff_transformer.utils.files import clean_up, commit, files_in, read_json, refuse_existing, unfinished_path

HELD_OUT_CHARACTERS = 50_000
# Held-out novels whose authors died after 1955, so that their text is protected in Europe: it does not come along.
PROTECTED = ("ENG19180_Lewis",)
ROUNDING = 0.005  # nats a token by which storing may change the loss
LICENSE = "mit"  # of the weights: the package's own
_HEADING = "# How this model was trained, every setting spelled out; of files and folders the names alone.\n"


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the models of a family share. In `summary` and `data` stand what `card_record` fills in."""

    kind: str  # of the recipe's data
    dtype: torch.dtype  # of the stored weights
    tolerance: float  # of the numbers that are measured again
    summary: str
    use: str
    limits: str
    data: str
    data_license: str


FAMILIES = {
    "novels": Family(
        kind="text",
        dtype=torch.bfloat16,
        tolerance=0.001,
        summary="{label} with {parameters:.2f}M parameters, trained on {trained_on} English novels",
        use="To try the package without training anything: to write text, to look at attention maps, to measure, "
        "export and convert a model. Models whose names begin alike have other kinds of attention.",
        limits="A model of this size writes in the manner of its books, without sense. It knows no facts and repeats "
        "the views of the nineteenth century: nothing that it writes is to be relied on. It was trained once, with one "
        "seed, so that being ahead of another or behind it says nothing about the kinds of attention; "
        "docs/experiments.md of the repository compares them over seeds.",
        data="{documents} English novels, 1840–1920, of the European Literary Text Collection (ELTeC, "
        "doi:10.5281/zenodo.3462536) as plain text, {held_out} of them held out",
        data_license="the novels were published before 1931, so they are in the public domain in the United States; "
        "where works are protected for seventy years after their author's death, a few of the latest still are, and no "
        "passage of theirs comes with the model. The collection's markup, CC BY 4.0, is not part of the text",
    ),
    "needles": Family(
        kind="retrieval",
        dtype=torch.float32,
        tolerance=0.005,
        summary="{label} with {parameters:.2f}M parameters, trained to find needles among tokens of noise",
        use="To look at how attention finds what it is asked for: attention maps of queries that are answered, "
        "accuracy by depth. Models whose names begin alike have other kinds of attention.",
        limits="It knows the tokens of its task and no text, and contexts as long as those it was trained on. It was "
        "trained once, with one seed, so that being ahead of another or behind it says nothing about the kinds of "
        "attention; docs/experiments.md of the repository compares them over seeds.",
        data="sequences from a seeded generator: pairs of a key and a value hidden among tokens of noise, then queries",
        data_license="none is needed, as the sequences are random numbers",
    ),
}


def pack(name: str, run: Path, root: Path, trained_at: str, *, overwrite: bool) -> tuple[Path, ResultsFile]:
    """Write the finished run in the folder `run` as the model `name` in the folder `root`.

    `trained_at` is the commit of the code that trained it. Returns the model's folder and its results. Raises
    ValueError or OSError, with `root` as it was, where the run does not suit the name or is not finished.
    """
    family_name, _, attention_type = name.partition("-")
    if family_name not in FAMILIES or attention_type not in ATTENTION_TYPES:
        raise ValueError(f"A model that the package ships is called {'|'.join(FAMILIES)}-TYPE, not {name!r}.")
    family, target = FAMILIES[family_name], root / name
    if not overwrite:
        refuse_existing(target)
    folder = find_checkpoint(run)
    recipe = find_recipe(folder)
    if folder.name != "model" or recipe is None:
        raise ValueError(f"{str(run)!r} is not the folder of a finished run: it lacks model/ or recipe.yaml.")
    if (recipe.data.kind, recipe.model.attention_type) != (family.kind, attention_type):
        raise ValueError(
            f"The run in {str(run)!r} has attention type {recipe.model.attention_type!r} and data of the kind "
            f"{recipe.data.kind!r}, which is not what {name} means."
        )
    last = read_metrics(folder.parent / METRICS)[-1]
    validation = {key: value for key, value in last.items() if key.startswith("validation/")}
    documents = documents_of(recipe) if family.kind == "text" else []
    passages = held_out_passages(documents)
    tokenizer = load_tokenizer(folder) if passages else None
    model = load_model(folder, "cpu", dtype="float32")
    public = without_folders(recipe)

    clean_up(target)
    unfinished = unfinished_path(target)
    unfinished.mkdir(parents=True)
    try:
        write_text(unfinished / "recipe.yaml", _HEADING + dump_recipe(public))
        if family.kind == "retrieval":
            write_examples(unfinished, build_data(recipe))
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
            lines = [json.dumps(passage, ensure_ascii=False) + "\n" for passage in passages]
            write_text(unfinished / HELD_OUT, "".join(lines))
        write_weights(model, unfinished, torch.float32)
        results = measured(unfinished, name)
        if family.dtype != torch.float32:
            write_weights(model, unfinished, family.dtype)
            results = with_rounding(measured(unfinished, name), results, family.dtype)
        write_json(unfinished / "results.json", results)
        record = card_record(family, recipe, model, documents, commit=trained_at, validation=validation)
        write_json(unfinished / CARD_RECORD, record)
        shared = shared_model(Exported(name, model, tokenizer, "AutoModelForCausalLM"), "shipped", public)
        card = model_card(shared, public.model_dump(mode="json"), [results], facts=record)
        write_text(unfinished / "README.md", card)
        commit(unfinished, target, replace=True)
    finally:
        clean_up(target)
    return target, results


def without_folders(recipe: Recipe) -> Recipe:
    """A recipe whose files and folders are names alone: where they lie on this machine concerns nobody."""
    settings = recipe.model_dump()
    data, model = settings["data"], settings["model"]
    for section, key in ((data, "paths"), (data, "tokenizer"), (model, "init_from")):
        value = section.get(key)
        if value:
            section[key] = [Path(path).name for path in value] if isinstance(value, list) else Path(value).name
    if "cache" in data:
        data["cache"] = None
    return Recipe.model_validate(settings)


class Document(NamedTuple):
    """A text file of a run's data, and how many of its bytes, from the beginning, the run was trained on."""

    file: Path
    bytes: int
    trained: int


def documents_of(recipe: Recipe) -> list[Document]:
    """The documents of a recipe's text, which are .txt files."""
    data: Any = recipe.data
    corpus = TextFiles(data.paths, data.text_field)
    files = map(Path, corpus.files())
    rows = list(map(document_row, corpus.documents()))
    trained = split(np.array(rows, dtype=DOCUMENT), data.validation_fraction).tolist()
    return [Document(file, size, part) for file, (size, _), part in zip(files, rows, trained, strict=True)]


def held_out_passages(documents: Sequence[Document]) -> list[dict[str, str]]:
    """About HELD_OUT_CHARACTERS from the middles of what was kept from training, with the documents' names."""
    kept = {
        document.file.stem: document.file.read_bytes()[document.trained :].decode(errors="ignore")
        for document in documents
        if document.trained < document.bytes and document.file.stem not in PROTECTED
    }
    return [{"source": name, "text": middle(text, HELD_OUT_CHARACTERS // len(kept))} for name, text in kept.items()]


def middle(text: str, size: int) -> str:
    """At most `size` characters from the middle of a text, whole paragraphs where these are not longer than that."""
    if len(text) <= size:
        return text.strip("\n")
    start = (len(text) - size) // 2
    part = text[start : start + size]
    return (part.partition("\n\n")[2].rpartition("\n\n")[0] or part).strip("\n")


def write_weights(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write weights in a dtype, and a configuration that has them computed in float32 and names no code files."""
    model.to(dtype).save_pretrained(folder)
    for name in code_files():
        (folder / name).unlink()
    settings = read_json(folder / "config.json")
    del settings["auto_map"]
    write_json(folder / "config.json", {**settings, "dtype": "float32"})


def measured(folder: Path, name: str) -> ResultsFile:
    """What `diff-lab eval NAME` measures."""
    ((results, _),) = evaluate_measures(folder, None, [], [], "cpu")
    return replace(
        results,
        title=f"Evaluation of {name}",
        settings={"checkpoint": name, "text": [HELD_OUT] if (folder / HELD_OUT).is_file() else None},
        command=f"diff-lab eval {name} --device cpu",
    )


def with_rounding(stored: ResultsFile, exact: ResultsFile, dtype: torch.dtype) -> ResultsFile:
    """The results of rounded weights, with a note on those before. Raises ValueError where these are far off."""
    name = str(dtype).removeprefix("torch.")
    after, before = ({one.name: one.value for one in file.records}[LANGUAGE_LOSS] for file in (stored, exact))
    if abs(after - before) > ROUNDING:
        raise ValueError(
            f"Rounding the weights to {name} changes the loss from {before:.4f} to {after:.4f} nats a "
            f"token, by more than {ROUNDING}."
        )
    note = f"Before the weights were rounded to {name}, the loss on this text was {before:.4f} nats a token."
    return replace(stored, settings={**stored.settings, "notes": [note]})


def card_record(family: Family, recipe: Recipe, model: Any, documents: Sequence[Document], **of_run: Any) -> CardRecord:
    """What the card says of a model, which is in its stored dtype; `of_run` are the record's `commit` and
    `validation`."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    held_out = [document.file.stem for document in documents if document.trained < document.bytes]
    shown = [name for name in held_out if name not in PROTECTED]
    counted = {
        "label": ATTENTION_TYPES[recipe.model.attention_type].label,
        "parameters": count / 1e6,
        "documents": len(documents),
        "trained_on": sum(document.trained > 0 for document in documents),
        "held_out": len(held_out),
    }
    return CardRecord(
        summary=family.summary.format(**counted),
        use=family.use,
        limits=family.limits,
        data=family.data.format(**counted),
        data_license=family.data_license,
        license=LICENSE,
        parameters=count,
        dtype=str(family.dtype).removeprefix("torch."),
        bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        tolerance=family.tolerance,
        held_out=f"from the middle of {', '.join(shown)}" if shown else None,
        **of_run,
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="such as novels-diff or needles-softmax")
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--commit", required=True, help="of the code that trained the run")
    parser.add_argument("--output", type=Path, default=WEIGHTS, help="another folder of models, for a rehearsal")
    parser.add_argument("--overwrite", action="store_true", help="replace the model of that name")
    options = parser.parse_args(arguments)
    quiet_libraries()
    try:
        folder, results = pack(options.name, options.run, options.output, options.commit, overwrite=options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    overall = [f"{record.name}: {record.value:.4f}" for record in results.records if not record.coordinates]
    print("\n".join([*overall, *results.settings.get("notes", [])]))
    for file in files_in(folder):
        print(f"{file} ({file.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main(sys.argv[1:])
