"""`diff-lab prepare`"""

import json
import os
from pathlib import Path

import pytest

from command_fixtures import run
from commands import fails, interrupt, succeeds
from diff_lab.data import TextBatches
from diff_lab.train import build_data, load_recipe

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def files_of(cache: Path) -> dict[str, bytes]:
    """What is in a cache, by path; but for locks."""
    files = [file for file in cache.rglob("*") if file.is_file() and file.suffix != ".lock"]
    return {str(file.relative_to(cache)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(2):
        lines = [json.dumps({"text": f"{number} {line}: to be, or not to be " * 3}) for line in range(300)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
        (folder / f"{number}.txt").write_text(f"{number} that is the question\n" * 400)
    return folder


def test_it_leaves_what_training_makes_and_training_finds_it(text: Path, tmp_path: Path) -> None:
    settings = [f"data.paths={text}", "data.tokenizer=bpe", "data.vocab_size=300"]
    data = build_data(load_recipe("tiny", [*settings, f"data.cache={tmp_path / 'own'}"]))
    result = succeeds(run("prepare", "tiny", *settings, f"data.cache={tmp_path / 'cache'}", "--workers", 2))
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "own")
    batches = data.batches
    assert isinstance(batches, TextBatches)
    assert f"{len(batches.cache.tokens):,} tokens, {batches.train_tokens:,} of them to train on" in result.stdout
    assert "vocabulary of 300" in result.stdout
    assert "tokenised: " in result.stderr
    recipe = load_recipe("tiny", [*settings, f"data.cache={tmp_path / 'cache'}"])
    build_data(recipe, tell=lambda *_: pytest.fail("it is tokenised again"))


@pytest.mark.all
def test_ctrl_c_and_the_same_command_go_on(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} to be, or not to be\n" * 3000)
    cache = tmp_path / "cache"
    command = ["prepare", "tiny", f"data.paths={tmp_path}", f"data.cache={cache}", "--workers", "1"]
    message = interrupt(
        tmp_path,
        command,
        lambda: any(file.stat().st_size for file in cache.glob("tokens/.unfinished-*/documents.bin")),
        batch_characters=100_000,
    )
    assert message.endswith("Interrupted.\n")
    (begun,) = (cache / "tokens").glob(".unfinished-*/tokens.bin")
    tokens = begun.stat().st_size // 2
    assert tokens
    # Here, in one process, as training would: only the rest is tokenised, and all is what it would have been.
    token_counts: list[int] = []
    data = build_data(load_recipe("tiny", command[2:4]), tell=lambda _, tokens: token_counts.append(tokens))
    assert token_counts[0] > tokens
    uninterrupted = build_data(load_recipe("tiny", [command[2], f"data.cache={tmp_path / 'whole'}"]))
    assert files_of(cache) == files_of(tmp_path / "whole")
    assert data.batches.source == uninterrupted.batches.source


def test_bad_input(tmp_path: Path) -> None:
    fails(run("prepare", "retrieval"), "nothing to prepare: data of the kind 'retrieval' is made in training.")
    fails(run("prepare", "tiny", f"data.paths={tmp_path / 'none'}"), "There is no text file or folder")
    assert run("prepare", "tiny", "--workers", 0).exit_code == 2
