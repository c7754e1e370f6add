import gc

import pytest
import torch

from diff_lab.bench.benchmark import FORWARD, MOST_ROUNDS, BenchRow, BenchSettings, alternate, time_case, wall_clock

CLOCK = wall_clock(torch.device("cpu"))


def test_every_candidate_runs_once_a_round_in_rotating_order() -> None:
    calls: list[str] = []
    times = alternate({name: lambda name=name: calls.append(name) for name in "abc"}, CLOCK, rounds=6)
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 6)
    assert all(value > 0 for values in times.values() for value in values)
    # The first run of each tells how long it takes.
    assert "".join(calls) == "abc" + "abcbcacab" * 2


def test_fast_candidates_are_repeated_and_get_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diff_lab.bench.benchmark.SAMPLE_SECONDS", 0.001)
    calls: list[int] = []
    times = alternate({"fast": lambda: calls.append(0)}, CLOCK)
    assert len(times["fast"]) == MOST_ROUNDS
    assert len(calls) > 10 * MOST_ROUNDS


def test_a_ratio_is_to_the_candidate_that_it_names() -> None:
    seconds = {"softmax": 2.0, "Llama": 4.0, "DiffLlama": 6.0}
    rows = {name: BenchRow(candidate=name, pass_=FORWARD, dtype="float32", shape={}) for name in seconds}
    timed = time_case(
        rows,
        lambda name: lambda: seconds[name],
        BenchSettings(rounds=5),
        lambda run, repeats: run(),  # type: ignore[arg-type,return-value]  # each run gives its own time
        rates=lambda time: {"tokens_per_second": 12 / time},
        other_bases={"DiffLlama": ("Llama",)},
    )
    assert [(row.candidate, row.against, row.ratio, row.tokens_per_second) for row in timed] == [
        ("softmax", "softmax", 1.0, 6.0),
        ("Llama", "softmax", 2.0, 3.0),
        ("DiffLlama", "softmax", 3.0, 2.0),
        ("DiffLlama", "Llama", 1.5, 2.0),
    ]
    assert [row.milliseconds for row in timed] == [2e3, 4e3, 6e3, 6e3]


def test_collection_goes_on_after_a_failure() -> None:
    runs = iter([False, False, True])

    def fails() -> None:
        assert gc.isenabled() or not next(runs)

    assert next(runs) is False
    with pytest.raises(AssertionError):
        alternate({"a": fails}, CLOCK, rounds=5)
    assert gc.isenabled()
