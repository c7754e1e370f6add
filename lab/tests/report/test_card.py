"""The model card: every number in it is one of a results file, and what nobody measured is not claimed."""

import dataclasses
import math
import re
from typing import Any

import pytest
from huggingface_hub import ModelCard

from diff_lab.coordinates import Coordinates
from diff_lab.record import Result, ResultsFile
from diff_lab.report.model_card import SharedModel, model_card
from table_cells import tables

CONFIG = {
    "attention_type": "diff",
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
RECIPE = {
    "name": "language",
    "model": {"attention_type": "diff", "hidden_size": 128},
    "data": {"kind": "text", "paths": ["/home/someone/books/shore.txt"], "length": 256, "batch_size": 16},
    "train": {"steps": 400, "learning_rate": 2e-3, "schedule": "linear", "precision": "no", "seed": 7},
}
MODEL = SharedModel(
    name="shore",
    form="package",
    needed="0.1.0",
    config=CONFIG,
    parameters=857_856,
    task="text-generation",
    auto_class="AutoModelForCausalLM",
    has_tokenizer=True,
    data="shore.txt",
    length=256,
)


def result(name: str, variant: str, value: float, **more: Any) -> Result:
    return Result(name=name, variant=variant, value=value, **{"better": "lower", **more})


def file(*records: Result, **more: Any) -> ResultsFile:
    origin = {
        "command": "diff-lab demo --seed 7",
        "device": "AMD EPYC, 2 threads",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "0123abc",
        "created": "2026-01-01T12:00:00+00:00",
        "title": "Twins",
        "settings": {},
    }
    return ResultsFile(**{**origin, **more}, records=records)


LOSING = file(
    result("language/bits_per_byte", "diff", 2.5643, interval=(2.55, 2.58), n=99450, unit="bits/byte"),
    result("language/bits_per_byte", "softmax", 2.3331, interval=(2.32, 2.35), n=99450, unit="bits/byte"),
    result("language/seconds", "diff", 138.0, unit="s"),
    result("language/parameters", "diff", 857_856, better=None),
)


def row(card: str, label: str) -> list[str]:
    """The cells of a row of any table."""
    (cells,) = [cells for table in tables(card) for cells in table if cells[0].startswith(label)]
    return cells


def test_the_front_matter_is_what_the_hub_reads() -> None:
    card = ModelCard(model_card(MODEL, RECIPE, [LOSING], license="apache-2.0"))
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "apache-2.0"
    assert "arxiv:2410.05258" in card.data.tags


def test_both_models_are_shown_whichever_is_better() -> None:
    card = model_card(MODEL, RECIPE, [LOSING])
    assert row(card, "measure") == ["measure", "DIFF (this model)", "Transformer"]
    assert row(card, "language: bits per byte") == [
        "language: bits per byte ↓",
        "2.564 [2.550, 2.580]",
        "2.333 [2.320, 2.350]",
    ]
    assert row(card, "language: training time")[1:] == ["138", "–"]
    assert "paired seeds" in card
    for origin in ("AMD EPYC, 2 threads", "torch 2.13.0", "commit 0123abc", "diff-lab demo --seed 7"):
        assert origin in card


def test_the_twins_own_card_names_itself() -> None:
    softmax = dataclasses.replace(MODEL, config={**CONFIG, "attention_type": "softmax"})
    card = model_card(softmax, RECIPE, [LOSING])
    assert row(card, "measure")[1:3] == ["DIFF", "Transformer (this model)"]
    other_model = dataclasses.replace(MODEL, config={**CONFIG, "attention_type": "diff_v2"})
    card = model_card(other_model, RECIPE, [LOSING])
    assert "This model itself is not among them." in card


def test_files_of_two_commands_stand_in_one_table() -> None:
    ours, theirs = file(LOSING.records[0]), file(LOSING.records[1], device="another machine", commit=None)
    card = model_card(MODEL, RECIPE, [ours, theirs])
    assert row(card, "language: bits per byte")[1:] == ["2.564 [2.550, 2.580]", "2.333 [2.320, 2.350]"]
    assert "Measured on AMD EPYC" in card
    assert "Measured on another machine" in card
    assert "not from a git checkout" in card
    with pytest.raises(ValueError, match="Two results hold language/bits_per_byte of DIFF; give one of the files"):
        model_card(MODEL, RECIPE, [ours, ours])


def test_groups_are_a_range_and_what_diverged_is_shown() -> None:
    depths = [
        result("retrieval/accuracy_by_depth", "diff", 0.1 * n, coordinates=Coordinates(part=f"{n} %"), seed=3)
        for n in (1, 2)
    ]
    lost = result("harness/a|b/acc", "diff", math.nan)
    card = model_card(MODEL, None, [file(*depths, lost, settings={"notes": ["One text was cut."]})])
    assert row(card, "retrieval: accuracy by depth")[1] == "0.100 … 0.200"
    assert row(card, "harness: a|b/acc")[1] == "not known"
    assert "No other model was measured beside it." in card
    assert "One text was cut." in card


def test_how_it_was_trained() -> None:
    card = model_card(MODEL, RECIPE)
    assert row(card, "parameters")[1] == "857,856"
    assert row(card, "steps")[1] == "400"
    assert row(card, "tokens seen")[1] == f"{400 * 16 * 256:,} (16 sequences of 256 a step)"
    assert row(card, "data")[1] == "shore.txt"
    assert "```yaml\nname: language\n" in card
    assert "There are no results for this checkpoint, so nothing is claimed" in card
    part = model_card(dataclasses.replace(MODEL, step=100), RECIPE)
    assert row(part, "steps")[1] == "100 of 400, so it is not finished"
    assert row(part, "tokens seen")[1].startswith(f"{100 * 16 * 256:,} ")
    without = model_card(dataclasses.replace(MODEL, has_tokenizer=False), None)
    assert "how it was trained is not recorded" in without
    assert ModelCard(without).data.to_dict() == {
        "library_name": "transformers",
        "tags": ["diff-transformer", "arxiv:2410.05258"],
    }


@pytest.mark.parametrize("form", ["package", "onnx"])
def test_the_lines_that_load_it(form: Any) -> None:
    card = model_card(dataclasses.replace(MODEL, form=form), RECIPE)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code, "README.md", "exec")
    assert len([line for line in code.splitlines() if line]) <= 4
    assert ("trust_remote_code=True" in card) is (form == "package")
    assert ("import diff_transformer" in code) is (form == "package")
    assert ("onnx" in ModelCard(card).data.tags) is (form == "onnx")
    assert ModelCard(card).data.library_name == ("onnx" if form == "onnx" else "transformers")


def test_a_row_of_table_6_says_how_it_departs_from_its_type() -> None:
    config = CONFIG | {"attention_type": "softmax"}
    assert "norm of each head" not in model_card(dataclasses.replace(MODEL, config=config), RECIPE)
    for setting, word in ((True, "yes"), (False, "no")):
        card = model_card(dataclasses.replace(MODEL, config=config | {"headwise_norm": setting}), RECIPE)
        assert row(card, "norm of each head") == ["norm of each head", word]
