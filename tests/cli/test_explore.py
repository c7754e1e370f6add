"""The command `explore`: what it opens, what it refuses, and how it ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from command_fixtures import run
from commands import SECONDS, fails, succeeds
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, shipped_models
from diff_transformer.cli.explored_checkpoints import build_explorer, shipped_pairs
from tiny_model import SIZES

pytest.importorskip("uvicorn")


def test_without_arguments_it_opens_every_pair_that_the_package_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text_run: Path
) -> None:
    monkeypatch.setattr(shipped_models, "WEIGHTS", tmp_path)
    fails(run("explore"), "No CHECKPOINT is named")
    for name in ("novels-diff", "novels-softmax", "alone-diff", "needles-softmax", "needles-diff"):
        (tmp_path / name).symlink_to(text_run / "model")
    pairs = shipped_pairs()
    assert list(pairs) == ["needles", "novels"]
    described = build_explorer(*pairs["novels"], None, "cpu").describe()
    assert [model["name"] for model in described["models"].values()] == ["novels-diff", "novels-softmax"]


@pytest.mark.skipif("needles" not in "".join(shipped_models.pretrained_names()), reason="built without its models")
def test_the_shipped_needles_open_with_a_question_that_both_models_answer() -> None:
    explorer = build_explorer(*shipped_pairs()["needles"], None, "cpu")
    described = explorer.describe()
    assert described["shared_vocabulary"]
    assert described["draws_examples"]
    assert "the model should write it" in described["models"]["left"]["note"]
    example = described["examples"][0]
    words, answer = example["text"].split(), example["answer"]
    assert words[answer["begin"] - 1] == words[-1]
    for side in ("left", "right"):
        run = explorer.run({"side": side, "text": example["text"], "answer": answer})
        assert run["next"][0]["piece"] == words[answer["begin"]]
        assert run["answer_probability"] > 0.9
    # It is one that the model on the left finds by the subtraction.
    without = explorer.run({"text": example["text"], "answer": answer, "lambdas": {"factor": 0}})
    assert without["next"][0]["piece"] != words[answer["begin"]]


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


@pytest.mark.skipif("needles" not in "".join(shipped_models.pretrained_names()), reason="built without its models")
def test_the_shipped_needles_guess_without_the_second_map() -> None:
    """The page opens where λ matters, and its strip says how much; what it says is what a reader can count himself."""
    explorer = build_explorer(Path("needles-diff"), None, None, "cpu")
    described = explorer.describe()
    assert described["opening"]["layer"] == 1
    assert described["strip"]["task"] == {"sequences": 512, "floor": pytest.approx(0.337, abs=5e-4)}
    accuracy = {factor: explorer.strip({"factor": factor})["value"] for factor in (0.0, 0.5, 1.0, 2.0)}
    # Of 512 questions, some of which are close calls whose rounding differs between processors.
    assert accuracy == pytest.approx({0.0: 0.361, 0.5: 0.643, 1.0: 0.992, 2.0: 0.305}, abs=0.01)
    answered = []
    for seed in range(20):
        example = explorer.example({"seed": seed})
        run = explorer.run({"text": example["text"], "lambdas": {"factor": 0}})
        answered.append(run["next"][0]["piece"] == example["text"].split()[example["answer"]["begin"]])
    assert 0 < sum(answered) < 15


def test_needles_among_more_tokens_than_the_context_holds(retrieval_run: Path, tmp_path: Path) -> None:
    """The beginning of a sequence of the task is shown, and none is drawn."""
    shutil.copytree(retrieval_run, tmp_path / "run")
    settings = tmp_path / "run" / "model" / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "max_position_embeddings": 16}))
    described = build_explorer(tmp_path / "run", None, None, "cpu").describe()
    assert not described["draws_examples"]
    (example,) = described["examples"]
    assert example["title"] == "From the task of the training"
    assert 4 < len(example["text"].split()) <= 12
    described = build_explorer(tmp_path / "run", None, "n0 n1 n2", "cpu").describe()
    assert [example["title"] for example in described["examples"]] == ["Your text", "From the task of the training"]
    with pytest.raises(ValueError, match="no token 'nonsense'"):
        build_explorer(tmp_path / "run", None, "nonsense", "cpu")


@pytest.mark.parametrize("content", ["[]", '{"examples": [{"title": "", "text": "", "answer": 3}]}'])
def test_a_file_of_examples_that_holds_something_else(text_run: Path, tmp_path: Path, content: str) -> None:
    shutil.copytree(text_run, tmp_path / "run")
    (tmp_path / "run" / "examples.json").write_text(content)
    fails(run("explore", tmp_path / "run", "--no-browser"), "examples.json' holds no examples")


@pytest.mark.all
def test_a_model_of_another_task_opens_with_its_data(tmp_path: Path) -> None:
    sizes = ["model.hidden_size=16", "model.intermediate_size=16", "model.head_dim=8", "model.num_hidden_layers=1"]
    settings = ["train.steps=1", "train.warmup_steps=0", "data.batch_size=2"]
    assert run("train", "arithmetic", *sizes, *settings, "--output", tmp_path / "run").exit_code == 0
    text = build_explorer(tmp_path / "run", None, None, "cpu").describe()["examples"][0]["text"]
    assert re.match(r"[\d+-]+=", text)


def test_models_of_transformers_on_either_side(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 1}
    DiffLlamaForCausalLM(DiffLlamaConfig(**sizes)).save_pretrained(tmp_path / "left")
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "right")
    described = build_explorer(tmp_path / "left", tmp_path / "right", None, "cpu").describe()
    assert [model["label"] for model in described["models"].values()] == ["DIFF", "Llama"]
    assert described["examples"][0]["text"].startswith("0 1 2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "The checkpoint 'nowhere' does not exist"),
        (["{run}", "--output", "{run}/config.json"], "is there already"),
        (["{run}", "--output", "{run}/nowhere/page.html"], "/nowhere/page.html' does not exist"),
        (["{run}", "--output", "page.html", "--port", "80"], "--port does not go with --output"),
        (["{run}", "--text", ""], "no tokens"),
        (["--text", "to be"], "--text does not go with the models of the package: name a CHECKPOINT"),
        (["{run}", "--port", "0"], "--port"),
        (["{run}", "--host", "192.0.2.1"], "Cannot listen on 192.0.2.1"),
    ],
)
def test_what_it_refuses(text_run: Path, arguments: list[str], message: str) -> None:
    folder = text_run / "model"
    result = run("explore", *(argument.format(run=folder) for argument in arguments), "--device", "cpu")
    fails(result, message)


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(text_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = run("explore", text_run, "--port", port, "--no-browser", "--device", "cpu")
    fails(result, f"Cannot listen on 127.0.0.1, port {port}: Address already in use.")
    assert "Loading" not in result.stderr


def test_ordinary_attention_stands_on_the_right_alone(text_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "softmax"
    settings = json.loads((text_run / "model" / "config.json").read_text())
    config = DiffTransformerConfig.from_dict({**settings, "attention_type": "softmax"})
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    result = run("explore", folder, "--compare", text_run, "--no-browser")
    fails(result, "subtracts nothing; name a differential model as CHECKPOINT, and this one as --compare.")
    assert "Loading" not in result.stderr
    right = build_explorer(text_run, folder, None, "cpu").describe()["models"]["right"]
    assert (right["name"], right["label"]) == ("softmax", "Transformer")


def test_it_writes_one_page(text_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = succeeds(run("explore", text_run, "--text", "to be", "--output", page, "--device", "cpu"))
    loading, recording = result.stderr.splitlines()
    assert loading == f"Loading {text_run / 'model'} …"
    assert recording.startswith("Recording the maps")
    text = page.read_text(encoding="utf-8")
    assert "connect-src 'none'" in text
    embedded = json.loads(re.findall(r'id="explorer-data">(.*?)</script>', text)[0])
    assert embedded["mode"] == "recorded"
    assert embedded["examples"][0]["text"] == "to be"
    model = embedded["models"]["left"]
    assert len(embedded["recorded"]["left"]["maps"]) == model["layers"] * model["heads"]
    before = page.read_bytes()
    assert run("explore", text_run, "--output", page).exit_code == 2
    assert page.read_bytes() == before
    assert run("explore", text_run, "--text", "to", "--output", page, "--overwrite", "--device", "cpu").exit_code == 0
    assert page.read_bytes() != before


def fake_browser(path: Path, *lines: str) -> Path:
    """A program that writes the address and what it `found` into the file `note` beside it."""
    unfinished, note = path.parent / "unfinished", path.parent / "note"
    body = ["import os, sys, urllib.request", "found = None", *lines]
    body += [f"open({str(unfinished)!r}, 'w').write(f'{{sys.argv[-1]}} {{found}}')"]
    body += [f"os.replace({str(unfinished)!r}, {str(note)!r})"]
    path.write_text("\n".join([f"#!{sys.executable}", *body]))
    path.chmod(0o755)
    return path


def note_of(browser: Path) -> str:
    end = time.monotonic() + SECONDS
    while not (note := browser.parent / "note").exists():
        assert time.monotonic() < end, "no browser was started"
        time.sleep(0.02)
    return note.read_text()


SSH = {"SSH_CONNECTION": "192.0.2.1 50000 192.0.2.2 22"}
OF_THE_MACHINE = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION")


@pytest.mark.skipif(sys.platform != "linux", reason="Python finds browsers otherwise on other systems")
@pytest.mark.parametrize(
    ("name", "environment", "is_opened"),
    [
        ("mine", {"BROWSER": "{}", **SSH}, True),  # editors set it, whose window is at the other end
        ("firefox", {"DISPLAY": ":0"}, True),
        ("firefox", {}, False),
    ],
)
def test_a_browser_is_opened_if_there_is_one(
    tmp_path: Path, name: str, environment: dict[str, str], is_opened: bool
) -> None:
    browser = fake_browser(tmp_path / name)
    known = {name: value for name, value in os.environ.items() if name not in OF_THE_MACHINE}
    known |= {"PATH": str(tmp_path), "TERM": "xterm"}
    known |= {name: value.format(browser) for name, value in environment.items()}
    program = "from diff_transformer.cli.explore_command import open_browser; open_browser('http://127.0.0.1/')"
    subprocess.run([sys.executable, "-c", program], env=known, timeout=SECONDS, check=True)
    if is_opened:
        assert note_of(browser) == "http://127.0.0.1/ None"
    else:
        assert not (tmp_path / "note").exists()


@pytest.mark.all
def test_the_browser_is_answered_and_ctrl_c_ends_it(text_run: Path, tmp_path: Path) -> None:
    open_page = "urllib.request.build_opener(urllib.request.ProxyHandler({})).open(sys.argv[-1], timeout=30)"
    browser = fake_browser(tmp_path / "mine", f"found = b'explorer-data' in {open_page}.read()")
    command = [sys.executable, "-m", "diff_transformer.cli", "explore", str(text_run)]
    environment = {**os.environ, "BROWSER": str(browser)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
        with urllib.request.urlopen(address, timeout=30) as page:
            assert b"explorer-data" in page.read()
        assert note_of(browser) == f"{address} True"
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
