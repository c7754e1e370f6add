"""The two records of a run: what is in them, and what is left of them when a run goes on."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from commands import largest_file
from diff_lab.train import read_metrics
from diff_lab.train.progress import Metrics


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def write(folder: Path, lines: list[dict[str, Any]], after: int = 0) -> Path:
    with Metrics(folder / "metrics.jsonl", folder / "tensorboard", after) as metrics:
        for line in lines:
            metrics.log(line)
            assert read_metrics(folder / "metrics.jsonl")[-1]["step"] == line["step"]  # at once
    return folder / "metrics.jsonl"


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_every_list_is_a_curve_for_each_layer(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "lambdas": [0.5, 0.25], "logit_max": [4.0, 8.0]},
        {"step": 2, "loss": 1.0, "lambdas": None, "mfu": None, "memory": 1 << 33},
    ]
    assert read_metrics(write(tmp_path, lines)) == lines
    assert curves(tmp_path) == {
        "loss": [(1, 2.0), (2, 1.0)],
        "lambda/layer_01": [(1, 0.5)],
        "lambda/layer_02": [(1, 0.25)],
        "logit_max/layer_01": [(1, 4.0)],
        "logit_max/layer_02": [(1, 8.0)],
        "memory": [(2, float(1 << 33))],
    }


def test_what_is_not_finite_is_null_and_never_invalid_json(tmp_path: Path) -> None:
    """A strict reader takes the file; TensorBoard, which has signs for them, gets the numbers themselves."""
    file = write(tmp_path, [{"step": 1, "loss": math.nan, "grad_norm": math.inf, "logit_max": [1.0, -math.inf]}])
    (text,) = file.read_text().splitlines()
    line = json.loads(text, parse_constant=refuse)
    assert line == {"step": 1, "loss": None, "grad_norm": None, "logit_max": [1.0, None]}
    assert read_metrics(file) == [line]
    drawn = curves(tmp_path)
    assert math.isnan(drawn["loss"][0][1])
    assert drawn["grad_norm"] == [(1, math.inf)]
    assert drawn["logit_max/layer_02"] == [(1, -math.inf)]


def wait_for_another_second() -> None:
    """TensorBoard orders the files of a process that began in the same second by a number read as text: 10 before 9."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)


TORN = {
    "half a line": b'{"step": 4, "lo',
    "a line without its end": b'{"step": 3, "loss": 1.0}',
    "zeros and more": b'\0\0\0\n{"step": 2, "loss": 0.0}\n',
}


def test_a_run_that_goes_on_forgets_later_steps(tmp_path: Path) -> None:
    """What stays is not written again: a machine that fails meanwhile loses none of it."""
    file = write(tmp_path, [{"step": step, "loss": 0.5} for step in (1, 2, 3)])
    inode = file.stat().st_ino
    wait_for_another_second()
    write(tmp_path, [{"step": 3, "loss": 0.25}], after=2)
    assert file.read_bytes() == b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n{"step": 3, "loss": 0.25}\n'
    assert file.stat().st_ino == inode
    assert curves(tmp_path)["loss"] == [(1, 0.5), (2, 0.5), (3, 0.25)]
    wait_for_another_second()
    write(tmp_path, [{"step": 1, "loss": 0.125}])  # anew, as one does that was killed before its first checkpoint
    assert file.read_bytes() == b'{"step": 1, "loss": 0.125}\n'
    assert curves(tmp_path)["loss"] == [(1, 0.125)]


@pytest.mark.parametrize("torn", TORN)
def test_a_run_that_goes_on_forgets_a_torn_line(tmp_path: Path, torn: str) -> None:
    """And what it writes stands on a line of its own."""
    file = write(tmp_path, [{"step": 1, "loss": 0.5}])
    with file.open("ab") as end:
        end.write(TORN[torn])
    write(tmp_path, [{"step": 6, "loss": 0.25}], after=5)
    assert file.read_bytes() == b'{"step": 1, "loss": 0.5}\n{"step": 6, "loss": 0.25}\n'


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 0.5} for step in range(1, 100)]
    with largest_file(1000), pytest.raises(OSError, match=r"cannot be written \(File too.*--resume"):
        write(tmp_path, lines)
