import io
import json
import os
import re
import shlex
import shutil
import stat
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.coordinates import NO_COORDINATES, Coordinates
from diff_lab.data import byte_tokenizer
from diff_lab.experiments.definitions import EXPERIMENTS
from diff_lab.record import Headline, Result
from diff_lab.results_files import write_json
from diff_lab.statistics import compare
from diff_transformer.cli.generate_command import StdoutStreamer
from diff_transformer.ops.backends import BACKENDS
from made_up_results import made_up
from running_server import new_model
from tiny_demo import TINY
from tokenizer_kinds import KINDS, llama_tokenizer


def test_train_prints_results_to_stdout_and_progress_to_stderr(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = succeeds(run("train", "tiny", f"data.paths={text_file}", "train.steps=2", "name=mine"))
    assert "37,184 parameters" in result.stdout
    assert "validation/loss" in result.stdout
    assert result.stdout.endswith("model: runs/mine/model\n")
    assert "mine · diff: step 2 of 2, loss" in result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    fails(run("train", "tiny", f"data.paths={text_file}", "name=mine"), "already holds a run")
    succeeds(run("train", "tiny", f"data.paths={text_file}", "train.steps=2", "name=mine", "--resume"))


def test_a_loss_that_is_no_number_is_shown(text_file: Path, tmp_path: Path) -> None:
    recipe = ["tiny", f"data.paths={text_file}", "train.steps=1", "train.schedule=constant", "train.warmup_steps=0"]
    done = succeeds(run("train", *recipe, "train.learning_rate=1e20", "--output", tmp_path / "run"))
    assert "validation/loss nan" in done.stdout


def test_train_resumes_or_begins(text_file: Path, tmp_path: Path) -> None:
    recipe = ["tiny", f"data.paths={text_file}", "train.steps=1", "--output", tmp_path / "run"]
    for words in ([*recipe, "--resume", "auto"], ["--resume=auto", *recipe], ["--resume", *recipe]):
        succeeds(run("train", *words))
    fails(run("train", *recipe, "--resume=always"), "--resume takes no value or 'auto'", "'always'")
    assert "[auto]" in run("train", "--help").stdout


def test_train_refuses_bad_input_before_it_reads_text(text_run: Path, tmp_path: Path) -> None:
    fails(run("train", "nowhere"), "There is no recipe 'nowhere'")
    fails(run("train", "tiny", "train.stepz=3"), "did you mean 'train.steps'?")
    fails(run("train", "tiny", "data.paths=nowhere.txt", "--output", text_run), "already holds a run")
    fails(run("train", "tiny", "data.paths=nowhere.txt", "--output", tmp_path / "new"), "nowhere.txt")
    fails(run("train", "tiny", "--resume", "--output", tmp_path / "new"), "no run to resume")
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_is_trained_and_a_recipe_takes_it(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bpe"
    trained = run("tokenizer", "train", text_file, "--vocab-size", 270, "--output", folder)
    assert (trained.exit_code, trained.stdout) == (0, f"270 tokens: {folder}\n")
    sizes = ["model.hidden_size=16", "model.intermediate_size=16", "data.batch_size=2", "data.validation_tokens=256"]
    settings = [*sizes, f"data.paths={text_file}", f"data.tokenizer={folder}", "train.steps=1"]
    first = succeeds(run("train", "tiny", *settings, "--output", tmp_path / "run"))
    assert "tokenised: 1 documents, " in first.stderr
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["vocab_size"] == 270
    again = run("train", "tiny", *settings, "--output", tmp_path / "again")
    assert "tokenised" not in again.stderr
    fails(run("tokenizer", "train", text_file, "--output", folder), "--output must be a new folder")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    fails(run("tokenizer", "train", text_file, "--output", tmp_path / "new"), "inside one that may be written to")


def test_generate_goes_on_from_the_prompt(text_run: Path) -> None:
    def written(*options: Any) -> str:
        result = succeeds(run("generate", text_run, "--prompt", "to be", "--max-new-tokens", 12, *options))
        assert result.stderr == ""
        assert result.stdout.startswith("to be")
        return result.stdout

    assert written() == written("--seed", 0)
    assert written("--seed", 1) != written("--seed", 2)
    assert written("--greedy") == written("--greedy", "--seed", 5)
    assert written("--temperature", 1e-6) == written("--greedy")
    assert written("--top-p", 1e-9) == written("--greedy")


def test_generate_streams(text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    put = StdoutStreamer.put
    monkeypatch.setattr(StdoutStreamer, "put", lambda self, value: (counts.append(value.numel()), put(self, value))[1])
    run("generate", text_run, "--prompt", "to be", "--max-new-tokens", 4, "--greedy")
    assert counts == [5, 1, 1, 1, 1]
    counts.clear()
    model = AutoModelForCausalLM.from_pretrained(text_run / "model", bos_token_id=None, eos_token_id=None)
    model.generation_config.eos_token_id = None
    model.lm_head.weight.data.zero_()  # so that token 0 is written
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    run("generate", tmp_path / "model", "--prompt", "to be", "--max-new-tokens", 4, "--greedy")
    assert counts == [5, 1], "the tokenizer's end of text is the model's, where that has none"
    fails(run("generate", tmp_path / "model", "--prompt", ""), "has no beginning-of-sequence token to start from")
    counts.clear()
    run("generate", text_run, "--prompt", "", "--max-new-tokens", 1)
    assert counts == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_control_characters_do_not_reach_a_terminal_and_all_others_do(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tokenizer = KINDS[kind]()

    def written(text: str, terminal: bool) -> str:
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        streamer = StdoutStreamer(tokenizer)
        for token in tokenizer(text)["input_ids"]:
            streamer.put(torch.tensor([token]))
        streamer.end()
        monkeypatch.undo()
        return stream.getvalue()

    text = "a\x1b[31m\tλ\x00\x7f\x9b\r\n"
    assert written(text, terminal=False) == f"{text}\n"
    assert written(text, terminal=True) == "a�[31m\tλ����\n\n"
    # Wide and unbreakable spaces, joiners, a soft hyphen, both directions, an emoji of several characters, indentation.
    text = "a\u3000b\u00a0c\u200cd\u200de\u00adf\u200f\u2028\U0001f469\u200d\U0001f4bb\n    if x:\n        é\ufffd"
    assert written(text, terminal=False) == written(text, terminal=True) == f"{text}\n"


def test_generate_writes_what_decode_gives(tmp_path: Path) -> None:
    """With a tokenizer of Llama 2's kind, which would leave out a space of each line's indentation."""
    tokenizer = llama_tokenizer()
    model = new_model(vocabulary=len(tokenizer)).float()
    for part in (tokenizer, model):
        part.save_pretrained(tmp_path / "model")
    prompt = "def f(x):\n    if x:\n        \u3000to be"
    result = succeeds(run("generate", tmp_path / "model", "--prompt", prompt, "--greedy", "--max-new-tokens", 30))
    tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
    (out,) = model.generate(tokens, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert result.stdout == tokenizer.decode(out, skip_special_tokens=True) + "\n"
    assert result.stdout.startswith(prompt)


def test_a_checkpoint_that_is_missing_or_not_ours_is_named(text_run: Path, retrieval_run: Path, tmp_path: Path) -> None:
    def generate(folder: Path) -> Any:
        return run("generate", folder, "--prompt", "x")

    fails(generate(tmp_path / "nowhere"), "does not exist")
    fails(generate(tmp_path), "holds no model: neither config.json nor model/ nor checkpoints/.")
    fails(generate(text_run.parent), f"is not a run but holds runs; name one: {text_run}.")
    fails(generate(retrieval_run), "has no tokenizer (tokenizer.json)")
    model = tmp_path / "model"
    shutil.copytree(text_run / "model", model)
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    fails(generate(model), "cannot be loaded")
    (model / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    converts = "`diff-transformer convert --help` lists the layouts"
    fails(generate(model), "is not a model of this project: its model_type is 'llama'.", converts)
    (model / "config.json").write_text("[]", encoding="utf-8")
    fails(generate(model), "is not a model of this project: its model_type is None.")


def test_the_weights_of_a_checkpoint_are_those_that_were_written(
    text_run: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "step-000002"
    shutil.copytree(text_run / "checkpoints" / "step-000002", folder)
    (folder / "optimizer.safetensors").unlink()  # of no use to a model that is not trained any more
    assert run("generate", folder, "--prompt", "x", "--max-new-tokens", 1).exit_code == 0
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    damaged = f"{str(folder)!r} is damaged: model.safetensors has changed since it was written"
    fails(run("generate", folder, "--prompt", "x"), damaged)
    fails(run("convert", folder, tmp_path / "converted", "--to", "microsoft"), damaged)
    sizes = ["model.hidden_size=16", "model.intermediate_size=16", f"data.paths={text_file}"]
    result = run("train", "tiny", *sizes, f"model.init_from={folder}", "--output", tmp_path / "run")
    assert result.exit_code == 2
    assert damaged in result.stderr


def test_eval_measures_the_retrieval_task(retrieval_run: Path, text_file: Path) -> None:
    succeeds(run("eval", retrieval_run), "accuracy ↑", "chance", "floor", "attention to the answer")
    fails(run("eval", retrieval_run, "--text", text_file), "has no tokenizer")


def test_report_prints_where_the_page_is(text_run: Path, tmp_path: Path) -> None:
    result = run("report", text_run)
    assert (result.exit_code, result.stdout) == (0, f"{text_run / 'report.html'}\n")
    assert (text_run / "report.html").is_file()
    os.utime(text_run / "report.html", (0, 0))
    fails(run("report", text_run), f"'{text_run / 'report.html'}' is there already", "--overwrite")
    assert (text_run / "report.html").stat().st_mtime == 0
    assert run("report", text_run, "--overwrite").exit_code == 0
    assert (text_run / "report.html").stat().st_mtime > 0
    fails(run("report", tmp_path), "is not a run folder")


def test_report_sets_out_experiments(tmp_path: Path) -> None:
    records = [
        Result(name=name, variant=variant, value=2.0, seed=0, better="lower", coordinates=coordinates)
        for variant in ("diff", "softmax")
        for name, coordinates in (
            ("made_up/loss", NO_COORDINATES),
            *(("training/validation_loss", Coordinates(step=step)) for step in (1, 2)),
        )
    ]
    compared = [compare(records, "made_up/loss", "diff", "softmax")]
    results = made_up("recall", records, compared)
    path = write_json(tmp_path / "recall.json", replace(results, headline=Headline(name="made_up/loss")))
    result = run("report", path, tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path.resolve() / 'RESULTS.md'}\n")
    assert "inconclusive" in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    fails(run("report", tmp_path), f"{tmp_path / 'RESULTS.md'}' is there already", "--overwrite")
    (tmp_path / "none").mkdir()
    fails(run("report", tmp_path / "none", path, "--overwrite"), "holds no results of an experiment")
    fails(run("report", path, "--output", tmp_path / "page.txt"), "must end in .md")


def test_info_tells_versions_what_can_run_and_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_onnx(name: str) -> str:
        if name == "onnx":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_onnx)
    result = succeeds(run("info"))
    rows = {line[:28].strip() for line in result.stdout.splitlines()}
    for backend in BACKENDS:
        assert any(row.startswith(f"backend {backend} on cpu") for row in rows)
    for text in (torch.__version__, "torch threads", "can run", 'not installed: pip install ".[onnx]"'):
        assert text in result.stdout


@pytest.mark.all
def test_demo_ends_with_a_table_a_page_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diff_lab.experiments.demo as module

    monkeypatch.setattr(module, "FAST_DEMO", TINY)
    monkeypatch.setattr(module, "default_workers", lambda *_, **__: 1)
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/demo-fast")
    result = succeeds(run("demo", "--fast", "--seed", 1))
    for text in ("accuracy, 2 pairs ↑", "λ × 0.5 ↑", "Transformer", f"page:     {folder / 'report.html'}\n"):
        assert text in result.stdout
    assert str(folder / "softmax" / "model") in result.stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert result.stderr.index("What to expect") < result.stderr.index("DIFF: step 1 of 6, loss")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert '<iframe srcdoc="' in page
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    settings = results["settings"]
    assert settings["seed"] == 1
    fails(run("demo", "--fast"), "--overwrite")
    embedded = re.findall(r'id="explorer-data">(.*?)</script>', (folder / "explorer.html").read_text(encoding="utf-8"))
    explorer = json.loads(embedded[0])
    assert [model["label"] for model in explorer["models"].values()] == ["DIFF", "Transformer"]
    view = settings["view"]
    assert [one["text"].split() for one in explorer["examples"]] == [view["words"]]
    assert explorer["opening"] == {name: view[name] for name in ("layer", "head")}
    assert explorer["strip"]["task"]["sequences"] == 512
    # One number everywhere, but for answers as likely as another.
    by_lambda = [one["value"] for one in results["records"] if one["name"] == "noise/accuracy_by_lambda"]
    assert [one["value"] for one in explorer["strip"]["points"]] == pytest.approx(by_lambda, abs=0.01)
    # What it names to try next can be done.
    commands = re.findall(r"^  diff-(?:transformer|lab) (.*)$", result.stdout, flags=re.MULTILINE)
    explore, reproduce, compare = map(shlex.split, commands)
    assert run(*explore, "--output", tmp_path / "page.html").exit_code == 0
    assert compare == ["compare", "language", "--text", "FOLDER"]
    assert reproduce[1] in EXPERIMENTS


def test_datasets_is_asked_for_where_it_is_read_alone(
    text_run: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for command, *options in (
        ("generate", "--prompt", "to be", "--max-new-tokens", 2),
        ("export", tmp_path / "shared"),
        ("eval", "--text", text_file, "--output", tmp_path / "results.json"),
    ):
        result = succeeds(run(command, text_run, *options))
        assert all(line.endswith(" …") for line in result.stderr.splitlines())


def test_weights_have_the_permissions_of_other_files(text_run: Path, tmp_path: Path) -> None:
    assert run("export", text_run, tmp_path / "exported").exit_code == 0
    assert run("convert", text_run, tmp_path / "converted", "--to", "microsoft").exit_code == 0
    files = [file for folder in (text_run, tmp_path) for file in folder.rglob("*") if file.is_file()]
    assert sum(file.suffix == ".safetensors" for file in files) >= 5
    (tmp_path / "fresh").touch()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {stat.S_IMODE((tmp_path / "fresh").stat().st_mode)}


def test_generate_refuses_what_cannot_be(text_run: Path) -> None:
    """Numbers out of range, and what the context cannot hold, of which it fills all."""
    for options, message in (
        (("x", "--temperature", 0), "--temperature must be above 0, got 0.0"),
        (("x", "--top-p", 1.5), "--top-p must be above 0 and at most 1, got 1.5"),
        (("x\udcff",), r"--prompt must be UTF-8 text, got 'x\udcff'."),
        (("x", "--device", "abacus"), "The device 'abacus' cannot be used here"),
        (("x" * 64,), "64 and any new"),
        (("x" * 60, "--max-new-tokens", 5), "60 and 5 new ones; --max-new-tokens can be at most 4."),
    ):
        fails(run("generate", text_run, "--prompt", *options), message)
    assert run("generate", text_run, "--prompt", "x", "--max-new-tokens", 0).exit_code == 2
    for options in (("", "--max-new-tokens", 3), ("x" * 60, "--greedy")):
        assert run("generate", text_run, "--prompt", *options).exit_code == 0


def test_generate_takes_any_folder_that_holds_the_model(text_run: Path, tmp_path: Path) -> None:
    """Of an unfinished run the newest checkpoint."""
    options = ("--prompt", "to be", "--max-new-tokens", 5, "--greedy")
    generated = run("generate", text_run, *options).stdout
    assert run("generate", text_run / "model", *options).stdout == generated
    assert run("generate", text_run / "checkpoints" / "step-000003", *options).stdout == generated
    unfinished = shutil.copytree(text_run, tmp_path / "unfinished")
    shutil.rmtree(unfinished / "model")
    assert run("generate", unfinished, *options).stdout == generated
    (unfinished / "checkpoints" / "step-1000000").mkdir()
    shutil.copy(text_run / "model" / "config.json", unfinished / "checkpoints" / "step-1000000")
    fails(run("generate", unfinished, *options), "step-1000000' holds no weights")


def test_a_broken_file_of_a_model_is_named(text_run: Path, tmp_path: Path) -> None:
    model = shutil.copytree(text_run / "model", tmp_path / "model")

    def generated() -> Any:
        return run("generate", model, "--prompt", "x", "--max-new-tokens", 1)

    fails(run("generate", model / "config.json", "--prompt", "x"), "config.json' is a file; name the folder of a run")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text("[" * 200_000 + "]" * 200_000, encoding="utf-8")
    fails(generated(), "config.json' is not JSON", "lists in lists too deep")
    for name, value in {"hidden_size": "a", "num_attention_heads": 3, "rope_parameters": 3}.items():
        (model / "config.json").write_text(json.dumps(settings | {name: value}), encoding="utf-8")
        fails(generated(), "config.json' is not valid: ")
    (model / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    fails(generated(), "lack model.norm.weight.")
    for text in ("{", "{}"):
        (model / "tokenizer.json").write_text(text, encoding="utf-8")
        fails(generated(), "' is not valid: ")
    (model / "generation_config.json").write_text("{}", encoding="utf-8-sig")
    fails(generated(), "generation_config.json' begins with a byte order mark")
    (model / "generation_config.json").write_text("{", encoding="utf-8")
    fails(generated(), "generation_config.json' is not JSON")
