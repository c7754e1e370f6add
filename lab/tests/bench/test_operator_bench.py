import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from diff_lab.bench import operator_bench, operator_candidates
from diff_lab.bench.benchmark import (
    DECODE,
    FORWARD,
    TRAINING,
    BenchRow,
    Threshold,
    refuse_wrong,
    row_threshold,
)
from diff_lab.bench.operator_bench import OperatorSettings, cpu_thresholds, measure_operator
from diff_lab.record import Environment
from tiny_model import needs_vectors


def test_a_run_has_every_case_and_where_it_comes_from(tiny: OperatorSettings, notes: Any) -> None:
    document, rows = measure_operator(tiny, notes)
    assert rows == document["rows"]
    assert notes.rows == [*rows, *document["grouped"]]
    cases = {(row.pass_, row.dtype, row.shape["batch"], row.shape["queries"], row.shape["keys"]) for row in rows}
    dtypes = ("float32", "bfloat16")
    expected = {(pass_, dtype, 1, n, n) for pass_ in (FORWARD, TRAINING) for dtype in dtypes for n in (12, 40)}
    assert cases == expected | {(DECODE, dtype, batch, 1, 24) for dtype in dtypes for batch in (1, 2)}
    backend = next(row.backend for row in rows if row.candidate == "auto")
    named = {row.candidate for row in rows}
    assert named == {"softmax", "auto", "blockwise", "sdpa_split_v"} - {backend}
    for row in rows:
        assert row.reason is None
        assert row.ratio is not None
        assert row.quartiles is not None
        assert row.extremes is not None
        assert row.extremes[0] <= row.quartiles[0] <= row.ratio <= row.quartiles[1] <= row.extremes[1]
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
    counts = [(done, total) for _, done, total in notes.stages]
    assert counts == [(done, len(counts)) for done in range(len(counts))]


def test_groups_are_measured_once_and_repeated(tiny: OperatorSettings, notes: Any) -> None:
    """Beside the other rows, relative to as many heads of the Transformer."""
    document, rows = measure_operator(tiny, notes)
    found = {(row.candidate, row.pass_, row.dtype) for row in document["grouped"]}
    names = ("softmax", "blockwise", "blockwise, repeated")
    assert found == set(itertools.product(names, (FORWARD, TRAINING), ("float32", "bfloat16")))
    for row in document["grouped"]:
        assert row.shape == {"batch": 1, "heads": 5, "width": 8, "queries": 20, "keys": 20}
        assert (row.against, row.reason) == ("softmax", None)
        assert row.ratio is not None
        assert row.candidate == "softmax" or row.error < 1
    assert not any("repeated" in row.candidate for row in rows)
    for changed in ({"grouped_length": 0}, {"candidates": ("sdpa_split_v",)}, {"passes": ("decode",)}):
        assert not measure_operator(dataclasses.replace(tiny, **changed), notes)[0]["grouped"]


