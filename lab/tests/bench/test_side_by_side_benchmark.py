"""The measurement of two trainings side by side, at a size that says nothing of them."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from small_experiment import TINY

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imported by its name, so that workers can import it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import side_by_side  # type: ignore[import-not-found]

    monkeypatch.setattr(side_by_side, "sizes", lambda: [side_by_side.Size("tiny", TINY, TINY.variants[0])])
    threads = torch.get_num_threads()
    yield side_by_side
    torch.set_num_threads(threads)
    del sys.modules["side_by_side"]


@pytest.mark.usefixtures("forked_workers")
def test_it_measures_both_ways_and_writes(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "measured.json"
    turns = ["--rounds", "2", "--seconds", "0", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *turns])
    program.main()
    records = json.loads(output.read_text(encoding="utf-8"))["records"]
    values = {(record["name"], record["variant"]): record["value"] for record in records}
    assert values.keys() == {
        ("steps of all trainings", "side by side"),
        ("steps of all trainings", "one after the other"),
        ("ratio", "side by side"),
    }
    assert all(value > 0 for value in values.values())
    assert f"wrote {output}" in capsys.readouterr().out


def test_a_turn_begins_when_all_trainings_go(program: Any, tmp_path: Path) -> None:
    turn = program.Turn(tmp_path, 2, 0.0)
    for step in range(1, 10):
        turn.update(step, 1.0, 1.0)
    assert turn.steps == []
    (tmp_path / "the other").touch()
    turn.update(10, 1.0, 1.0)
    assert len(turn.steps) == 1
    turn.update(11, 1.0, 1.0)  # however late: one step has no speed
    with pytest.raises(program.EndOfTurnError):
        turn.update(12, 1.0, 1.0)
    assert turn.speed() > 0
