"""Every kind of data that a recipe can name says what it is, and its plan agrees with its batches."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from diff_lab.data import byte_tokenizer
from diff_lab.files import cache_folder
from diff_lab.train import build_data, load_recipe
from diff_lab.train.recipe import KINDS, AnyData, Data, GeneratedData

SMALL: dict[str, dict[str, Any]] = {
    "text": {"length": 64, "batch_size": 2},
    "masked_text": {"length": 64, "batch_size": 2},
    "retrieval": {"batch_size": 2},
    "recall": {"pairs": 6, "questions": 3, "batch_size": 2},
    "many_shot": {"shots": 6, "batch_size": 2},
    "arithmetic": {"batch_size": 2},
}
OF_TEXT = ("text", "masked_text")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("One sentence of a text. Another one that is a little longer!\n" * 2000)
    return file


def settings(kind: str, text: Path) -> dict[str, Any]:
    return {"kind": kind, **SMALL[kind], **({"paths": [str(text)]} if kind in OF_TEXT else {})}


def test_a_tilde_is_the_users_folder(text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(text.read_bytes())
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    named = {"paths": ["~/a.txt"], "cache": "~/cache", "tokenizer": "~/tokenizer"}
    section: Any = TypeAdapter(AnyData).validate_python({**settings("text", text), **named})
    assert section.build(3).batches.vocab_size == 257
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "cache", "tokenizer"}
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", "~/other")
    assert cache_folder() == tmp_path / "other"


@pytest.mark.parametrize("kind", KINDS)  # each has settings above
def test_what_a_kind_says_of_its_batches_is_true(kind: str, text: Path) -> None:
    section: Any = TypeAdapter(AnyData).validate_python(settings(kind, text))
    assert type(section) is KINDS[kind]
    data: Data = section.build(3)
    batch = data.batches.train_batch(1)
    shapes = {tuple(data.batches.train_batch(step)["input_ids"].shape) for step in range(1, 40)}
    assert max(shapes) == (section.batch_size, section.length)
    assert int(batch["input_ids"].max()) < data.batches.vocab_size == section.vocabulary()
    assert data.tokenizer is not None or issubclass(KINDS[kind], GeneratedData)
    assert data.tokenizer is None or len(data.tokenizer) == data.batches.vocab_size
    reseeded = section.build(4).batches
    assert not batch["input_ids"].equal(reseeded.train_batch(1)["input_ids"])
    described = section.describe()
    assert ("text.txt" in described) == (kind in OF_TEXT)
    assert not described.endswith(".")


def test_a_recipe_of_needles_is_read_but_not_trained(text: Path) -> None:
    data = f"data={{kind: needles, paths: {text}, length: 64, batch_size: 2, share: 0.5, needles: 2, digits: 3}}"
    recipe = load_recipe("language", [data])
    assert recipe.data.describe() == "text.txt, with needle documents among it"
    with pytest.raises(ValueError, match=r"^Data of kind 'needles' is no longer made: train on data\.kind=recall"):
        build_data(recipe)


@pytest.mark.parametrize(
    ("source", "described"),
    [
        ({}, "the source of Python's standard library"),
        ({"paths": ["here/a.txt", "there/b"]}, "a.txt, b"),
        ({"dataset": "wikitext"}, "the data set wikitext"),
    ],
)
def test_where_text_comes_from(source: dict[str, Any], described: str) -> None:
    assert KINDS["text"](**SMALL["text"], **source).describe() == described
    assert KINDS["masked_text"](**SMALL["masked_text"], **source).describe() == f"{described}, with hidden tokens"
