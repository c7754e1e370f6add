"""The command `maps`: what the file holds, and what is refused."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from command_fixtures import run
from commands import fails
from diff_transformer.model import attention_maps


def test_the_maps_of_a_text(text_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "maps.safetensors"
    result = run("maps", text_run, "--text", "to be", "--output", file, "--device", "cpu")
    assert (result.exit_code, result.stdout.count("5 tokens")) == (0, 1), result.stderr
    tensors = load_file(file)
    model = AutoModelForCausalLM.from_pretrained(text_run / "model")
    expected = attention_maps(model, tensors["tokens"].unsqueeze(0))
    assert len(tensors) == 1 + 3 * len(expected)
    for number, layer in enumerate(expected, start=1):
        for name in ("first", "second", "difference"):
            torch.testing.assert_close(tensors[f"layers.{number}.{name}"], getattr(layer, name)[0], rtol=0, atol=1e-6)
    with safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["pieces"]) == list("to be")


def test_one_layer_of_a_model_that_reads_words(retrieval_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "maps.safetensors"
    result = run("maps", retrieval_run, "--text", "n1 k0 v1 ? k0", "--layer", 1, "--output", file, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert set(load_file(file)) == {"tokens", "layers.1.first", "layers.1.second", "layers.1.difference"}


def test_what_it_refuses(text_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "maps.safetensors"
    fails(run("maps", text_run, "--text", "a", "--output", tmp_path / "a.npz"), "must end in .safetensors")
    fails(run("maps", text_run, "--text", "a", "--output", file, "--layer", 99), "got --layer 99")
    fails(run("maps", text_run, "--text", "", "--output", file), "no tokens")
    assert not file.exists()
    file.touch()
    fails(run("maps", text_run, "--text", "a", "--output", file), "is there already")
