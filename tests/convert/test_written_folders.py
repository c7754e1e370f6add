"""The folder of a conversion: what is in it, and that it is there whole or not at all."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import DiffLlamaForCausalLM

import commands
from diff_transformer.convert import convert_from
from diff_transformer.model.configuration import code_files

Folder = Callable[..., Path]
BESIDE = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"x": 1}',
    "generation_config.json": '{"do_sample": true}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "LICENSE.txt": "Anyone may.",
}


@pytest.fixture
def source(theirs: Folder) -> Path:
    """A checkpoint in several files, with a tokenizer, and with files that are not carried along."""
    folder = theirs(DiffLlamaForCausalLM, "9KB")
    (folder / "additional_chat_templates").mkdir()
    for name, text in {**BESIDE, "README.md": "A Llama.", "optimizer.bin": "…"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def convert(source: Path, target: Path, **options: Any) -> None:
    convert_from("diffllama", source, target, max_shard_size=15_000, **options)


def names(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def test_files_of_the_new_folder(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    convert(source, tmp_path / "new", progress=lambda done, total: reports.append((done, total)))
    index = json.loads((tmp_path / "new/model.safetensors.index.json").read_text(encoding="utf-8"))
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    assert names(tmp_path / "new") == {*shards, *BESIDE, *code_files(), "config.json", "model.safetensors.index.json"}
    assert {name: (tmp_path / "new" / name).read_text(encoding="utf-8") for name in BESIDE} == BESIDE
    assert index["metadata"]["total_size"] == reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) == len(shards) + 1
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "new"}


def test_one_file_s_weights_are_in_memory_at_a_time(source: Path, tmp_path: Path) -> None:
    held: list[int] = []

    def count(done: int, total: int) -> None:
        held.append(sum(x.nbytes for x in gc.get_objects() if type(x) is Tensor))

    convert(source, tmp_path / "new", progress=count)
    assert max(held) <= held[0] + 1000  # of what has been written nothing is left


@pytest.mark.parametrize("at", [0, 2])
def test_an_interruption_leaves_nothing(at: int, source: Path, tmp_path: Path) -> None:
    reports: list[int] = []

    def interrupt(done: int, total: int) -> None:
        reports.append(done)
        if len(reports) > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "new", progress=interrupt)
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_a_full_disk(source: Path, tmp_path: Path) -> None:
    with (
        commands.largest_file(4000),
        pytest.raises(OSError, match=r"model-0000\d-of-\d+\.safetensors could not be written: .*[Ff]ile too large"),
    ):
        convert(source, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_somebody_else_made_the_folder_meanwhile(source: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        (tmp_path / "new").mkdir(exist_ok=True)

    with pytest.raises(FileExistsError, match="exists already"):
        convert(source, tmp_path / "new", progress=progress)
    assert not any((tmp_path / "new").iterdir())
