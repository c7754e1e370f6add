"""Every tutorial runs from its first cell to its last, at a small size."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from diff_transformer.cli.app import COMMANDS
from full_run import short_run

jupytext = pytest.importorskip("jupytext")
pyplot = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "tutorials"
RESULTS = str(ROOT / "lab" / "results")

# Tutorial → what its cell of parameters is replaced with.
SMALL: dict[str, dict[str, Any]] = {
    "from_scratch": {"RESULTS": RESULTS},
    "laptop_to_cluster": {"STEPS": 6, "CLUSTER": str(ROOT / "examples" / "cluster")},
    "operator_in_your_model": {"GPT_STEPS": 30, "VIT_EPOCHS": 1, "SEEDS": 2},
    "pretrained_llama": {"LLAMA_STEPS": 20, "STEPS": 6},
    "read_an_attention_map": {},
    "reproduce_the_paper": {"RESULTS": RESULTS},
    "your_text_both_models": {"STEPS": 20, "VALIDATION_TOKENS": 1000, "SEEDS": 1, "LEARNING_RATES": "1e-2"},
}


def cells(name: str) -> list[Any]:
    return list(jupytext.read(FOLDER / f"{name}.py").cells)


def can_run(cell: Any) -> bool:
    """Whether a cell is code whose packages load here: of one that needs timm, a tag says so, as to the site."""
    try:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("needs-"):
                importlib.import_module(tag.removeprefix("needs-"))
    except Exception:  # torchvision's, beside a torch that it was not built for, is any
        return False
    return bool(cell.cell_type == "code")


@pytest.fixture(autouse=True)
def _drawn_nowhere() -> Iterator[None]:
    with pyplot.rc_context():
        pyplot.switch_backend("agg")
        yield
    pyplot.close("all")
    enable_progress_bar()  # some tutorials switch it off


@pytest.mark.parametrize("name", short_run(SMALL, ["reproduce_the_paper"]))
@pytest.mark.usefixtures("one_worker")
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run that one process begins and another goes on with is the same to the bit with as many threads.
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        if not can_run(cell):
            continue
        code = "\n".join("" if line.startswith("%") else line for line in cell.source.splitlines())
        exec(compile(code, f"{name}, cell {number}", "exec"), namespace)
        if "parameters" in cell.metadata.get("tags", []):
            assert SMALL[name].keys() <= namespace.keys(), "a parameter of the test is none of the tutorial"
            namespace.update(SMALL[name])
        for figure in map(pyplot.figure, pyplot.get_fignums()):
            figure.savefig(tmp_path / "figure.svg")
        pyplot.close("all")
    assert capsys.readouterr().out


def test_each_is_run_and_names_commands_that_there_are() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(SMALL)
    for name in SMALL:
        text = "\n".join(cell.source for cell in cells(name))
        commands = re.findall(r"""(?:["`]|^ {4})diff-transformer (\w+)""", text, flags=re.MULTILINE)
        assert set(commands) <= set(COMMANDS)
