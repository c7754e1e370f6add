import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, ByT5Tokenizer

import fresh
from command_fixtures import run
from commands import fails, succeeds
from diff_transformer.convert.shared_folder import Exported, plain_card
from diff_transformer.model.configuration import code_files
from tiny_model import make


def card_of(folder: Path) -> ModelCard:
    return ModelCard((folder / "README.md").read_text(encoding="utf-8"))


def test_export_writes_a_folder_that_the_card_tells_how_to_load(text_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared[red]"  # no markup
    result = run("export", text_run, target, "--license", "mit")
    assert (result.exit_code, result.stderr) == (0, "")
    listed = [Path(line.rsplit(" (", 1)[0]) for line in result.stdout.splitlines()]
    assert listed == sorted(target.iterdir())
    assert (target / "model.safetensors").read_bytes() == (text_run / "model" / "model.safetensors").read_bytes()
    card = card_of(target)
    assert (card.data.license, card.data.pipeline_tag) == ("mit", "text-generation")
    assert "| steps | 3 |" in card.text
    assert "There are no results for this checkpoint" in card.text
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    code += "print(type(model).__name__, tokenizer('to be')['input_ids'])"
    done = fresh.run(code, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout == "DiffTransformerForCausalLM [116, 111, 32, 98, 101]\n"


def test_another_model_in_a_runs_folder_was_not_made_by_its_recipe(text_run: Path, tmp_path: Path) -> None:
    """As a user leaves it who converts or trains on there."""
    copy = shutil.copytree(text_run, tmp_path / "run")
    shutil.copytree(copy / "model", copy / "converted")
    assert run("export", copy / "converted", tmp_path / "a").exit_code == 0
    assert "No recipe belongs to this checkpoint" in card_of(tmp_path / "a").text
    assert run("export", copy / "checkpoints" / "step-000002", tmp_path / "b").exit_code == 0
    middle = card_of(tmp_path / "b").text
    assert "The whole recipe" in middle
    assert "| steps | 2 of 3, so it is not finished |" in middle


def test_what_eval_wrote_beside_the_model_is_taken(
    text_run: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(text_run, tmp_path / "run")
    output = copy / "results.json"
    assert run("eval", copy, "--text", text_file, "--output", output).exit_code == 0
    assert run("export", copy, tmp_path / "a").exit_code == 0
    rows = ("| language: bits per byte ↓ |", "| language: validation loss (nats/token) ↓ |")
    assert all(row in card_of(tmp_path / "a").text for row in rows)
    # It names the model that it is of; of another one the user has to name the file.
    middle = copy / "checkpoints" / "step-000002"
    assert run("export", middle, tmp_path / "middle").exit_code == 0
    assert not any(row in card_of(tmp_path / "middle").text for row in rows)
    another_run = shutil.copytree(text_run, tmp_path / "other")
    shutil.copy(output, another_run)
    assert run("export", another_run, tmp_path / "b").exit_code == 0
    assert not any(row in card_of(tmp_path / "b").text for row in rows)
    assert run("export", another_run, tmp_path / "c", "--results", output).exit_code == 0
    assert all(row in card_of(tmp_path / "c").text for row in rows)
    # Above the model's folder another program's is passed over, and one that names no model is of none.
    for content in ("{", '{"accuracy": 1}', json.dumps(json.loads(output.read_text()) | {"settings": {}})):
        (another_run / "results.json").write_text(content, encoding="utf-8")
        monkeypatch.chdir(another_run / "model")
        assert run("export", another_run / "model", tmp_path / f"over-{len(content)}").exit_code == 0
        assert not any(row in card_of(tmp_path / f"over-{len(content)}").text for row in rows)
    (another_run / "model" / "results.json").write_text("{", encoding="utf-8")
    fails(run("export", another_run, tmp_path / "own"), "results.json is not JSON")


def test_another_dtype_leaves_lambda_alone(text_run: Path, tmp_path: Path) -> None:
    assert run("export", text_run, tmp_path / "half", "--dtype", "bfloat16", "--max-shard-size", "20KB").exit_code == 0
    files = sorted((tmp_path / "half").glob("model-*.safetensors"))
    assert len(files) > 1
    exact = load_file(text_run / "model" / "model.safetensors")
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    assert tensors.keys() == exact.keys()
    for name, value in tensors.items():
        dtype = torch.float32 if ".lam." in name else torch.bfloat16
        assert torch.equal(value, exact[name].to(dtype)), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_beyond_the_configuration_are_refused(text_run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(text_run / "model", tmp_path / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))
    fails(run("generate", copy, "--prompt", "def "), "has weights that its config.json has not: model.layers.")


def test_weights_in_eight_bits(text_run: Path, tmp_path: Path) -> None:
    assert run("export", text_run, tmp_path / "int8", "--int8").exit_code == 0
    tensors = load_file(tmp_path / "int8" / "model.safetensors")
    assert {value.dtype for name, value in tensors.items() if name.endswith("q_proj.weight")} == {torch.int8}
    assert {value.dtype for name, value in tensors.items() if ".lam." in name} == {torch.float32}
    weights = sum(value.numel() for name, value in tensors.items() if not name.endswith("weight_scale"))
    shared = Exported("int8", AutoModelForCausalLM.from_pretrained(tmp_path / "int8"), None, "AutoModelForCausalLM")
    for text in (card_of(tmp_path / "int8").text, plain_card(shared)):
        assert f"| parameters | {weights:,}, quantised: diff_transformer_int8 |" in text
    succeeds(run("export", tmp_path / "int8", tmp_path / "again"))
    first, second = (tmp_path / name / "model.safetensors" for name in ("int8", "again"))
    assert first.read_bytes() == second.read_bytes()
    prompt = "--prompt", "def ", "--max-new-tokens", 3, "--greedy"
    settings = tmp_path / "int8" / "generation_config.json"  # which the options of the command line replace
    settings.write_text('{"repetition_penalty": 9.0, "num_beams": 3}', encoding="utf-8")
    written, whole = (succeeds(run("generate", folder, *prompt)) for folder in (tmp_path / "int8", text_run))
    assert written.stdout == whole.stdout
    fails(run("convert", tmp_path / "int8", tmp_path / "out", "--to", "microsoft"), "Only F64, F32, F16, BF16 weights")
    for options in (["--int8"], ["--dtype", "float32"]):
        fails(
            run("export", tmp_path / "int8", tmp_path / "out", *options),
            "has quantised weights, which are written as they",
        )


def test_a_classifier_stays_one(text_run: Path, tmp_path: Path) -> None:
    kind = AutoModelForSequenceClassification
    model = kind.from_config(AutoModelForCausalLM.from_pretrained(text_run / "model").config)
    model.save_pretrained(tmp_path / "classifier")
    assert run("export", tmp_path / "classifier", tmp_path / "out").exit_code == 0
    assert "A Transformer with differential attention" in card_of(tmp_path / "out").text  # and no language model
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("score.weight"), model.score.weight)
    assert f"import {kind.__name__}\n" in card_of(tmp_path / "out").text
    fails(run("export", tmp_path / "classifier", tmp_path / "graph", "--onnx"), f"loads with {kind.__name__}")


def test_a_tokenizer_of_another_format_goes_along(tmp_path: Path) -> None:
    folder, exported = tmp_path / "model", tmp_path / "exported"
    make().save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)  # without tokenizer.json
    succeeds(run("export", folder, exported))
    assert AutoTokenizer.from_pretrained(exported)("ab").input_ids == ByT5Tokenizer()("ab").input_ids
    assert "AutoTokenizer" in card_of(exported).text
    (folder / "tokenizer.model").write_bytes(b"")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', encoding="utf-8")
    fails(run("export", folder, tmp_path / "new"), f"The tokenizer in {str(folder)!r} is not valid")
    assert not (tmp_path / "new").exists()


@pytest.mark.all
def test_onnx(retrieval_run: Path, tmp_path: Path) -> None:
    result = succeeds(run("export", retrieval_run, tmp_path / "graph", "--onnx"))
    assert result.stderr == f"Writing {tmp_path / 'graph'} and comparing it with the model …\n"
    names = {file.name for file in (tmp_path / "graph").iterdir()}
    # Nothing ends a text of this model, which ONNX Runtime GenAI cannot be told.
    assert names == {"README.md", "config.json", "generation_config.json", "model.onnx", *code_files()}
    card = card_of(tmp_path / "graph")
    assert "onnx" in card.data.tags
    assert card.data.pipeline_tag is None  # it has no tokenizer
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code.replace('"graph/', f'"{tmp_path}/graph/'), namespace)
    assert [slot.name for slot in namespace["session"].get_outputs()] == ["logits", "present.0.key", "present.0.value"]


