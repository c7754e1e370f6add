"""`diff-transformer serve`: what it refuses before it loads anything, how it starts, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from command_fixtures import run
from commands import SECONDS, fails
from diff_lab.data import byte_tokenizer
from diff_transformer.cli import EXTRAS
from diff_transformer.cli.serve_command import API_KEY_VARIABLE
from diff_transformer.shipped_models import LANGUAGE_MODEL
from running_server import client_of, new_model, started


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mine" / "model"
    new_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "On 0.0.0.0 anybody who reaches this machine can use the server: give an --api-key"),
        (["--host", "::"], "or say --without-key"),
        (["--host", "192.168.1.7"], "On 192.168.1.7 anybody"),
        # These go on to the checkpoint, which is not there.
        (["--host", "0.0.0.0", "--port", 0, "--without-key"], "checkpoint 'nowhere' does not exist"),
        (["--host", "0.0.0.0", "--port", 0, "--api-key", "secret"], "checkpoint 'nowhere' does not exist"),
        (["--api-key", "  "], f"(--api-key or {API_KEY_VARIABLE}) must be printable ASCII text"),
        (["--api-key", "schlüssel"], "must be printable ASCII text"),
        (["--api-key", "secret "], "and without spaces at its ends"),  # a header's ends are stripped
        (["--host", "256.1.1.1", "--without-key"], "Cannot listen on 256.1.1.1, port 8000: "),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(options: list[Any], message: str) -> None:
    fails(run("serve", "nowhere", *options), message)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    new_model().save_pretrained(tmp_path)
    fails(run("serve", tmp_path, "--port", 0), "has no tokenizer")


def test_weights_that_another_user_owns(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: whoever serves is not who trained."""
    monkeypatch.setattr("os.access", lambda file, mode: not str(file).endswith(".safetensors"))
    fails(run("serve", checkpoint, "--port", 0), "model.safetensors' may not be read by this user")


@pytest.mark.all
def test_the_extra_is_enough(checkpoint: Path) -> None:
    others = sorted({name for packages in EXTRAS.values() for name in packages} - set(EXTRAS["serve"]))
    lines = [
        f"import sys; sys.modules.update(dict.fromkeys({others!r}))",
        "import diff_transformer.cli, uvicorn",
        "uvicorn.Server.run = lambda self, sockets: print('listens')",
        f"sys.argv[1:] = ['serve', {str(checkpoint)!r}, '--port', '0']",
        "diff_transformer.cli.main()",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "listens\n"), done.stderr[-2000:]


def test_without_a_checkpoint_the_language_model_of_the_package_is_served_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diff_transformer.shipped_models.WEIGHTS", tmp_path)
    names: list[str] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: names.append(self.served.name))
    fails(run("serve", "--port", 0), "No CHECKPOINT is named, and this copy of the package was built without its model")
    folder = tmp_path / LANGUAGE_MODEL
    new_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "card.json").write_text('{"summary": "a tiny model"}')
    threads: set[threading.Thread] = set()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: threads.add(threading.current_thread()))
    with hook:
        result = run("serve", "--port", 0)
    assert (result.exit_code, names) == (0, ["novels-diff"]), result.stderr
    assert "so this is novels-diff: a tiny model." in result.stderr
    # The first pass, which builds the kernel, comes before the first request, and its thread slows down no other.
    assert threads
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_and_its_streams(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    log = tmp_path / "log"
    with started(log, checkpoint) as (process, url), client_of(url) as client:
        assert [model.id for model in client.models.list()] == ["mine"]
        asked: dict[str, Any] = {"model": "mine", "prompt": "to be", "max_tokens": 90, "temperature": 0}
        events = iter(client.completions.create(**asked, stream=True))
        next(events)
        os.kill(process.pid, number)
        try:
            texts = list(events)
            assert texts[-1].choices[0].finish_reason is not None  # the text was there before the signal
        except openai.APIError as error:
            assert "The server is stopping." in str(error)  # noqa: PT017
        process.join(SECONDS)
        assert process.exitcode == code
    assert "Traceback" not in log.read_text()


def test_the_key_comes_from_the_environment(checkpoint: Path, tmp_path: Path) -> None:
    arguments = [checkpoint, "--name", "other", "--log-requests"]
    with started(tmp_path / "log", *arguments, **{API_KEY_VARIABLE: "secret"}) as (_, url):
        with client_of(url, "secret") as client:
            assert client.completions.create(model="other", prompt="to be", max_tokens=2).model == "other"
        with client_of(url) as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert '"POST /v1/completions HTTP/1.1" 200' in (tmp_path / "log").read_text()
    assert "secret" not in (tmp_path / "log").read_text()
