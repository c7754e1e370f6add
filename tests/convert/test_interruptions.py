"""A conversion that is interrupted anywhere leaves no folder, and goes on where it was."""

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import DiffLlamaForCausalLM

from diff_transformer.convert import conversion, convert_from
from diff_transformer.convert.conversion import ResumableDirectory
from diff_transformer.convert.layout import Weights
from diff_transformer.model.remote_code import code_files
from full_run import short_run

Folder = Callable[..., Path]
SIZE = 15000  # of a shard
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


def convert(source: Path, target: Path, size: int = SIZE, **options: Any) -> None:
    convert_from("diffllama", source, target, max_shard_size=size, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class Saved(list[str]):
    """Names of the weight files that were written, as they are."""


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Saved:
    names = Saved()

    def save(tensors: dict[str, Tensor], file: Path, **options: Any) -> None:
        names.append(file.name.partition(".safetensors")[0])
        save_file(tensors, file, **options)

    monkeypatch.setattr(conversion, "save_file", save)
    return names


def test_files_of_the_new_folder(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    convert(source, tmp_path / "new", progress=lambda done, total: reports.append((done, total)))
    new = contents(tmp_path / "new")
    index = json.loads(new["model.safetensors.index.json"])
    shards = set(index["weight_map"].values())
    assert len(shards) > 3
    assert new.keys() == {*shards, *BESIDE, *code_files(), "config.json", "model.safetensors.index.json"}
    assert {name: new[name].decode() for name in BESIDE} == BESIDE
    assert index["metadata"]["total_size"] == reports[-1][0] == reports[-1][1]
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    assert len(reports) == len(shards) + 1
    assert not (tmp_path / ".unfinished-new").exists()


def interrupted_writes(at: int, when: str) -> Callable[..., None]:
    """ResumableDirectory.write that stops before, within or after file number `at`."""
    write, numbers = ResumableDirectory.write, itertools.count()

    def writing(self: Any, name: str, fill: Callable[[Path], object]) -> None:
        def half(part: Path) -> None:
            fill(part)
            part.write_bytes(part.read_bytes()[:-1])
            raise KeyboardInterrupt

        number = next(numbers)
        if number == at and when == "before":
            raise KeyboardInterrupt
        write(self, name, half if number == at and when == "within" else fill)
        if number == at:
            raise KeyboardInterrupt

    return writing


@pytest.mark.parametrize("when", short_run(["before", "within", "after"], ["within"]))
def test_interrupted_at_every_file(
    when: str, source: Path, tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole")
    expected, shards = contents(tmp_path / "whole"), len(saved)
    for at in range(len(expected)):
        with monkeypatch.context() as patch:
            patch.setattr(ResumableDirectory, "write", interrupted_writes(at, when))
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "new")
        assert {file.name for file in tmp_path.iterdir()} == {"theirs", "whole", ".unfinished-new"}
        saved.clear()
        reports: list[int] = []
        convert(source, tmp_path / "new", progress=lambda done, total, reports=reports: reports.append(done))
        done = min(at + (when == "after"), shards)
        assert len(saved) == shards - done  # a finished file is not written again
        assert (reports[0] > 0) == (done > 0)
        assert contents(tmp_path / "new") == expected
        assert {file.name for file in tmp_path.iterdir()} == {"theirs", "whole", "new"}
        shutil.rmtree(tmp_path / "new")


def interrupt(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert, and stop when all weights are written."""

    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumableDirectory, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target)


@pytest.mark.parametrize("change", ["weights", "settings", "size", "tokenizer", "broken job"])
def test_another_job_begins_anew(
    change: str, source: Path, tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(source, tmp_path / "new", monkeypatch)
    first, size = len(saved), SIZE
    if change == "weights":
        shard = sorted(source.glob("*.safetensors"))[0]
        os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))
    elif change == "settings":
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (source / "config.json").write_text(json.dumps({**config, "eos_token_id": 3}), encoding="utf-8")
    elif change == "size":
        size = 2 * SIZE
    elif change == "tokenizer":
        (source / "tokenizer.json").unlink()
    else:
        job = tmp_path / ".unfinished-new/job.json"
        job.write_text(job.read_text(encoding="utf-8")[:20], encoding="utf-8")
    saved.clear()
    convert(source, tmp_path / "new", size)
    assert saved
    assert len(saved) == first or change == "size"
    convert(source, tmp_path / "whole", size)
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


@pytest.mark.parametrize("at", [0, 2])
def test_a_full_disk(at: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As safetensors says it; the half of a file is removed, the whole ones stay."""
    full = True

    def save(tensors: dict[str, Tensor], file: Path, **options: Any) -> None:
        if full and f"{at + 1:05}-of" in file.name:
            file.write_bytes(b"half")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, file, **options)

    monkeypatch.setattr(conversion, "save_file", save)
    with pytest.raises(
        OSError, match=r"model-0000\d-of-\d+\.safetensors could not be written \(.*No space left"
    ) as caught:
        convert(source, tmp_path / "new")
    assert "the same command resumes" in str(caught.value)
    assert not (tmp_path / "new").exists()
    assert len(contents(tmp_path / ".unfinished-new")) == at + 2  # the lock, the job, and the whole files
    full = False
    convert(source, tmp_path / "new")
    convert(source, tmp_path / "whole")
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")


def test_somebody_else_made_the_folder_meanwhile(source: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        (tmp_path / "new").mkdir(exist_ok=True)

    with pytest.raises(FileExistsError, match="exists already"):
        convert(source, tmp_path / "new", progress=progress)
    assert not any((tmp_path / "new").iterdir())


def test_one_conversion_to_a_folder_at_a_time(source: Path, tmp_path: Path) -> None:
    """Two that write the same folder would mix their files; the second is refused and disturbs nothing."""

    def progress(done: int, total: int) -> None:
        for size in (SIZE, 2 * SIZE):  # the same job, and another
            with pytest.raises(FileExistsError, match="is being made by another process"):
                convert(source, tmp_path / "new", size)

    convert(source, tmp_path / "new", progress=progress)
    convert(source, tmp_path / "whole")
    assert contents(tmp_path / "new") == contents(tmp_path / "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"theirs", "whole", "new"}


def test_interrupted_when_the_folder_has_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ResumableDirectory.finish

    def finishing(self: Any) -> None:
        finish(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumableDirectory, "finish", finishing)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "new")
    expected = contents(tmp_path / "new")
    shutil.rmtree(tmp_path / "new")
    convert(source, tmp_path / "new")
    assert contents(tmp_path / "new") == expected
    assert {file.name for file in tmp_path.iterdir()} == {"theirs", "new"}


def test_one_file_s_weights_are_in_memory_at_a_time(
    source: Path, tmp_path: Path, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = Weights.read, []

    def reading(self: Weights, key: str) -> Tensor:
        reads.append((key, len(saved)))
        return read(self, key)

    monkeypatch.setattr(Weights, "read", reading)
    convert(source, tmp_path / "new")
    assert {before for _, before in reads} == set(range(len(saved)))
    for number, file in enumerate(sorted((tmp_path / "new").glob("*.safetensors"))):
        with safe_open(file, framework="pt") as opened:
            held = {key.replace(".lam.", ".lambda_") for key in opened.keys()}  # noqa: SIM118  # not a mapping
        assert {key for key, before in reads if before == number} == {key for key in held if "head_norm" not in key}


def test_a_dtype_for_each_tensor_is_kept(
    source: Path, tmp_path: Path, tensors: Callable[..., dict[str, Tensor]]
) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    mixed = {key: x.to(dtypes[index % 4]) for index, (key, x) in enumerate(sorted(tensors(source).items()))}
    for file in source.glob("*.safetensors"):
        file.unlink()
    (source / "model.safetensors.index.json").unlink()
    save_file(mixed, source / "model.safetensors")
    convert(source, tmp_path / "new")
    new = tensors(tmp_path / "new")
    for key in ("mlp.up_proj.weight", "self_attn.q_proj.weight", "input_layernorm.weight"):
        for layer in range(3):
            name = f"model.layers.{layer}.{key}"
            assert new[name].dtype == mixed[name].dtype
