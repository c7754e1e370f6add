"""The timing of backends on a GPU that nobody has measured, with a device made up and candidates of known speed."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from diff_transformer.ops import candidate_timing, device_findings
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.reference import reference_attention
from diff_transformer.ops.sdpa import sdpa_attention
from faked_cuda import fake_device, forget


class Clock:
    """Lets time pass in candidates alone, and counts their runs."""

    def __init__(self, **seconds: float | Exception) -> None:
        self.now, self.runs, self._seconds = 0.0, Counter[str](), seconds

    def perf_counter(self) -> float:
        return self.now

    def candidates(self) -> dict[str, Any]:
        def attend(request: Request, name: str) -> Tensor:
            seconds = self._seconds[name]
            self.runs[name] += 1
            if isinstance(seconds, Exception):
                raise seconds
            self.now += seconds
            return reference_attention(request)

        return {name: lambda request, name=name: attend(request, name) for name in self._seconds}


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    fake_device(monkeypatch, tmp_path)
    find = device_findings.findings_of
    monkeypatch.setattr(candidate_timing, "findings_of", lambda _: find(0))
    yield
    forget(monkeypatch)


def ask(monkeypatch: pytest.MonkeyPatch, clock: Clock, request: Request | None = None) -> str:
    monkeypatch.setattr(candidate_timing, "time", clock)
    return candidate_timing.fastest(request or a_request(), clock.candidates())


def a_request(n: int = 12, gradient: bool = False, **more: Any) -> Request:
    q = torch.randn(1, 2, 2, n, 8, requires_grad=gradient)
    settings = {"attn_mask": None, "is_causal": True, "scale": 1.0, "window": None, "segment_bounds": None, **more}
    return Request(q, torch.randn(1, 2, 2, n, 8), torch.randn(1, 2, n, 16), torch.ones(1, 2, n), **settings)


def test_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(triton=2.0, sdpa=1.0)
    assert [ask(monkeypatch, clock) for _ in range(3)] == ["sdpa"] * 3
    once = 1 + candidate_timing.ROUNDS * candidate_timing.REPEATS
    assert clock.runs == {"triton": once, "sdpa": once}
    assert "triton 2000.000 ms, sdpa 1000.000 ms" in candidate_timing.status(0)
    assert [ask(monkeypatch, clock, a_request(n)) for n in (9, 16)] == ["sdpa"] * 2  # of the same class
    assert clock.runs["sdpa"] == once
    forget(monkeypatch)  # another process
    assert ask(monkeypatch, clock) == "sdpa"
    assert clock.runs["sdpa"] == once


def test_the_first_stays_unless_another_is_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, Clock(triton=1.0, sdpa=0.98)) == "triton"
    assert ask(monkeypatch, Clock(triton=1.0, sdpa=0.95), a_request(40)) == "sdpa"


@pytest.mark.parametrize(
    "other",
    [
        {"n": 17},
        {"gradient": True},
        {"window": 3},
        {"attn_mask": torch.ones(1, 1, 1, 12, dtype=torch.bool)},
        {"is_causal": False},
    ],
    ids=["length", "gradient", "window", "mask", "not causal"],
)
def test_other_shapes_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    assert ask(monkeypatch, Clock(triton=2.0, sdpa=1.0)) == "sdpa"
    assert ask(monkeypatch, Clock(triton=1.0, sdpa=2.0), a_request(**other)) == "triton"
    assert ask(monkeypatch, Clock(triton=1.0, sdpa=2.0)) == "sdpa"


def test_gradients_are_timed_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    request = a_request(gradient=True)
    assert ask(monkeypatch, Clock(triton=2.0, sdpa=1.0), request) == "sdpa"
    assert request.q.grad is None
    assert "training, float32, d 8, dv 16" in candidate_timing.status(0)


def test_a_checkpointed_layer_counts_its_own_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass times, and the one that is computed again does not: both must save the same tensors."""
    monkeypatch.setattr(candidate_timing, "ROUNDS", 1)
    candidates = {"reference": reference_attention, "sdpa": sdpa_attention}
    request = a_request(gradient=True)
    names: list[str] = []

    def layer(q: Tensor) -> Tensor:
        again = request._replace(q=q)
        names.append(candidate_timing.fastest(again, candidates))
        return candidates[names[0]](again)

    checkpoint(layer, request.q, use_reentrant=False).sum().backward()
    assert len(names) == 2
    assert "reference " in candidate_timing.status(0)
    expected = request.q.detach().requires_grad_()
    reference_attention(request._replace(q=expected)).sum().backward()
    torch.testing.assert_close(request.q.grad, expected.grad)


def test_a_candidate_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, Clock(triton=RuntimeError("no kernel\nmore"), sdpa=1.0)) == "sdpa"
    assert "triton RuntimeError: no kernel, sdpa 1000.000 ms" in candidate_timing.status(0)
    assert ask(monkeypatch, Clock(triton=2.0, sdpa=ValueError("no")), a_request(40)) == "triton"


def test_a_full_device_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, Clock(triton=2.0, sdpa=torch.OutOfMemoryError("CUDA out of memory"))) == "triton"
    assert ask(monkeypatch, Clock(triton=2.0, sdpa=1.0)) == "sdpa"


@pytest.mark.parametrize("reason", ["switch", "older", "deterministic", "capturing", "traced"])
def test_nothing_is_timed_where_it_may_not_be(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    clock = Clock(triton=2.0, sdpa=1.0)
    if reason == "switch":
        monkeypatch.setenv("DIFF_TRANSFORMER_TUNE", "0")
        assert candidate_timing.status(0) == "switched off by DIFF_TRANSFORMER_TUNE=0"
    elif reason == "older":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
        assert "before Hopper" in candidate_timing.status(0)
    elif reason == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif reason == "capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if reason == "traced":
        seen: list[str] = []
        request = a_request()
        torch.vmap(lambda x: seen.append(ask(monkeypatch, clock, request)) or x)(torch.ones(2))
        assert seen == ["triton"]
    else:
        assert ask(monkeypatch, clock) == "triton"
    assert not clock.runs
