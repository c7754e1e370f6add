"""The measurement of the training loop's overhead, at a size that says nothing of it."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from diff_lab.record import Result

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "training_loop.py"
TINY = ["--hidden", "64", "--layers", "1", "--length", "16", "--vocabulary", "257", "--block", "4", "--rounds", "3"]


@pytest.fixture(autouse=True)
def _accelerate_starts_afresh() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def program() -> Any:
    spec = importlib.util.spec_from_file_location("training_loop", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_measures_and_writes(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "loop.json"
    text.write_text("".join(f"line {number}: to be, or not to be\n" for number in range(200)), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["training_loop.py", *TINY, "--text", str(text), "--output", str(output)])
    program.main()
    printed, document = capsys.readouterr().out, json.loads(output.read_text(encoding="utf-8"))
    steps = {record["variant"]: record for record in document["records"] if record["name"] == "step"}
    assert {variant: record["n"] for variant, record in steps.items()} == {"train": 3, "bare": 3}
    overhead = {record["name"]: record["value"] for record in document["records"] if "overhead" in record["name"]}
    assert overhead["overhead of the steps"] < overhead["overhead"]
    assert "limit: at most 3 %" in printed
    assert document["settings"]["train"]["steps"] == program.WARM_UP + 12


def test_loops_that_do_not_do_the_same_have_no_times(program: Any) -> None:
    program.check_agreement([2.0, 1.0], [2.0, 1.0005], 1e-3)
    with pytest.raises(ValueError, match=r"part: at step 2 the loss of train\(\) is 1.0, of the bare loop 1.01"):
        program.check_agreement([2.0, 1.0], [2.0, 1.01], 1e-3)
    with pytest.raises(ValueError, match="at step 1"):
        program.check_agreement([float("nan")], [2.0], 1e-3)


@pytest.mark.parametrize(
    ("quartiles", "overhead", "expected"),
    [((0.0, 0.01), 0.02, "held"), ((0.03, 0.05), 0.05, "missed"), ((-0.4, 1.1), 0.01, "undecided")],
)
def test_a_busy_machine_decides_nothing(
    program: Any, quartiles: tuple[float, float], overhead: float, expected: str
) -> None:
    steps = Result(name="overhead of the steps", variant="train", value=sum(quartiles) / 2, interval=quartiles)
    assert program.verdict([steps, Result(name="overhead", variant="train", value=overhead)]).startswith(expected)
