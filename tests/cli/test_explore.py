"""The command `explore`: what it opens, what it refuses, and how it ends."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diff_transformer import shipped_models
from diff_transformer.cli.explore_command import build_explorer

pytest.importorskip("uvicorn")


def test_without_arguments_it_says_that_no_model_is_there(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shipped_models, "WEIGHTS", tmp_path)
    result = run("explore")
    assert result.exit_code == 2
    assert "No CHECKPOINT is named" in result.stderr
    assert "novels-diff" in result.stderr


def test_without_arguments_it_opens_the_shipped_pair(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_run: Path
) -> None:
    from diff_transformer.cli import explore_command

    for name in explore_command.SHIPPED_PAIR:
        (tmp_path / name).symlink_to(text_run / "model")
    monkeypatch.setattr(shipped_models, "WEIGHTS", tmp_path)
    left, right = explore_command._shipped_pair(None)
    explorer = build_explorer(left, right, None, "cpu")
    assert {side: model["name"] for side, model in explorer.describe()["models"].items()} == {
        "left": "novels-diff",
        "right": "novels-softmax",
    }


def test_a_model_of_text(text_run: Path) -> None:
    explorer = build_explorer(text_run, None, "to be <b>", "cpu")
    described = explorer.describe()
    assert described["examples"][0] == {"title": "Your text", "text": "to be <b>", "answer": None}
    assert not described["draws_examples"]
    assert "".join(explorer.run({"text": "to be <b>"})["pieces"]) == "to be <b>"


def test_a_model_of_the_retrieval_task(retrieval_run: Path) -> None:
    """Its tokens are words, and needles are drawn from its task, with the answer marked."""
    explorer = build_explorer(retrieval_run, None, None, "cpu")
    for seed in range(5):
        example = explorer.example({"seed": seed})
        words, answer = example["text"].split(), example["answer"]
        assert words[-2] == "?"
        assert words[answer["begin"] - 1] == words[-1]
        assert words[answer["begin"]].startswith("v")
        assert answer["query"] == len(words) - 1
        assert 0 <= explorer.run({"text": example["text"], "answer": answer})["answer_probability"] <= 1


def test_needles_that_the_model_finds_come_first(retrieval_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diff_transformer.cli import explore_command

    found = iter([False, False, True])
    monkeypatch.setattr(explore_command, "_is_answered", lambda *_: next(found))
    first = build_explorer(retrieval_run, None, None, "cpu").describe()["examples"][0]
    monkeypatch.setattr(explore_command, "_is_answered", lambda *_: False)
    explorer = build_explorer(retrieval_run, None, None, "cpu")
    assert first == explorer.example({"seed": 2})
    assert explorer.describe()["examples"][0] == explorer.example({"seed": 0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "The checkpoint 'nowhere' does not exist"),
        (["{run}", "--compare", "nowhere"], "The checkpoint 'nowhere' does not exist"),
        (["{run}", "--output", "{run}/config.json"], "is there already"),
        (["{run}", "--output", "page.html", "--port", "80"], "--port does not go with --output"),
        (["{run}", "--text", ""], "no tokens"),
        (["{run}", "--port", "0"], "--port"),
        (["{run}", "--host", "192.0.2.1"], "Cannot listen on 192.0.2.1"),
    ],
)
def test_what_it_refuses(run: Callable[..., Any], text_run: Path, arguments: list[str], message: str) -> None:
    folder = text_run / "model"
    result = run("explore", *(argument.format(run=folder) for argument in arguments), "--device", "cpu")
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ordinary_attention_stands_on_the_right_alone(run: Callable[..., Any], text_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "softmax"
    settings = json.loads((text_run / "model" / "config.json").read_text())
    from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

    config = DiffTransformerConfig.from_dict({**settings, "attention_type": "softmax"})
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    result = run("explore", folder, "--no-browser")
    assert result.exit_code == 2
    assert "subtracts nothing" in result.stderr
    right = build_explorer(text_run, folder, None, "cpu").describe()["models"]["right"]
    assert (right["name"], right["label"]) == ("softmax", "Transformer")


def test_it_writes_one_page(run: Callable[..., Any], text_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("explore", text_run, "--text", "to be, or not", "--output", page, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    text = page.read_text(encoding="utf-8")
    assert "connect-src 'none'" in text
    embedded = json.loads(re.findall(r'id="explorer-data">(.*?)</script>', text)[0])
    assert embedded["mode"] == "recorded"
    assert embedded["examples"][0]["text"] == "to be, or not"
    model = embedded["models"]["left"]
    assert len(embedded["recorded"]["maps"]["left"]) == model["layers"] * model["heads"]
    before = page.read_bytes()
    assert run("explore", text_run, "--output", page).exit_code == 2
    assert page.read_bytes() == before
    assert run("explore", text_run, "--output", page, "--overwrite", "--device", "cpu").exit_code == 0
    assert page.read_bytes() != before


def test_ctrl_c_ends_it(text_run: Path) -> None:
    command = [sys.executable, "-m", "diff_transformer.cli", "explore", str(text_run), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"explorer-data" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
