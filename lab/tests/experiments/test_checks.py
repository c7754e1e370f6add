"""What can be known to fail after hours of training is said before it: text too small, impossible settings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from corpora import written
from diff_lab.experiments.definitions import find_experiment
from diff_lab.experiments.request import ExperimentRequest, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.measure.measurement import MeasurementRequest
from diff_lab.train import build_data, load_recipe

SHORT = ("train.steps=2", "train.evaluate_every=null", "train.warmup_steps=0")
TEXT = (*SHORT, "data.tokenizer=bytes", "data.vocab_size=null", "data.length=48", "data.batch_size=2")
SHEEP = " ".join(f"{number} sheep jump over the fence." for number in range(60))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    written([f"{number}: {SHEEP}" for number in range(20)], folder)
    return folder


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One document, whose end is all there is to validate with."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(SHEEP * 20, encoding="utf-8")
    return path


def tiny(name: str, text: Path, *overrides: str, **options: Any) -> ExperimentRequest:
    experiment = find_experiment(name)
    on_text = experiment.presets["cpu"].trains_on_text
    request = request_experiment(experiment, text=[text] if on_text else [], options=options)
    extension = ("data.length=64", "data.batch_size=1", *SHORT) if request.preset.extension else ()
    overrides = (*request.preset.overrides, *(TEXT if on_text else SHORT), *overrides)
    return replace(request, preset=replace(request.preset, overrides=overrides, extension=extension))


def refused(request: ExperimentRequest, message: str, folder: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_experiment(request, folder / "output")
    assert not (folder / "output").exists()


@pytest.mark.parametrize("name", ["table6", "v2", "fig3", "fig4"])
def test_text_of_one_document(name: str, book: Path, tmp_path: Path) -> None:
    options = {"first": 8, "length": 64} if name == "fig4" else {}
    message = r"This needs two documents of (2|64) tokens or more, and of 1 the longest has \d+"
    refused(tiny(name, book, **options), message, tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fig4", {"first": 5000}, "first must lie in 2 … length = 1024, got 5000"),
        ("fig4", {"length": 50_000}, "two documents of 50000 tokens or more"),
        ("table6", {"longest": 1}, "None of 0 tokens is a 'hit' token"),
        ("v2", {"longest": 2}, r"None of \d+ tokens is a 'hit' token"),
        ("noise", {"pairs": [4, 1]}, "A context has 2 pairs or more, .*, got pairs=1"),
        ("table4", {"characters": 90_000}, "No sequence of the validation text holds 45000 characters of one document"),
        ("table4", {"judge": "nobody"}, "nobody"),
        ("table4", {"sources": "nowhere.jsonl"}, r"nowhere\.jsonl"),
        ("table1", {"tasks": "nowhere.jsonl"}, r"nowhere\.jsonl"),
    ],
)
def test_settings_that_cannot_be_had_or_have_no_room_in_the_data(
    name: str, options: dict[str, Any], message: str, long: Path, tmp_path: Path
) -> None:
    refused(tiny(name, long, **options), message, tmp_path)


@pytest.mark.parametrize("name", ["table1", "table8"])
def test_blocks_too_short_for_questions(name: str, long: Path, tmp_path: Path) -> None:
    message = "The validation text has 0 pieces of 1 characters, and the choices of a question are 4"
    refused(tiny(name, long, "data.length=42"), message, tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("noise", {"pairs": []}),
        ("fig6", {"noises": [0.1, 1.5]}),
        ("fig7", {"noises": [-0.1]}),
        ("fig7", {"orders": 1}),
        ("table6", {"documents": 1}),
        ("fig4", {"documents": 1}),
        ("table5", {"tokens": 0}),
    ],
)
def test_options_of_no_meaning_are_refused_with_the_request(name: str, options: dict[str, Any]) -> None:
    ((option, value),) = options.items()
    with pytest.raises(ValueError, match=re.escape(f"{name!r} cannot take {value} for {option} (")):
        request_experiment(find_experiment(name), options=options)


def test_needles_in_text_need_room_as_well(long: Path) -> None:
    text = [f"data.paths=['{long}']", "data.tokenizer=bytes", "data.validation_fraction=0.3", "data.length=512"]
    data = build_data(load_recipe("tiny", [*text, "data.batch_size=2"]))

    def check(**options: Any) -> None:
        request = MeasurementRequest(name="needles", options={"queried": 1, **options})
        request.resolve().check(data.batches, data.tokenizer)

    for needles in (1, 2):
        check(needles=needles)
    with pytest.raises(ValueError, match=r"queried at most as many.*got needles=1, queried=2"):
        check(needles=1, queried=2)
    with pytest.raises(ValueError, match="length=64 has no room for a haystack"):
        check(needles=1, length=64)
