"""An encoder from its recipe to its numbers: `train`, `eval`, `plan`, `export`, and what is refused of it."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.data import MaskedTextBatches
from diff_lab.files import read_metrics
from diff_lab.measure.standard import label_scores
from diff_lab.results_files import read_results
from diff_lab.train import build_data, load_recipe
from diff_transformer.cli.checkpoints import load_tokenizer

SETTINGS = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "model.head_dim=8"),
    *("data.length=64", "data.batch_size=8", "data.validation_tokens=2048", "data.validation_fraction=0.2"),
    *("train.steps=60", "train.warmup_steps=5", "train.learning_rate=1e-2", "train.evaluate_every=30"),
    "train.log_every=1",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    lines = [f"line {number}: to be, or not to be" for number in range(300)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), "utf-8")
    return file


@pytest.fixture(scope="module")
def trained(text: Path) -> Path:
    folder = text.parent / "run"
    succeeds(run("train", "masked", *SETTINGS, f"data.paths=['{text}']", "--output", folder))
    return folder


def test_training_and_numbers(trained: Path, text: Path, tmp_path: Path) -> None:
    lines = read_metrics(trained / "metrics.jsonl")
    assert lines[-1]["loss"] < 0.6 * lines[0]["loss"]
    last = lines[-1]
    assert last["validation/accuracy"] > 0.5
    # The numbers of training, of `eval`, and those taken by hand agree.
    model = AutoModelForMaskedLM.from_pretrained(trained / "model").eval()
    batches = build_data(load_recipe(trained / "recipe.yaml"), load_tokenizer(trained / "model")).batches
    assert isinstance(batches, MaskedTextBatches)
    nats = right = targets = 0
    for batch in batches.validation_batches():
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        found = batch["labels"] != -100
        nats += F.cross_entropy(logits[found], batch["labels"][found], reduction="sum").item()
        right += int((logits[found].argmax(-1) == batch["labels"][found]).sum())
        targets += int(found.sum())
    answers = label_scores(model, batches.validation_batches(), masked=True)
    assert (answers.accuracy, answers.targets) == (right / targets, targets)
    assert answers.loss == pytest.approx(nats / targets, rel=1e-4) == pytest.approx(last["validation/loss"], rel=1e-4)
    assert run("eval", trained, "--output", tmp_path / "own.json").exit_code == 0
    own = {record.name: record.value for record in read_results(tmp_path / "own.json").records}
    assert own["validation/accuracy"] == pytest.approx(right / targets)
    assert own["masked/loss"] == pytest.approx(nats / targets, rel=1e-4)
    # On another text, with the model's own tokenizer.
    assert run("eval", trained, "--text", text, "--output", tmp_path / "text.json").exit_code == 0
    other = {record.name: record for record in read_results(tmp_path / "text.json").records}
    assert other["validation/accuracy"].value > 0.5
    assert other["validation/accuracy"].n != targets


def test_it_fills_masks_and_does_nothing_that_is_for_causal_models(trained: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    model = AutoModelForMaskedLM.from_pretrained(trained / "model")
    fill = pipeline("fill-mask", model=model, tokenizer=tokenizer, top_k=1)
    assert fill("line 7: to be, or n<|mask|>t to be")[0]["token_str"] == "o"
    fails(run("eval", trained, "--measure", "repeats"), "holds an encoder, whose numbers eval tells without --measure")
    fails(run("generate", trained, "--prompt", "a"), "must have is_causal True, got False")


def test_plan_and_export(trained: Path, tmp_path: Path) -> None:
    done = succeeds(run("plan", trained / "recipe.yaml", "--json"))
    plan = json.loads(done.stdout)
    parameters = AutoModelForMaskedLM.from_pretrained(trained / "model").num_parameters()
    assert plan["parameters"] == parameters
    assert run("export", trained, tmp_path / "shared").exit_code == 0
    card = (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForMaskedLM" in card
    assert ModelCard(card).data.pipeline_tag == "fill-mask"
    config = json.loads((tmp_path / "shared" / "config.json").read_text(encoding="utf-8"))
    assert "AutoModelForMaskedLM" in config["auto_map"]
