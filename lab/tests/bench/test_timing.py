import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

from diff_lab.bench import timing
from diff_lab.bench.benchmark import FORWARD, BenchRow, BenchSettings, time_case
from diff_lab.bench.timing import MOST_ROUNDS, EventClock, alternate, kernel_clock, wall_clock

CLOCK = wall_clock(torch.device("cpu"))


def test_every_candidate_runs_once_a_round_in_rotating_order() -> None:
    calls: list[str] = []
    times = alternate({name: lambda name=name: calls.append(name) for name in "abc"}, CLOCK, rounds=6)
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abc", 6)
    assert all(value > 0 for values in times.values() for value in values)
    # The first run of each tells how long it takes.
    assert "".join(calls) == "abc" + "abcbcacab" * 2


def test_fast_candidates_are_repeated_and_get_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diff_lab.bench.timing.SAMPLE_SECONDS", 0.001)
    calls: list[int] = []
    times = alternate({"fast": lambda: calls.append(0)}, CLOCK)
    assert len(times["fast"]) == MOST_ROUNDS
    assert len(calls) > 10 * MOST_ROUNDS


def test_on_cuda_runs_are_timed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache full of something else, and launched while the device sleeps, but no longer than it may."""
    now, slept, ones = [0.0], list[int](), torch.ones

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    fakes = {
        "Event": Event,
        "synchronize": lambda device=None: None,
        "device": lambda device: contextlib.nullcontext(),
        "_sleep": slept.append,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1024),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "ones", lambda size, device: ones(size))
    measure = kernel_clock(torch.device("cuda"))
    assert isinstance(measure, EventClock)
    assert measure._other.nbytes == timing.FLUSH * 1024

    def run() -> None:
        now[0] += 2.0  # milliseconds

    assert measure(run, 1) == pytest.approx(2e-3)
    assert slept == []  # how long the host takes is not known yet
    assert measure(run, timing.BURST + 1) == pytest.approx(2e-3)
    assert 0 <= slept[1] < slept[0] <= timing.LONGEST_START * timing.CYCLES


def test_a_ratio_is_to_the_candidate_that_it_names() -> None:
    seconds = {"softmax": 2.0, "Llama": 4.0, "DiffLlama": 6.0}
    rows = {name: BenchRow(candidate=name, pass_=FORWARD, dtype="float32", shape={}) for name in seconds}
    timed = time_case(
        rows,
        lambda name: lambda: seconds[name],
        BenchSettings(rounds=5),
        lambda run, repeats: run(),  # type: ignore[arg-type,return-value]  # each run gives its own time
        rates=lambda time: {"tokens_per_second": 12 / time},
        other_bases={"DiffLlama": "Llama"},
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
