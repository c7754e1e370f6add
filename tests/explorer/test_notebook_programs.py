"""The widget in JupyterLab and in marimo, in a real browser. Both are skipped where they are not installed."""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_transformer import attention_maps

pytest.importorskip("anywidget")
playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.all, pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium")]

SECONDS = 60  # for a program to start, or a model to be loaded, on a busy machine
READY = ".explorer[data-ready=true]"
TEXT = "w3 w7 w1 w12 w7 w9"
CELL = f"""import torch
import diff_transformer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
sizes = dict(vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
torch.manual_seed(5)
model = DiffTransformerForCausalLM(DiffTransformerConfig(**sizes, initializer_range=0.4)).double().eval()
twin = DiffTransformerForCausalLM(DiffTransformerConfig(**sizes, attention_type="softmax")).double().eval()
words = [f"w{{number}}" for number in range(29)]
diff_transformer.explore(model, words, {TEXT!r}, compare=twin)"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def running(command: list[str], address: str, folder: Path) -> Iterator[None]:
    """A program that answers at an address until the block ends."""
    own = {name: str(folder / name) for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | own, stdout=log, stderr=log)
    try:
        end = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(address, timeout=10).close()
                break
            except (urllib.error.URLError, ConnectionError):
                text = (folder / "log").read_text()
                assert process.poll() is None, text
                assert time.monotonic() < end, text
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(SECONDS)


@contextmanager
def opened(address: str) -> Iterator[Any]:
    """The page in a browser; at the end nothing beyond this machine may have been asked."""
    asked: set[str] = set()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(SECONDS * 1000)
        page.on("request", lambda request: asked.add(request.url))
        page.goto(address)
        yield page
        browser.close()
    assert {
        url for url in asked if not re.match(r"(http|ws)://(127\.0\.0\.1|localhost):\d+/|data:|blob:", url)
    } == set()


@pytest.fixture
def look(tmp_path: Path) -> Callable[[Any, str], None]:
    """(page, program) → checks the widget in it: its maps are the model's, and λ moves what the model predicts."""
    names: dict[str, Any] = {}
    exec(CELL.rpartition("\n")[0], names)
    tokens = torch.tensor([[int(word[1:]) for word in TEXT.split()]])
    maps = attention_maps(names["model"], tokens)

    def check(page: Any, program: str) -> None:
        explorer = page.locator(READY)
        explorer.wait_for()
        explorer.scroll_into_view_if_needed()
        page.locator(".explorer .grid canvas").first.wait_for()
        before = page.locator(".measures").first.inner_text()
        slider = page.locator(".explorer input[type=range]").first
        slider.fill("0")
        end = time.monotonic() + SECONDS
        while page.locator(".measures").first.inner_text() == before:
            assert time.monotonic() < end, "λ moved, and no number followed"
            time.sleep(0.1)
        page.locator(".explorer button", has_text="Learned").first.click()
        while page.locator(".measures").first.inner_text() != before:
            assert time.monotonic() < end, "λ is as learned, and the numbers are not"
            time.sleep(0.1)
        assert page.locator(".explorer .error").count() == 0
        shown = page.locator(".flow .token").evaluate_all("tokens => tokens.map(token => token.title)")
        assert len(shown) == len(TEXT.split())
        weights = [float(title.rpartition(": ")[2].replace("−", "-")) for title in shown]
        # The page opens with a head that is striking.
        named = re.search(r"Layer (\d+), head (\d+)", explorer.inner_text())
        assert named is not None
        expected = maps[int(named[1]) - 1].difference[0, int(named[2]) - 1, -1]
        assert weights == pytest.approx(expected.tolist(), abs=2e-3)
        if folder := os.environ.get("NOTEBOOK_PICTURES"):
            page.screenshot(path=str(Path(folder) / f"{program}.png"))

    return check


@pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="no JupyterLab")
def test_jupyterlab_shows_the_widget(tmp_path: Path, look: Callable[[Any, str], None]) -> None:
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "source": CELL, "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "page.ipynb").write_text(json.dumps(notebook))
    address = f"http://127.0.0.1:{(port := free_port())}/lab"
    settings = [
        f"--port={port}",
        "--no-browser",
        "--allow-root",
        "--IdentityProvider.token=",
        f"--notebook-dir={tmp_path}",
    ]
    with (
        running([sys.executable, "-m", "jupyterlab", *settings], address, tmp_path),
        opened(f"{address}/tree/page.ipynb") as page,
    ):
        page.locator(".jp-Cell-inputArea .cm-content").first.click()
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        page.keyboard.press("Shift+Enter")
        look(page, "jupyterlab")
        # Keys that mean something to the widget, and to JupyterLab: they are the widget's while it has the focus.
        active = ".jp-Notebook .jp-Cell.jp-mod-active .explorer"
        cells = page.locator(".jp-Notebook .jp-Cell").count()
        page.locator(".explorer .grid [data-head]").first.focus()
        page.locator(active).wait_for()
        for key in ("ArrowDown", "b"):
            page.keyboard.press(key)
        page.wait_for_timeout(500)
        assert page.locator(".explorer .grid [data-head]:focus").get_attribute("data-head") == "2.1"
        assert page.locator(".jp-Notebook .jp-Cell").count() == cells
        assert page.locator(active).count() == 1


@pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="no marimo")
def test_marimo_shows_the_widget(tmp_path: Path, look: Callable[[Any, str], None]) -> None:
    body = "".join(f"    {line}\n" for line in CELL.splitlines())
    lines = ["import marimo", "app = marimo.App()", "@app.cell", "def _():", f"{body}    return", "app.run"]
    (tmp_path / "page.py").write_text("\n".join(lines))
    address = f"http://127.0.0.1:{(port := free_port())}"
    settings = ["run", "page.py", "--headless", "--no-token", f"--port={port}"]
    with running([sys.executable, "-m", "marimo", *settings], address, tmp_path), opened(address) as page:
        look(page, "marimo")