def test_a_wrong_group_is_refused(tiny: OperatorSettings, notes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = operator_candidates.diff_attention

    def wrong(q: torch.Tensor, *args: Any, **settings: Any) -> torch.Tensor:
        return right(q, *args, **settings) * (1.001 if q.shape[2] > 2 else 1)

    monkeypatch.setattr(operator_candidates, "diff_attention", wrong)
    document, rows = measure_operator(dataclasses.replace(tiny, dtypes=("float32",), passes=("forward",)), notes)
    ratios = {row.candidate: row.ratio for row in document["grouped"]}
    assert ratios["blockwise"] is None
    assert ratios["blockwise, repeated"] is not None
    with pytest.raises(ValueError, match=r"wrong results.*: blockwise \(forward, float32, batch 1, heads 5"):
        refuse_wrong(rows)


def test_bytes_by_time_when_decoding(tiny: OperatorSettings, notes: Any) -> None:
    _, rows = measure_operator(dataclasses.replace(tiny, passes=("decode",), decode_batches=(2,)), notes)
    for row in rows:
        size = 4 if row.dtype == "float32" else 2
        assert row.milliseconds is not None
        expected = 2 * (2 * 4 * 24 * 8) * size / (row.milliseconds * 1e-3) / 1e9
        assert row.gigabytes_per_second == pytest.approx(expected)


def test_a_wrong_candidate_gets_no_time_and_is_named(
    tiny: OperatorSettings, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = operator_candidates.diff_attention

    def wrong(*args: Any, backend: str, **settings: Any) -> torch.Tensor:
        return right(*args, backend=backend, **settings) * (1.001 if backend == "auto" else 1)

    monkeypatch.setattr(operator_candidates, "diff_attention", wrong)
    settings = dataclasses.replace(tiny, dtypes=("float32",), lengths=(512,), passes=("forward",))
    document, rows = measure_operator(settings, notes)
    row = next(row for row in rows if row.candidate == "auto")
    assert row.wrong
    assert (row.milliseconds, row.ratio, row.reason) == (None, None, "its results are wrong")
    assert all(other_row.ratio is not None for other_row in rows if other_row is not row)
    with pytest.raises(ValueError, match=r"auto \(forward, float32, batch 1.* times the allowed error\)"):
        refuse_wrong(rows)
    assert [one.holds for one in document["thresholds"] if one.text.startswith("forward, float32")] == [False, False]


def test_right_rows_are_not_refused(tiny: OperatorSettings) -> None:
    row = BenchRow(candidate="a", pass_=FORWARD, dtype="float32", shape={})
    refuse_wrong([row, dataclasses.replace(row, error=1.0), dataclasses.replace(row, reason="cannot run")])
    with pytest.raises(ValueError, match="a "):
        refuse_wrong([dataclasses.replace(row, error=math.nan)])


@needs_vectors
def test_what_cannot_be_compiled_is_a_reason_for_flex_alone(
    tiny: OperatorSettings, notes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, failing = operator_candidates.diff_attention, ["flex"]

    def attention(*args: Any, backend: str, **settings: Any) -> torch.Tensor:
        if backend in failing:
            raise RuntimeError("no compiler\nat all")
        return right(*args, backend=backend, **settings)

    monkeypatch.setattr(operator_candidates, "diff_attention", attention)
    settings = dataclasses.replace(tiny, dtypes=("float32",), lengths=(12,), passes=("forward",), candidates=("flex",))
    _, rows = measure_operator(settings, notes)
    assert next(row.reason for row in rows if row.candidate == "flex") == "RuntimeError: no compiler"
    failing.append("auto")
    with pytest.raises(RuntimeError, match="no compiler"):
        measure_operator(settings, notes)


def test_one_head_on_all_threads(tiny: OperatorSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        row, parts = operator_bench.measure_one_head(tiny, "float32", FORWARD)
        assert torch.get_num_threads() == 2
        monkeypatch.setattr(operator_candidates, "diff_attention", lambda q, k, v, lam, **settings: torch.zeros_like(v))
        wrong, nothing = operator_bench.measure_one_head(tiny, "float32", FORWARD)
    finally:
        torch.set_num_threads(threads)
    assert [(part["candidate"], part["threads"], part["length"]) for part in parts] == [
        ("softmax", 2, 16),
        ("auto", 2, 16),
    ]
    assert all(part["speed_up"] > 0 for part in parts)
    assert not row.wrong
    assert (wrong.wrong, nothing) == (True, [])
    alone, nothing = operator_bench.measure_one_head(tiny, "float32", FORWARD)
    assert (alone.wrong, nothing) == (False, [])  # one thread has nothing to gain


def test_the_one_head_threshold_is_a_share_of_linear() -> None:
    part = {"candidate": "auto", "pass": FORWARD, "dtype": "float32", "threads": 2, "speed_up": 1.8}
    good, bad = part, {**part, "speed_up": 1.2}
    assert operator_bench.one_head_threshold([good]).holds is True
    assert operator_bench.one_head_threshold([good, bad]).holds is False
    assert operator_bench.one_head_threshold([good, bad]).worst == pytest.approx(0.6)
    assert operator_bench.one_head_threshold([{**bad, "candidate": "softmax"}]).holds is None


def row(ratio: float, length: int, pass_: str = FORWARD, dtype: str = "float32") -> BenchRow:
    return BenchRow(candidate="auto", pass_=pass_, dtype=dtype, shape={"keys": length}, ratio=ratio)


def test_the_thresholds_of_the_cpu() -> None:
    rows = [row(1.05, 256), row(0.99, 512), row(1.01, 2048), row(1.09, 8192)]
    rows += [row(1.0, 1024, TRAINING), row(1.2, 8192, FORWARD, "bfloat16"), row(1.06, 512, DECODE)]
    rows += [dataclasses.replace(row(9.0, 1024), candidate="sdpa_split_v")]
    thresholds = {one.text: (one.limit, one.worst, one.holds) for one in cpu_thresholds(rows)}
    assert thresholds == {
        "forward, float32, N 512 to 2048": (1.0, 1.01, False),
        "forward + backward, float32, N 512 to 2048": (0.95, 1.0, False),
        "forward, float32, all lengths": (1.1, 1.09, True),
        "forward + backward, float32, all lengths": (1.1, 1.0, True),
        "decode, float32, all lengths": (1.05, 1.06, False),
        "forward, bfloat16, all lengths": (1.1, 1.2, False),
    }


def test_a_threshold_without_rows_is_not_measured() -> None:
    unmeasured = row_threshold("text", 1.0, [])
    assert unmeasured == Threshold(text="text", limit=1.0, worst=None, where=None, holds=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "moon"}, "The device 'moon' cannot be used here"),
        ({"dtypes": ("float64",)}, "dtype must be one of 'float32', 'bfloat16', got 'float64'"),
        (
            {"passes": ("step",)},
            "pass must be one of 'forward', 'backward', 'forward\\+backward', 'decode', got 'step'",
        ),
        ({"candidates": ("fast",)}, "candidate must be one of 'softmax', 'auto', .* got 'fast'"),
        ({"rounds": 4}, "rounds must be 5 or more, got 4"),
        ({"heads": 3}, "heads must be even, .* got 3"),
        ({"heads": 0}, "heads must be 1 or more, got 0"),
        ({"head_dims": (64, -1)}, "head_dims must be 1 or more, got -1"),
        ({"batch": 0}, "batch must be 1 or more, got 0"),
        ({"lengths": (64, 0)}, "lengths must be 1 or more, got 0"),
        ({"memory_length": -1}, "memory_length must be 0 or more, got -1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OperatorSettings(**settings)