def test_bad_input_is_said_before_anything_is_done(
    text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, text_run = tmp_path / "new", shutil.copytree(text_run, tmp_path / "run")
    (text_run / "model" / "model.safetensors").write_bytes(b"no weights")  # which would be said
    fails(run("export", text_run, text_run), "exists already; name a folder that does not")
    fails(run("export", tmp_path / "nowhere", new), "does not exist")
    fails(run("export", text_run, new, "--dtype", "int8"), "--dtype", "'float32', 'bfloat16'")
    fails(run("export", text_run, new, "--max-shard-size", "large"), "1 or more, or like '5GB', got 'large'")
    fails(run("export", text_run, new, "--onnx", "--dtype", "float16"), "--onnx writes float32")
    fails(run("export", text_run, new, "--onnx", "--max-shard-size", "5GB"), "--max-shard-size is for folders of saf")
    fails(run("export", text_run, new, "--int8", "--onnx"), "--int8 writes a folder that computes in bfloat16, without")
    fails(run("export", text_run, new, "--int8", "--dtype", "float16"), "bfloat16, without --dtype float16")
    fails(run("export", text_run, new, "--results", tmp_path / "none.json"), "none.json does not exist")
    (tmp_path / "broken.json").write_text("{")
    fails(run("export", text_run, new, "--results", tmp_path / "broken.json"), "broken.json is not JSON")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    fails(
        run("export", text_run, new, "--onnx"),
        'This command needs onnxscript, which is not installed: pip install ".[onnx]"',
    )
    assert not new.exists()
