import dataclasses
import math
from typing import Any

import pytest
import torch

from diff_lab.bench import operator_candidates
from diff_lab.bench.benchmark import DECODE, FORWARD, TRAINING, BenchRow, refuse_wrong
from diff_lab.bench.operator_bench import OperatorSettings, measure_operator
from diff_lab.record import Environment


def test_a_run_has_every_case_and_where_it_comes_from(tiny: OperatorSettings, notes: Any) -> None:
    document = measure_operator(tiny, notes)
    rows = document["rows"]
    assert rows == notes.rows
    assert [f"  {row}" for row in rows] == [line for line in notes.shown if line[0] == " "]
    cases = {(row.pass_, row.dtype, row.shape["batch"], row.shape["queries"], row.shape["keys"]) for row in rows}
    dtypes = ("float32", "bfloat16")
    expected = {(pass_, dtype, 1, n, n) for pass_ in (FORWARD, TRAINING) for dtype in dtypes for n in (12, 40)}
    assert cases == expected | {(DECODE, dtype, 1, 1, n) for dtype in dtypes for n in (12, 40)}
    backend = next(row.backend for row in rows if row.candidate == "auto")
    named = {row.candidate for row in rows}
    assert named == {"softmax", "auto", "blockwise", "sdpa_split_v"} - {backend}
    for row in rows:
        assert row.reason is None
        assert row.ratio is not None
        assert row.quartiles is not None
        assert row.quartiles[0] <= row.ratio <= row.quartiles[1]
        assert row.rounds == 5
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        assert (row.gigabytes_per_second is not None) == (row.pass_ == DECODE)
        if row.candidate == "softmax":
            assert (row.ratio, row.error) == (1.0, None)
        else:
            assert row.error is not None
            assert row.error < 1
    assert {field.name for field in dataclasses.fields(Environment)} < document.keys()
    assert document["settings"]["threads"] == torch.get_num_threads()
    count = len(notes.lines)
    assert [line.split(":")[0] for line in notes.lines] == [f"part {n} of {count}" for n in range(1, count + 1)]


def test_bytes_by_time_when_decoding(tiny: OperatorSettings, notes: Any) -> None:
    measure_operator(dataclasses.replace(tiny, passes=("decode",), batch=2), notes)
    for row in notes.rows:
        size = 4 if row.dtype == "float32" else 2
        assert row.milliseconds is not None
        expected = 2 * (2 * 4 * row.shape["keys"] * 8) * size / (row.milliseconds * 1e-3) / 1e9
        assert row.gigabytes_per_second == pytest.approx(expected)


def test_a_wrong_candidate_gets_no_time_and_is_named(
    tiny: OperatorSettings, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operator_candidates.diff_attention

    def wrong(*args: Any, backend: str, **settings: Any) -> torch.Tensor:
        return right(*args, backend=backend, **settings) * (1.001 if backend == "auto" else 1)

    monkeypatch.setattr(operator_candidates, "diff_attention", wrong)
    settings = dataclasses.replace(tiny, dtypes=("float32",), lengths=(512,), passes=("forward",))
    measure_operator(settings, notes)
    rows = notes.rows
    row = next(row for row in rows if row.candidate == "auto")
    assert row.wrong
    assert (row.milliseconds, row.ratio, row.reason) == (None, None, "its results are wrong")
    assert all(other_row.ratio is not None for other_row in rows if other_row is not row)
    with pytest.raises(ValueError, match=r"auto \(forward, float32, batch 1.* times the allowed error\)"):
        refuse_wrong(rows)


def test_right_rows_are_not_refused(tiny: OperatorSettings) -> None:
    row = BenchRow(candidate="a", pass_=FORWARD, dtype="float32", shape={})
    refuse_wrong([row, dataclasses.replace(row, error=1.0), dataclasses.replace(row, reason="cannot run")])
    with pytest.raises(ValueError, match="a "):
        refuse_wrong([dataclasses.replace(row, error=math.nan)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"candidates": ("fast",)}, "candidate must be one of 'softmax', 'auto', .* got 'fast'"),
        ({"head_dims": (64, -1)}, "head_dims must be 1 or more, got -1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    """Others are refused to the command, see the tests of `bench`."""
    with pytest.raises(ValueError, match=message):
        OperatorSettings(**settings)
