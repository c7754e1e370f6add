"""The process in which one candidate's peak memory is measured: a request as JSON in, bytes as JSON out."""

import json
import sys

import torch

from diff_transformer.bench.candidates import candidates
from diff_transformer.bench.memory import forget_peak, resident
from diff_transformer.bench.operator import prepare
from diff_transformer.bench.problem import Problem, Shape
from diff_transformer.bench.settings import DTYPES

TINY = 16  # length


def inputs(shape: Shape, dtype: torch.dtype) -> Problem:
    """Random inputs of a shape; their values do not matter here."""
    b, h, n, s, d = shape.batch, shape.heads // 2, shape.queries, shape.keys, shape.head_dim
    q, k = (torch.randn(b, h, 2, length, d, dtype=dtype) for length in (n, s))
    v, grad = (torch.randn(b, h, length, 2 * d, dtype=dtype) for length in (s, n))
    return Problem(q, k, v, torch.tensor(0.5), grad)


def main(request: str) -> str:
    """Measure what a request asks for."""
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    candidate, shape, dtype = candidates()[asked["candidate"]], Shape(**asked["shape"]), DTYPES[asked["dtype"]]
    tiny = Shape(1, 2, shape.head_dim, TINY, TINY)
    # What a first run loads and starts is no part of the attention.
    prepare(candidate, inputs(tiny, dtype), asked["pass"])()
    base = resident("VmRSS")
    run = prepare(candidate, inputs(shape, dtype), asked["pass"])
    arranged = resident("VmRSS")
    # Bringing the inputs into the candidate's layout took more than they do.
    forget_peak()
    kept = run()
    peak = resident("VmHWM")
    del kept
    return json.dumps({"total": peak - base, "inputs": arranged - base, "own": peak - arranged})


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1]))
