import json
from pathlib import Path
from typing import Any

import pytest
import torch

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.bench import operator_bench, operator_candidates

TINY = ["--length", 12, "--heads", 2, "--head-dim", 8, "--rounds", 5]
TINY += ["--candidate", "sdpa_split_v", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diff_lab.bench.benchmark.SAMPLE_SECONDS", 0.0)


def test_bench_operator(tmp_path: Path) -> None:
    result = succeeds(run("bench", "operator", *TINY, "--batch", 3, "--output", tmp_path))
    lines = result.stdout.splitlines()
    assert lines[0] == "forward, float32, batch 3, heads 2, width 8, queries 12, keys 12"
    assert [line.split()[0] for line in lines[1:4]] == ["softmax", "auto", "sdpa_split_v"]
    assert "decode, float32, batch 3, heads 2, width 8, queries 1, keys 12" in lines
    assert "part 1 of 3: forward, float32, length 12, batch 3" in result.stderr
    document = json.loads((tmp_path / "operator-cpu.json").read_text(encoding="utf-8"))
    assert document["title"] == "bench operator"
    assert document["settings"]["batch"] == 3
    assert (tmp_path / "operator-cpu.md").is_file()


def test_results_are_only_printed_unless_a_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    once = [*TINY, "--pass", "forward"]
    result = succeeds(run("bench", "operator", *once), "sdpa_split_v")
    assert "--output" in result.stderr
    assert list(tmp_path.iterdir()) == []
    fails(run("bench", "operator", *once, "--overwrite"), "--overwrite goes with --output")


def test_earlier_results_are_not_replaced_without_overwrite(tmp_path: Path) -> None:
    options = [*TINY, "--pass", "forward", "--output", tmp_path]
    for name in ("operator-cpu.json", "operator-cpu.md"):
        (tmp_path / name).write_text("before", encoding="utf-8")
        refused = run("bench", "operator", *options)
        fails(refused, f"{name}' is there already", "--overwrite")
        if name.endswith("json"):
            (tmp_path / name).unlink()
    assert run("bench", "operator", *options, "--overwrite").exit_code == 0
    assert "before" not in (tmp_path / "operator-cpu.md").read_text(encoding="utf-8")


def test_a_wrong_candidate_ends_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_candidates, "diff_attention", lambda q, k, v, lam, **settings: torch.zeros_like(v))
    result = run("bench", "operator", *TINY, "--pass", "forward", "--output", tmp_path)
    assert result.exit_code == 2
    assert "error: wrong results, which were not timed: auto (forward, float32" in result.stderr
    rows = json.loads((tmp_path / "operator-cpu.json").read_text(encoding="utf-8"))["rows"]
    assert {row["candidate"]: row["ratio"] is not None for row in rows} == {
        "softmax": True,
        "auto": False,
        "sdpa_split_v": True,
    }
    assert "| wrong |" in (tmp_path / "operator-cpu.md").read_text(encoding="utf-8")


def test_interrupted_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any, **parts: Any) -> None:  # the rows are finished by then
        raise KeyboardInterrupt

    monkeypatch.setattr(operator_bench.OperatorSettings, "document", stop)
    result = run("bench", "operator", *TINY, "--pass", "forward", "--output", tmp_path)
    assert result.exit_code == 130
    assert "sdpa_split_v" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layer"], "'layer' is not one of 'operator', 'model'"),
        (["operator", "--dtype", "int8"], "dtype must be one of 'float32', 'bfloat16', got 'int8'"),
        (["operator", "--rounds", 0], "rounds must be 5 or more, got 0"),
        (["operator", "--heads", 7], "heads must be even"),
        (["operator", "--length", 0], "must be 1 or more, got 0"),
        (["model", "--heads", 8, "--head-dim", 8], "bench model does not take head_dims, heads."),
        (["operator", "--device", "moon"], "The device 'moon' cannot be used here"),
        (["model", "--pass", "backward"], "pass must be one of 'forward', 'step', 'decode', got 'backward'"),
    ],
)
def test_bad_input_before_any_measurement(tmp_path: Path, arguments: list[Any], message: str) -> None:
    fails(run("bench", *arguments, "--output", tmp_path), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("benchmark", ["operator", "model"])
def test_bad_output_before_any_measurement(tmp_path: Path, benchmark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    fails(run("bench", benchmark, "--output", file), "must be a folder that can be written", "it is a file")
    monkeypatch.setattr("os.access", lambda *_: False)
    fails(run("bench", benchmark, "--output", tmp_path / "new"), "this user may not write to it")
