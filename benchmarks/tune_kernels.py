"""Time candidate block sizes of the Triton kernels on this GPU, and print the fastest of each.

    python benchmarks/tune_kernels.py [bfloat16|float16|float32] [LENGTH]     # bfloat16 and 4096 unless given

What is printed belongs into ops/triton/kernel_arguments.py, once benchmarks/kernel_resources.py has
found no spill in it. Takes minutes: every candidate is compiled.
"""

import itertools
import sys
from collections.abc import Callable
from unittest import mock

import torch
import triton.testing
from torch import Tensor

from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.triton.kernel_arguments import Blocks, Problem, problem_of, program_count
from diff_transformer.ops.triton.launch import Launch, plan_backward, plan_decode, plan_forward

ROWS, COLUMNS, WARPS, STAGES = (32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
TOKENS = 16384


def candidates(kernel: str) -> list[Blocks]:
    """The sizes to try; the forward in one pass and, where it saves nothing, in two."""
    rows = (16,) if kernel == "decode" else ROWS
    passes = (False, True) if kernel == "forward" else (False,)
    return [Blocks(*sizes) for sizes in itertools.product(rows, COLUMNS, WARPS, STAGES, passes)]


def plans(d: int, dtype: torch.dtype, length: int) -> dict[str, Callable[[], Launch]]:
    """For each kernel of the table, what plans its launch with the block sizes that hold then."""
    batch, heads = max(1, TOKENS // length), 1024 // d

    def request(queries: int) -> Problem:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        q = normal(batch, queries, heads, 2, d).permute(0, 2, 3, 1, 4)
        k = normal(batch, length, heads, 2, d).permute(0, 2, 3, 1, 4)
        v = normal(batch, length, heads, 2 * d).transpose(1, 2)
        lam = torch.rand(batch, heads, queries, device="cuda")
        return problem_of(Request(q, k, v, lam, None, True, d**-0.5, None, None))

    sequence, token = request(length), request(1)
    (forward,), out, saved = plan_forward(sequence, None, save=True)
    forward.run()
    assert saved is not None
    first, *_ = plan_backward(out, sequence, None, saved)[0]
    first.run()

    def backward(index: int) -> Callable[[], Launch]:
        return lambda: plan_backward(out, sequence, None, saved)[0][index]

    launches = {
        "forward": lambda: plan_forward(sequence, None, save=False)[0][0],
        "save": lambda: plan_forward(sequence, None, save=True)[0][0],
        "keys": backward(1),
        "queries": backward(-1),
        "decode": lambda: plan_decode(token, None, program_count(token.original.q.device))[0][0],
    }
    return launches | ({"values": backward(2)} if d > 64 else {})


def milliseconds(plan: Callable[[], Launch], kernel: str, blocks: Blocks) -> float | None:
    """The median time of one launch, or None where it does not fit on the device."""

    blocks_of = Problem.blocks

    def chosen(problem: Problem, name: str) -> Blocks:
        return blocks if name == kernel else blocks_of(problem, name)

    with mock.patch.object(Problem, "blocks", chosen):
        launch = plan()
    try:
        return triton.testing.do_bench(launch.run, return_mode="median")
    except triton.OutOfResources:
        return None


def main() -> None:
    """Every kernel at both widths."""
    dtype = getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "bfloat16")
    length = int(sys.argv[2]) if len(sys.argv) > 2 else 4096
    print(f"{torch.cuda.get_device_name()}, {dtype}, length {length}, triton {triton.__version__}")
    for d in (64, 128):
        for kernel, plan in plans(d, dtype, length).items():
            times = {blocks: milliseconds(plan, kernel, blocks) for blocks in candidates(kernel)}
            fastest = sorted((time, blocks) for blocks, time in times.items() if time is not None)[:3]
            print(
                f"d {d}, {kernel}: " + "; ".join(f"{time:.3f} ms {tuple(blocks)}" for time, blocks in fastest),
                flush=True,
            )


if __name__ == "__main__":
    main()
