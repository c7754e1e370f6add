"""`diff-transformer convert --as dex`, with all heads or those that are named."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerForCausalLM


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Llama of two layers and four heads."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes))
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def _forget_the_device() -> Iterator[None]:
    """accelerate keeps what the Trainer set up for the whole process; the next test may want another precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def chosen(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text()).get("dex_heads")


@pytest.mark.parametrize(("choice", "expected"), [([], None), (["--dex-heads", "[[0, 2], []]"], [[0, 2], []])])
def test_heads_named(choice: list[str], expected: Any, source: Path, tmp_path: Path, run: Any) -> None:
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
        (["--as", "dex", "--dex-heads", "[1, 2]"], "one list of heads for each of the 2 layers, got [1, 2]."),
        (["--as", "dex", "--dex-heads", "[[0], [4]]"], "ascending numbers in 0 … 3, got 4."),
    ],
)
def test_refusals(options: list[str], message: str, source: Path, tmp_path: Path, run: Any) -> None:
    result = run("convert", source, tmp_path / "new", "--from", "llama", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("_forget_the_device")
def test_the_page_s_commands_and_code(source: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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
