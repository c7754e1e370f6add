"""`diff-transformer convert`: options, what it prints, and how it ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from commands import fails
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.cli.convert_command import LAYOUT
from diff_transformer.convert import LAYOUTS

Run = Callable[..., Any]
SIZES: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(torch.arange(11)[None]).logits


def test_the_help_names_every_layout() -> None:
    assert LAYOUT.split("|") == list(LAYOUTS)


@pytest.mark.parametrize(("options", "kind"), [((), "softmax"), (("--as", "diff_v2"), "diff_v2")])
def test_from_llama(options: tuple[str, ...], kind: str, llama: Path, run: Run, tmp_path: Path) -> None:
    result = run("convert", llama, tmp_path / "new", "--from", "llama", *options)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"written: {tmp_path / 'new'} ({kind}, ")
    assert result.stdout.rstrip().endswith("bytes of weights in 1 file)")
    assert result.stderr == ""
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.attention_type == kind
    torch.testing.assert_close(logits(tmp_path / "new"), logits(llama), rtol=1e-5, atol=1e-6)


def test_a_run_s_model_in_another_layout(run: Run, tmp_path: Path) -> None:
    DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).save_pretrained(tmp_path / "run/model")
    assert run("convert", tmp_path / "run", tmp_path / "new", "--to", "diffllama").exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.model_type == "diffllama"
    torch.testing.assert_close(logits(tmp_path / "new"), logits(tmp_path / "run/model"), rtol=1e-5, atol=1e-6)


def test_motif_and_back(run: Run, tmp_path: Path) -> None:
    settings = {"attention_type": "diff_grouped", "num_noise_heads": 1, "hidden_act": "poly_norm", **SIZES}
    config = DiffTransformerConfig(lambda_init_offset=-1, **settings)
    DiffTransformerForCausalLM(config).save_pretrained(tmp_path / "ours")
    assert run("convert", tmp_path / "ours", tmp_path / "theirs", "--to", "motif-2").exit_code == 0
    result = run("convert", tmp_path / "theirs", tmp_path / "back", "--from", "motif-2")
    assert result.stdout.startswith(f"written: {tmp_path / 'back'} (diff_grouped, ")
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "ours"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "convert needs either --from LAYOUT or --to LAYOUT, got neither."),
        (("--from", "llama", "--to", "llama"), "convert needs either --from LAYOUT or --to LAYOUT, got both."),
        (("--to", "llama", "--as", "diff_v2"), "--as goes with --from"),
        (
            ("--from", "gpt2"),
            "The layout must be one of 'microsoft', 'microsoft-v2', 'diffllama', 'llama', 'motif', 'motif-2', got "
            "'gpt2'.",
        ),
        (
            ("--from", "phi4flash"),
            "A Phi-4-mini-flash cannot become a model of this project, since half of its layers are state-space "
            "layers; covered are its attention layers, one at a time, by "
            "diff_transformer.convert.phi4flash_attention(SRC, layer).",
        ),
        (("--from", "diffllama"), "model_type must be 'diffllama', got 'llama'."),
        (("--to", "diffllama"), "is not a model of this project: its model_type is 'llama'."),
        (
            ("--from", "llama", "--max-shard-size", "x"),
            "A shard's size must be a number of bytes, 1 or more, or like '5GB', got 'x'.",
        ),
    ],
)
def test_errors_are_one_line(options: tuple[str, ...], message: str, llama: Path, run: Run, tmp_path: Path) -> None:
    result = run("convert", llama, tmp_path / "new", *options)
    fails(result, message)
    assert {file.name for file in tmp_path.iterdir()} == {"llama"}
