"""Ordinary attention of narrow heads by the CPU kernel, beside torch's `scaled_dot_product_attention`.

    python benchmarks/narrow_heads.py           # a minute

`ops/narrow_heads.py` takes the kernel for heads narrower than 16. Both run in turns, forward and backward; before that
their outputs and gradients must be those of float64 within the rounding of their dtype, or nothing is written.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer.lab.bench.timing import spread
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.record import Result
from diff_transformer.lab.results_files import capture_results, write_json
from diff_transformer.ops.narrow_heads import narrow_attention

HERE = Path(__file__).parent
HEADS, TOKENS = 16, 4096  # of a step: as the language models of experiments have them
# Of the largest number of an answer. Peaked attention would need a budget; that of random queries is nearly even.
AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return narrow_attention(q, k, v, is_causal=True)


def inputs(length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient that comes, as views of what projections give."""
    shape = TOKENS // length, length, HEADS, width
    return [torch.randn(shape).to(dtype).transpose(1, 2) for _ in range(4)]


def answers(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def check(attention: Attention, tensors: list[Tensor]) -> None:
    exact = answers(by_torch, [x.double() for x in tensors])
    for computed, value in zip(answers(attention, tensors), exact, strict=True):
        error = (computed.double() - value).abs().max() / value.abs().max()
        if not error <= AGREEMENT[computed.dtype]:
            raise SystemExit(f"{attention.__name__} is off by {error:.2g} of the largest number: nothing is timed.")


def seconds(attention: Attention, tensors: list[Tensor]) -> tuple[float, float]:
    """Of the forward pass, and of forward and backward."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    begin = time.perf_counter()
    out = attention(*leaves)
    between = time.perf_counter()
    torch.autograd.grad(out, leaves, tensors[3])
    return between - begin, time.perf_counter() - begin


def measure(length: int, width: int, dtype: torch.dtype, rounds: int) -> list[Result]:
    tensors = inputs(length, width, dtype)
    for attention in (by_torch, by_kernel):
        check(attention, tensors)
    pairs = [(seconds(by_torch, tensors), seconds(by_kernel, tensors)) for _ in range(rounds)]
    records = []
    for which, part in enumerate(("forward", "forward and backward")):
        ratio = spread([kernel[which] / theirs[which] for theirs, kernel in pairs])
        records.append(
            Result(
                name=f"{part}, {str(dtype).removeprefix('torch.')}",
                variant=f"heads of {width}",
                coordinates=Coordinates(length=length),
                value=ratio.median,
                interval=ratio.quartiles,
                n=rounds,
                better="lower",
                method="time of the kernel in that of torch's attention, median of the rounds, between the quartiles",
            )
        )
    milliseconds = [statistics.median(theirs[1] for theirs, _ in pairs) * 1e3]
    print(
        f"heads of {width:2}, length {length:4}, {str(dtype)[6:]:8}: forward {records[0].value:.2f}, both "
        f"{records[1].value:.2f} of torch's {milliseconds[0]:.1f} ms",
        flush=True,
    )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of either way, 2 or more")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE / "narrow_heads.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    records = []
    for length, width, dtype in itertools.product((128, 256, 1024), (4, 8, 12, 16, 32), AGREEMENT):
        records += measure(length, width, dtype, arguments.rounds)
    settings = {"heads": HEADS, "tokens": TOKENS, "rounds": arguments.rounds, "threads": arguments.threads}
    settings["vectors"] = torch.backends.cpu.get_cpu_capability()
    document = capture_results("ordinary attention of narrow heads", settings, records, "cpu")
    print(f"{document.device}; {document.command}")
    print(f"wrote {write_json(arguments.output, document, indent=1)}")


if __name__ == "__main__":
    main()
