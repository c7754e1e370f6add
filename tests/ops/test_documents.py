"""Packed documents, by what they mean: a sequence of documents is as many sequences, and costs as little."""

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from budget import BACKENDS, DTYPES, Case, Problem, prepared, skip_unless_it_takes
from diff_transformer import diff_attention
from full_run import short_run

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Of one token, of none, and longer and shorter than the 64 queries of a block; and few enough for the path of decoding.
SHORT_DTYPES = short_run(DTYPES, [torch.float32, torch.bfloat16])
LENGTHS = {"many blocks": (63, 1, 0, 111, 30, 95), "one block": (7, 1, 12), "few queries": (1, 0, 3)}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    dtype = request.node.callspec.params.get("dtype", torch.float32)
    tokens = sum(LENGTHS[request.node.callspec.params.get("lengths", "one block")])
    skip_unless_it_takes(request.param, dtype, tokens)
    return request.param


def case(lengths: str, **more: Any) -> Case:
    n = sum(LENGTHS[lengths])
    packed: dict[str, Any] = {"batch": 1, "key_heads": 1, "queries": n, "keys": n, "documents": LENGTHS[lengths]}
    return Case(**{**packed, "lam": "full", "gain": 1.6, **more})


def bounds(problem: Problem) -> list[tuple[int, int]]:
    return list(pairwise(problem.options["cu_seqlens"].tolist()))


@pytest.mark.parametrize("dtype", SHORT_DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window": 5}], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_document_is_a_sequence_of_its_own(
    backend: str, lengths: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Packed, or one by one and put together again: both are within the budget of the same expectation."""
    problem, expected = prepared(case(lengths, dtype=dtype, **options))
    expected.check(problem.solve(diff_attention, backend=backend))
    assert isinstance(problem.lam, Tensor)
    parts = []
    for begin, end in bounds(problem):
        if begin < end:
            rows = {name: getattr(problem, name)[..., begin:end, :] for name in ("q", "k", "v", "dout")}
            alone = replace(problem, **rows, lam=problem.lam[..., begin:end], options=options)
            parts.append(alone.solve(diff_attention, backend=backend))
    expected.check({name: torch.cat([part[name] for part in parts], -1 if name == "lam" else -2) for name in parts[0]})


@pytest.mark.parametrize("backend", ["blockwise", "cpu"], indirect=True)
def test_short_documents_cost_a_fraction_of_a_long_one(backend: str) -> None:
    """32 documents of 64 tokens are a thirty-second of the work; narrow heads show what is not a product too."""
    n = 2048
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 2, n, 4))
    seconds: dict[int, list[float]] = {64: [], n: []}
    for _ in range(4):
        for length, times in seconds.items():
            start = time.process_time()  # of this process, however busy the machine is
            out = diff_attention(q, k, v[:, :, 0], 0.5, cu_seqlens=torch.arange(0, n + 1, length), backend=backend)
            torch.autograd.grad(out.sum(), [q, k, v])
            times.append(time.process_time() - start)
    assert min(seconds[64]) < 0.3 * min(seconds[n])


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_borders_may_be_of_either_dtype_and_any_stride(backend: str, integers: torch.dtype) -> None:
    problem, expected = prepared(case("one block", is_causal=True))
    ends = problem.options["cu_seqlens"].to(integers).repeat_interleave(2)[::2]
    same = replace(problem, options={**problem.options, "cu_seqlens": ends})
    expected.check(same.solve(diff_attention, backend=backend))
