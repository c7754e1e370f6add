"""The process in which one candidate's peak memory is measured: a request as JSON in, bytes as JSON out."""

import json
import sys

import torch

from diff_transformer.bench.candidates import candidates
from diff_transformer.bench.memory import meter
from diff_transformer.bench.problem import Problem, Shape
from diff_transformer.bench.running import prepare
from diff_transformer.bench.settings import DTYPES

TINY = 16  # length


def inputs(shape: Shape, dtype: torch.dtype, device: torch.device) -> Problem:
    """Random inputs of a shape; their values do not matter here."""
    b, h, n, s, d = shape.batch, shape.heads // 2, shape.queries, shape.keys, shape.head_dim
    q, k = (torch.randn(b, h, 2, length, d, dtype=dtype, device=device) for length in (n, s))
    v, grad = (torch.randn(b, h, length, 2 * d, dtype=dtype, device=device) for length in (s, n))
    return Problem(q, k, v, torch.tensor(0.5, device=device), grad)


def main(request: str) -> str:
    """Measure what a request asks for."""
    asked = json.loads(request)
    torch.set_num_threads(asked["threads"])
    device, dtype, shape = torch.device(asked["device"]), DTYPES[asked["dtype"]], Shape(**asked["shape"])
    candidate = candidates(device)[asked["candidate"]]
    used = meter(device)
    tiny = Shape(1, 2, shape.head_dim, TINY, TINY)
    # What a first run loads and starts is no part of the attention.
    prepare(candidate, inputs(tiny, dtype, device), asked["pass"])()
    base = used.now()
    run = prepare(candidate, inputs(shape, dtype, device), asked["pass"])
    if device.type == "cuda":
        run()  # a kernel tuned at this very size tries its variants with memory that is no part of the attention
    arranged = used.now()
    # Bringing the inputs into the candidate's layout took more than they do.
    used.forget()
    kept = run()
    peak = used.peak()
    del kept
    return json.dumps({"total": peak - base, "inputs": arranged - base, "own": peak - arranged})


if __name__ == "__main__":
    sys.stdout.write(main(sys.argv[1]))
