"""The examples of docs/serving.md run against a server, and its image is made of files that are there."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from diff_transformer.cli import app
from diff_transformer.cli.serve_command import API_KEY_VARIABLE
from running_server import new_served, running

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000/v1"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert URL in found[0]
    return found


def new_named() -> Any:
    served = new_served()
    served.name = "mine"
    return served


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("number", "key"), [(0, None), (-1, "sesame")])
def test_curl_is_answered(number: int, key: str | None) -> None:
    """Also where the server asks for the key, as in the container."""
    with running(new_named(), key) as url:
        command = ["bash", "-c", blocks("bash")[number].replace(URL, url)]
        done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 20
    assert key is None or f"export {API_KEY_VARIABLE}={key}" in PAGE


def test_the_client_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("python")
    with running(new_named()) as url:
        exec(compile(block.replace(URL, url), "serving.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out


def test_the_image_is_made_of_files_that_are_there() -> None:
    """The Dockerfile installs the extra, and the torch that is tested, and its entry point is a command."""
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), flags=re.MULTILINE)
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", dockerfile, flags=re.MULTILINE) for name in line.split()]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    assert 'pip install --no-cache-dir --constraint constraints.txt ".[serve]"' in dockerfile
    (torch,) = re.findall(r"^ARG TORCH=([\d.]+)\+cpu$", dockerfile, flags=re.MULTILINE)
    assert f"\ntorch=={torch}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, flags=re.MULTILINE)
    program, command, *settings = json.loads(entry)
    assert (program, command) == ("diff-transformer", "serve")
    group: Any = typer.main.get_command(app.app)
    options = {name for parameter in group.get_command(None, command).params for name in parameter.opts}
    named = {*settings, *re.findall(r"`(--[a-z-]+)[ `]", PAGE)}  # lm_eval's have "_" in them
    assert {word for word in named if word.startswith("--")} <= options
