"""The examples run offline as they stand, and leave a model that has learned something."""

import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from diff_lab.data import byte_tokenizer
from diff_transformer.convert import convert_from
from diff_transformer.nn import AnnealedLambda
from full_run import short_run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

pytestmark = [
    # torch says on a CPU that the Trainer's default is for a GPU.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    # transformers has renamed what TRL asks for, and what its older versions know by this name only.
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
]


@pytest.fixture(autouse=True)
def _quietly_and_afresh(accelerate_afresh: None) -> Iterator[None]:
    datasets.disable_progress_bars()
    before = sys.argv
    yield
    sys.argv = before
    datasets.enable_progress_bars()


def run(name: str, *arguments: object) -> None:
    sys.argv = [name, *map(str, arguments)]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def check_learned(folder: Path, first: float) -> None:
    """The last evaluation is better than guessing among all tokens by a `first` of nats; the model loads and speaks."""
    (state,) = folder.glob("checkpoint-*/trainer_state.json")
    losses = [entry["eval_loss"] for entry in json.loads(state.read_text())["log_history"] if "eval_loss" in entry]
    assert losses[-1] < torch.tensor(257.0).log() - first
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "DiffTransformerForCausalLM"
    written = model.generate(**tokenizer("2 + 3 =", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("2 + 3 =")


def test_the_trainer(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}: to be, or not to be\n" for number in range(400)), encoding="utf-8")
    run("trainer.py", "--text", text, "--output", tmp_path / "run", "--steps", 30, "--length", 32)
    check_learned(tmp_path / "run", 2.0)


@pytest.fixture
def llama(tmp_path: Path) -> LlamaForCausalLM:
    """A small one, with its folder: in half precision, and without a padding token, as most are."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=32,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return model.float()


@pytest.mark.parametrize("attention_type", short_run(["diff_v2", "dex", None], ["dex"]))
def test_the_trainer_trains_a_converted_llama_on(
    attention_type: str | None, llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Or the Llama as it is. The loss falls from the Llama's, and λ of a DEX is annealed."""
    annealed: list[float] = []

    def note(module: Any, _: Any) -> None:
        if isinstance(module, AnnealedLambda) and module.training:
            annealed.append(round(30 * module.progress.item(), 3))

    folder, text = tmp_path / "llama", tmp_path / "text.txt"
    if attention_type is not None:
        folder = tmp_path / "converted"
        convert_from("llama", tmp_path / "llama", folder, attention_type=attention_type)
    text.write_text("to be, or not to be\n" * 200, encoding="utf-8")
    options = ("--text", text, "--output", tmp_path / "run", "--steps", 30, "--length", 32, "--learning-rate", 3e-3)
    with register_module_forward_pre_hook(note):
        run("trainer.py", "--model", folder, *options)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert getattr(trained.config, "attention_type", None) == attention_type
    assert trained.dtype == torch.float32
    tokens = AutoTokenizer.from_pretrained(tmp_path / "run")("or not to be", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert trained(tokens, labels=tokens).loss < llama(tokens, labels=tokens).loss - 1
    assert list(dict.fromkeys(annealed)) == ([*range(1, 31)] if attention_type == "dex" else [])


@pytest.mark.usefixtures("llama")
@pytest.mark.parametrize("name", ["trainer.py", "sft.py"])
def test_a_length_that_the_model_has_not_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(name, "--model", tmp_path / "llama", "--length", 33)
    assert "--length must be at most the model's context, 32" in capsys.readouterr().err


def test_the_trainer_refuses_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("to be, or not to be", encoding="utf-8")
    with pytest.raises(SystemExit, match="2"):
        run("trainer.py", "--text", tmp_path / "text.txt", "--length", 16)
    assert "two sequences of --length or more, and has 19 tokens" in capsys.readouterr().err


@pytest.mark.all
def test_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("sft.py", "--output", tmp_path / "first", "--steps", 30)
    check_learned(tmp_path / "first", 2.0)
    # A checkpoint, in half precision as most are, and data of one's own.
    AutoModelForCausalLM.from_pretrained(tmp_path / "first").bfloat16().save_pretrained(tmp_path / "first")
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"{number} ?", "completion": " yes"}) for number in range(40)]
    data.write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    arguments = ("--model", tmp_path / "first", "--data", data, "--output", tmp_path / "second", "--steps", 30)
    run("sft.py", *arguments)
    check_learned(tmp_path / "second", 4.0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "second").dtype == torch.float32


def write_questions(folder: Path) -> None:
    """Questions whose first word tells their class."""
    words = {"human": "Who", "location": "Where", "number": "When", "description": "Why"}
    things = ("cat", "dog", "house", "river", "king", "song", "stone", "tree", "ship", "town")
    for name, numbers in (("train.csv", range(5)), ("test.csv", range(5, 7))):
        lines = [
            f"{word} is {thing} {n} ?,{label}" for n in numbers for thing in things for label, word in words.items()
        ]
        (folder / name).write_text("\n".join(["text,label", *lines]), encoding="utf-8")


@pytest.mark.all
def test_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classifier finds the classes, and the reranker's best hits are of the question's."""
    write_questions(tmp_path)
    steps = ("--masked-steps", 4, "--steps", 40)
    run("encoder.py", "--data", tmp_path, "--output", tmp_path / "out", *steps)
    printed = capsys.readouterr().out
    right = {name: float(share) for name, share in re.findall(r"^([a-z ]+): (\d\.\d+) of", printed, re.MULTILINE)}
    assert right.keys() == {"classifier", "search", "search and reranker"}
    assert min(right.values()) > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "classifier")
    assert (model.config.is_causal, model.config.num_labels) == (False, 4)


@pytest.mark.all
@pytest.mark.parametrize("model", ["plain", "timm"])
def test_images(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both twins read most digits after some epochs, and the figure, the page and the weights are there."""
    if model == "timm":
        try:
            import timm  # noqa: F401
        except Exception as error:  # torchvision's, beside a torch that it was not built for, is any
            pytest.skip(f"timm does not load here: {error}")
    run("images.py", "--model", model, "--output", tmp_path, "--epochs", 8, "--images", 2)
    shares = re.findall(r"^(DIFF|Transformer): (\d\.\d+) of", capsys.readouterr().out, re.MULTILINE)
    assert [name for name, _ in shares] == ["DIFF", "Transformer"]
    assert all(float(share) > 0.5 for _, share in shares)
    written = {"rollout.png", "explorer.html", "DIFF.safetensors", "Transformer.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == written


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_explains_itself(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(path.name, "--help")
    assert "--output" in capsys.readouterr().out
    assert f"python examples/{path.name}" in path.read_text(encoding="utf-8")
