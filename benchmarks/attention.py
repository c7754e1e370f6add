"""Time of the operator's backends as a ratio to the twin's attention (torch's SDPA, same parameters).

    python benchmarks/attention.py [--output benchmarks/attention-cpu.json]

All candidates run in one process, in turn; the median of several rounds is printed with the spread. A backend whose
output or gradients are wrong is not timed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from diff_transformer import diff_attention
from diff_transformer.results import capture_environment

# (batch, twin heads, head width, length), causal. Then: filling a cache and decoding one token from it.
SHAPES = [(1, 16, 64, 256), (1, 16, 64, 512), (1, 16, 64, 2048), (1, 16, 64, 4096), (32, 8, 16, 128), (16, 8, 16, 256)]
DECODE = [(1, 16, 64, 2048), (8, 16, 64, 2048)]
LONGEST_PLAIN = 2048  # the plain formula holds all N·N scores


def build(shape: tuple[int, int, int, int], queries: int | None) -> tuple[list[Tensor], list[Tensor]]:
    batch, heads, d, length = shape
    n = queries or length
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).requires_grad_(queries is None)

    ours = [
        draw(batch, heads // 2, 2, n, d),
        draw(batch, heads // 2, 2, length, d),
        draw(batch, heads // 2, length, 2 * d),
    ]
    twin = [draw(batch, heads, n, d), draw(batch, heads, length, d), draw(batch, heads, length, d)]
    return ours, twin


def run(output: Callable[[], Tensor], inputs: list[Tensor], backward: bool) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return [output()]
    out = output()
    return [out, *torch.autograd.grad(out, inputs, torch.ones_like(out))]


def median_times(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for candidate in candidates.values():
        candidate()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            candidate()
            times[name].append(time.perf_counter() - start)
    return times


def measure(shape: tuple[int, int, int, int], backward: bool, decode: bool, rounds: int) -> dict[str, Any]:
    ours, twin = build(shape, 1 if decode else None)
    lam = torch.tensor(0.5)
    q, k, v = ours
    causal = not decode

    def attend(backend: str) -> Callable[[], list[Tensor]]:
        return lambda: run(lambda: diff_attention(q, k, v, lam, is_causal=True, backend=backend), ours, backward)

    def softmax() -> list[Tensor]:
        return run(lambda: F.scaled_dot_product_attention(twin[0], twin[1], twin[2], is_causal=causal), twin, backward)

    backends = ["blockwise", "sdpa"] + (["reference"] if shape[3] <= LONGEST_PLAIN else [])
    truth = attend("reference" if "reference" in backends else "sdpa")()
    for backend in backends:
        for ours_value, true_value in zip(attend(backend)(), truth, strict=True):
            torch.testing.assert_close(ours_value, true_value, atol=1e-4, rtol=1e-3)
    times = median_times({"twin": softmax} | {name: attend(name) for name in backends}, rounds)
    base = statistics.median(times["twin"])
    return {
        "shape": dict(zip(("batch", "twin_heads", "head_dim", "length"), shape, strict=True)),
        "pass": "decode" if decode else "forward + backward" if backward else "forward",
        "twin_ms": base * 1e3,
        "ratio": {name: statistics.median(times[name]) / base for name in backends},
        "spread": {name: [min(times[name]) / base, max(times[name]) / base] for name in ("twin", *backends)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("attention-cpu.json"))
    arguments = parser.parse_args()
    environment = capture_environment("cpu")
    print(f"{environment.device}, float32, torch {environment.versions['torch']}; time relative to the twin's SDPA")
    rows = []
    cases = [(shape, backward, False) for shape in SHAPES for backward in (False, True)]
    for shape, backward, decode in cases + [(shape, False, True) for shape in DECODE]:
        row = measure(shape, backward, decode, arguments.rounds)
        rows.append(row)
        ratios = "  ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())
        print(f"{shape!s:20} {row['pass']:18} twin {row['twin_ms']:8.2f} ms   {ratios}", flush=True)
    document = {**vars(environment), "dtype": "float32", "rounds": arguments.rounds, "rows": rows}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
