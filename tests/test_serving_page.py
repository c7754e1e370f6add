"""What docs/serving.md says of commands and files is true, and its examples run against a server."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from diff_transformer.cli import app
from diff_transformer.cli.serve_command import API_KEY_VARIABLE
from running_server import HAS_SERVER, new_served, running

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    (\S[^\n]*)", PAGE, flags=re.MULTILINE)
URL = "http://127.0.0.1:8000/v1"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


pytestmark = pytest.mark.skipif(not HAS_SERVER, reason="this transformers has no continuous batching to build on")


def new_named() -> Any:
    served = new_served()
    served.name = "mine"
    return served


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("number", "key"), [(0, None), (-1, "sesame")])
def test_curl_is_answered(number: int, key: str | None) -> None:
    """Also where the server asks for the key, as in the container."""
    block = blocks("bash")[number]
    assert URL in block
    with running(new_named(), key) as url:
        done = subprocess.run(["bash", "-c", block.replace(URL, url)], capture_output=True, check=True)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 20
    assert key is None or f"export {API_KEY_VARIABLE}={key}" in PAGE


def test_the_client_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    assert URL in block
    with running(new_named()) as url:
        exec(compile(block.replace(URL, url), "serving.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


def options_of(command: str) -> set[str]:
    loaded = typer.main.get_command(app.app).get_command(None, command)  # type: ignore[attr-defined]
    return {name for parameter in loaded.params for name in parameter.opts if name.startswith("-")}


def test_the_commands_have_these_options() -> None:
    serve = [shlex.split(line, comments=True) for line in COMMANDS if line.startswith("diff-transformer serve")]
    assert len(serve) == 3
    named = {word for words in serve for word in words if word.startswith("--")}
    named |= set(re.findall(r"`(--[a-z-]+)[ `]", PAGE))  # lm_eval's have "_" in them
    assert named <= options_of("serve")


def test_the_image_is_made_of_files_that_are_there() -> None:
    """The Dockerfile installs the extra, and the torch that is tested, and its entry point is a command."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, flags=re.MULTILINE) for name in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    assert 'pip install --no-cache-dir --constraint constraints.txt ".[serve]"' in dockerfile
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.search(r"^ARG TORCH=([\d.]+)\+cpu$", dockerfile, flags=re.MULTILINE)
    assert torch is not None
    assert f"\ntorch=={torch[1]}\n" in constraints
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, flags=re.MULTILINE)
    assert entry is not None
    program, command, *settings = json.loads(entry[1])
    assert (program, command) == ("diff-transformer", "serve")
    assert {word for word in settings if word.startswith("--")} <= options_of("serve")
