"""Training narrow heads of ordinary attention by the CPU kernel, beside torch's `scaled_dot_product_attention`.

    python lab/benchmarks/narrow_heads.py           # two minutes

`ops/narrow_heads.py` takes the kernel for heads of width 8 or less, and 64 queries or more. Both run in turns, forward
and backward together; before that their outputs and gradients must be those of float64 within the rounding of their
dtype, or nothing is written.
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

from diff_lab.bench.timing import spread
from diff_lab.coordinates import Coordinates
from diff_lab.record import Result
from diff_lab.results_files import capture_results, write_json
from diff_transformer.ops.narrow_heads import narrow_attention

HERE = Path(__file__).parent
HEADS, TOKENS = 16, 4096  # of a step: as the language models of experiments have them
# Of the largest number of an answer. Peaked attention would need a budget; that of random queries is nearly even.
AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 3e-2}

# What each hides: the future; nothing; the future, and of every sequence an eighth by a mask, as padding does.
FORMS = ("causal", "full", "padded")

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(form: str, mask: Tensor) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask if form == "padded" else None, is_causal=form == "causal"
        )

    return attend


def by_kernel(form: str, mask: Tensor) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return narrow_attention(q, k, v, attn_mask=mask if form == "padded" else None, is_causal=form == "causal")

    return attend


def inputs(length: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and the gradient that comes, as views of what projections give."""
    shape = TOKENS // length, length, HEADS, width
    return [torch.randn(shape).to(dtype).transpose(1, 2) for _ in range(4)]


def padding(length: int) -> Tensor:
    """Which keys a query of each sequence sees, (B, 1, N, N): causal, without the first ones, but itself."""
    first = torch.randint(0, length // 4, (TOKENS // length, 1, 1, 1))
    seen = torch.ones(length, length, dtype=torch.bool).tril() & (torch.arange(length) >= first)
    return seen | torch.eye(length, dtype=torch.bool)


def answers(attention: Attention, tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


def check(name: str, attention: Attention, exact: Attention, tensors: list[Tensor]) -> None:
    values = answers(exact, [x.double() for x in tensors])
    for computed, value in zip(answers(attention, tensors), values, strict=True):
        error = (computed.double() - value).abs().max() / value.abs().max()
        if not error <= AGREEMENT[computed.dtype]:
            raise SystemExit(f"{name} is off by {error:.2g} of the largest number: nothing is timed.")


def seconds(attention: Attention, tensors: list[Tensor]) -> float:
    """Of forward and backward."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    begin = time.perf_counter()
    torch.autograd.grad(attention(*leaves), leaves, tensors[3])
    return time.perf_counter() - begin


def measure(length: int, width: int, dtype: torch.dtype, form: str, rounds: int) -> Result:
    tensors, mask = inputs(length, width, dtype), padding(length)
    theirs, ours = by_torch(form, mask), by_kernel(form, mask)
    for name, attention in (("torch's attention", theirs), ("the kernel", ours)):
        check(name, attention, theirs, tensors)
    pairs = [(seconds(theirs, tensors), seconds(ours, tensors)) for _ in range(rounds)]
    ratio = spread([kernel / torchs for torchs, kernel in pairs])
    name = f"{form}, {str(dtype).removeprefix('torch.')}"
    milliseconds = statistics.median(torchs for torchs, _ in pairs) * 1e3
    print(f"heads of {width:2}, length {length:4}, {name:18}: {ratio.median:.2f} of {milliseconds:.1f} ms", flush=True)
    return Result(
        name=name,
        variant="cpu",
        coordinates=Coordinates(width=width, length=length),
        value=ratio.median,
        interval=ratio.quartiles,
        n=rounds,
        better="lower",
        method="time of the kernel in that of torch's attention, median of the rounds, between the quartiles",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of either way, 2 or more")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=HERE / "narrow_heads.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    kinds = itertools.product((64, 128, 256, 1024), (8, 16), AGREEMENT, FORMS)
    records = [measure(*kind, arguments.rounds) for kind in kinds]
    settings = {"heads": HEADS, "tokens": TOKENS, "rounds": arguments.rounds, "threads": arguments.threads}
    settings["vectors"] = torch.backends.cpu.get_cpu_capability()
    document = capture_results("ordinary attention of narrow heads", settings, records, "cpu")
    print(f"{document.device}; {document.command}")
    print(f"wrote {write_json(arguments.output, document, indent=1)}")


if __name__ == "__main__":
    main()
