"""Trackers get the curves of TensorBoard, without a network; skipped where their libraries are not installed.

make test-titan has wandb; trackio 0.43 wants an older pillow than constraints.txt has.
"""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from diff_lab.train import train
from diff_lab.train.progress import Metrics
from small_runs import small_recipe

LINES: list[dict[str, Any]] = [
    {"step": step, "loss": 1 / step, "lambdas": [0.25, 0.5], "skipped": "a remark"} for step in (1, 2, 3)
]


def script(library: str, folder: Path) -> None:
    """Two steps of a run, and after a pause the third."""
    for done, lines in ((0, LINES[:2]), (2, LINES[2:])):
        files = folder / "metrics.jsonl", folder / "tensorboard"
        with Metrics(*files, done, [library], name="small", train={"steps": 3}) as metrics:
            for line in lines:
                metrics.log(line)


def track(library: str, folder: Path) -> None:
    """Run the script in a process of its own: the libraries read the environment once, and leave threads."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    offline = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, library, folder], env=os.environ | offline, check=True, timeout=600)


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    track("wandb", tmp_path)
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert first.name == second.name, "the same run"
    for part in (first, second):
        content = part.read_bytes()  # protocol buffers, not compressed
        assert all(text in content for text in (b"loss", b"lambda/layer_01", b"lambda/layer_02", b"small"))
        assert b"a remark" not in content


def test_trackio_on_this_machine(tmp_path: Path) -> None:
    track("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "diff-transformer.db") as base:
        rows = base.execute("SELECT run_id, step, metrics FROM metrics ORDER BY step").fetchall()
    assert len({run for run, _, _ in rows}) == 1
    assert [step for _, step, _ in rows] == [1, 2, 3]
    assert all(json.loads(metrics)["lambda/layer_02"] == 0.5 for *_, metrics in rows)


def test_a_library_that_is_missing_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"train\.trackers names 'wandb', which is not installed: pip install wandb"):
        train(small_recipe(trackers=["wandb"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    script(sys.argv[1], Path(sys.argv[2]))
