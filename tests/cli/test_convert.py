"""`diff-transformer convert`: options, what it prints, and how it ends."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.cli.convert_command import LAYOUT
from diff_transformer.convert import LAYOUTS

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
def test_from_llama(options: tuple[str, ...], kind: str, llama: Path, tmp_path: Path) -> None:
    result = succeeds(run("convert", llama, tmp_path / "new", "--from", "llama", *options))
    assert result.stdout.startswith(f"written: {tmp_path / 'new'} ({kind}, ")
    assert result.stdout.rstrip().endswith("bytes of weights in 1 file)")
    assert result.stderr == ""
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.attention_type == kind
    torch.testing.assert_close(logits(tmp_path / "new"), logits(llama), rtol=1e-5, atol=1e-6)


def test_a_run_s_model_in_another_layout(tmp_path: Path) -> None:
    DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).save_pretrained(tmp_path / "run/model")
    assert run("convert", tmp_path / "run", tmp_path / "new", "--to", "diffllama").exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.model_type == "diffllama"
    torch.testing.assert_close(logits(tmp_path / "new"), logits(tmp_path / "run/model"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "convert needs either --from LAYOUT or --to LAYOUT, got neither."),
        (("--from", "llama", "--to", "llama"), "convert needs either --from LAYOUT or --to LAYOUT, got both."),
        (("--to", "llama", "--as", "diff_v2"), "--as goes with --from"),
        (
            ("--from", "phi4flash"),
            "A Phi-4-mini-flash cannot become a model of this project, since half of its layers are state-space "
            "layers; covered are its attention layers, one at a time, by "
            "diff_transformer.convert.phi4flash_attention(SRC, layer).",
        ),
        (("--to", "diffllama"), "is not a model of this project: its model_type is 'llama'."),
        (
            ("--from", "llama", "--max-shard-size", "x"),
            "A shard's size must be a number of bytes, 1 or more, or like '5GB', got 'x'.",
        ),
    ],
)
def test_errors_are_one_line(options: tuple[str, ...], message: str, llama: Path, tmp_path: Path) -> None:
    result = run("convert", llama, tmp_path / "new", *options)
    fails(result, message)
    assert {file.name for file in tmp_path.iterdir()} == {"llama"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama of two layers and four heads that reads bytes."""
    tokenizer = byte_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": len(tokenizer), "max_position_embeddings": 64}))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def chosen(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("dex_heads")


@pytest.mark.parametrize(("choice", "expected"), [([], None), (["--dex-heads", "[[0, 2], []]"], [[0, 2], []])])
def test_heads_named(choice: list[str], expected: Any, source: Path, tmp_path: Path) -> None:
    options = ["--from", "llama", "--as", "dex", "--dex-lambda-start", "0.125", *choice]
    assert run("convert", source, tmp_path / "new", *options).exit_code == 0
    assert chosen(tmp_path / "new") == expected
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new")
    assert set(model.lambdas()) == {0.125}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--as", "softmax", "--dex-heads", "all"], "--dex-heads and --dex-lambda-start go with --as dex."),
        (["--as", "dex", "--dex-heads", "half"], "a list for each layer like [[0, 3]], got half."),
    ],
)
def test_refusals_of_dex(options: list[str], message: str, source: Path, tmp_path: Path) -> None:
    result = run("convert", source, tmp_path / "new", "--from", "llama", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("accelerate_afresh")
def test_the_page_s_commands_and_code(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/dex.md from a Llama to a Llama, in fewer steps: what was trained is what the folded Llama computes."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "dex.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    diff-transformer (.*?)  +#", page, flags=re.MULTILINE)
    code, _ = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    assert run(*commands[0].split()).exit_code == 0
    tokens = torch.arange(1, 21).view(2, 10)
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    quick = "max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False"
    exec(compile(code.replace("max_steps=100", quick), "docs/dex.md", "exec"), {"dataset": dataset})
    assert run(*commands[1].split()).exit_code == 0
    trained, folded = (
        model_class.from_pretrained(folder).eval()(tokens).logits
        for model_class, folder in ((DiffTransformerForCausalLM, "trained"), (LlamaForCausalLM, "llama-trained"))
    )
    torch.testing.assert_close(folded, trained)
    assert (trained - LlamaForCausalLM.from_pretrained(source)(tokens).logits).abs().max() > 1e-4
