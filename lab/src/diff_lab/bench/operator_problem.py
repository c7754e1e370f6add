"""Makes a problem for the operator, its true answer, and the limit on how far an answer may be from it.

The truth is Equation 1 with its gradients in float64, the limit that of :mod:`diff_transformer.ops.reference`.

All dtypes get the same numbers, which bfloat16 represents exactly, so one truth serves all of them. Heads are
independent, so the first and the last head of the first and the last sequence stand for all.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diff_lab.bench.benchmark import BACKWARD, DECODE, FORWARD, TRAINING
from diff_lab.bench.timing import alternate, kernel_clock
from diff_transformer.ops.reference import ROUNDINGS, rms_by_position, rounding_band, share_of_allowed

POSITIONS = 256  # in a block of the comparison
# Queries in a block of the plain formula, which holds all their scores: at most so many, and at most so many scores.
ROWS, BLOCK_SCORES = 512, 1 << 23
LAMBDA = 0.5
# Matrix products of the Transformer: two forward (scores, values), five backward (the scores again, four gradients).
PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}
PEAK_SIZE = 8192


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: the Transformer's heads, of which two make a differential head, and the width of a query."""

    batch: int
    heads: int
    width: int
    queries: int
    keys: int


@dataclass(frozen=True)
class OperatorProblem:
    """Inputs in the operator's layout, and the gradient that arrives at the output.

    q (B, H, 2, N, d), k (B, H, 2, S, d), v (B, H, S, 2d), lam a scalar in float32, grad (B, H, N, 2d). If there are
    fewer queries than keys, the keys are the view that the model's cache gives: both maps' keys side by side.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    grad: Tensor

    @property
    def shape(self) -> Shape:
        batch, heads, maps, queries, width = self.q.shape
        return Shape(batch, heads * maps, width, queries, self.k.shape[-2])

    def map(self, change: Callable[[Tensor], Tensor]) -> "OperatorProblem":
        """Return the problem with every tensor but λ changed."""
        q, k, v, grad = (change(tensor) for tensor in (self.q, self.k, self.v, self.grad))
        return OperatorProblem(q, k, v, self.lam, grad)

    def to(self, dtype: torch.dtype) -> "OperatorProblem":
        """Return the same numbers in another dtype; λ keeps its own."""
        return self.map(lambda tensor: tensor.to(dtype))


def draw(shape: Shape, device: torch.device) -> OperatorProblem:
    """Return the problem of a shape, in float32: on one device the same numbers every time."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16().float()

    return arrange(shape, normal)


def arrange(shape: Shape, normal: Callable[..., Tensor]) -> OperatorProblem:
    """Return the problem of a shape whose tensors `normal(*size)` makes."""
    batch, heads, n, s, d = shape.batch, shape.heads // 2, shape.queries, shape.keys, shape.width
    q, v, grad = normal(batch, heads, 2, n, d), normal(batch, heads, s, 2 * d), normal(batch, heads, n, 2 * d)
    k = normal(batch, heads, 2, s, d) if n == s else normal(batch, heads, s, 2, d).transpose(2, 3)
    return OperatorProblem(q, k, v, torch.tensor(LAMBDA, device=q.device), grad)


class AnswerCheck:
    """The truth about a problem, and the plain formula's answer in each dtype, which bounds the allowed error."""

    def __init__(self, problem: OperatorProblem) -> None:
        self._problem = problem.map(_pick)
        self._answer = functools.cache(self._solve)

    def error(self, answer: dict[str, Tensor]) -> float:
        """Return the largest error of an answer, as `compute` gives it, as a share of the budget of its dtype."""
        dtype, backward = answer["out"].dtype, len(answer) > 1
        shares = []
        for name, value in answer.items():
            truth, plain = self._answer(torch.float64, backward)[name], self._answer(dtype, backward)[name]
            band = rounding_band(_rms(truth), torch.finfo(dtype).eps, ROUNDINGS[name])
            shares.append(share_of_allowed(_rms(_pick(value).double() - truth), _rms(plain - truth), band))
        return max(shares)

    def _solve(self, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
        """Solve the plain formula with every step in `dtype`, by blocks of rows whose gradients add up in float64."""
        problem = self._problem
        n, s = problem.q.shape[-2], problem.k.shape[-2]
        leaves = {name: getattr(problem, name).detach().to(dtype).requires_grad_(backward) for name in "qkv"}
        lam = problem.lam.to(dtype).expand(problem.grad.shape[:3])
        leaves["lam"] = lam.clone().requires_grad_(backward)
        outputs = []
        sums = {name: torch.zeros_like(leaf, dtype=torch.float64) for name, leaf in leaves.items()}
        rows = max(1, min(ROWS, BLOCK_SCORES // s))
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            out = _plain_rows(leaves["q"], leaves["k"], leaves["v"], leaves["lam"], start, stop, s - n)
            outputs.append(out.detach().double())
            if backward:
                gradients = torch.autograd.grad(out, list(leaves.values()), problem.grad[:, :, start:stop].to(dtype))
                for name, gradient in zip(leaves, gradients, strict=True):
                    sums[name] += gradient
        return {"out": torch.cat(outputs, dim=2)} | (sums if backward else {})


def _plain_rows(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, start: int, stop: int, offset: int) -> Tensor:
    """Compute rows start … stop − 1 of (A1 − λA2) V; a query sees the keys up to its own position."""
    seen = stop + offset
    scores = q[:, :, :, start:stop] @ k[:, :, :, :seen].transpose(-1, -2) * q.shape[-1] ** -0.5
    rows = torch.arange(start, stop, device=q.device).unsqueeze(1) + offset
    hidden = torch.arange(seen, device=q.device) > rows
    first, second = scores.masked_fill(hidden, float("-inf")).softmax(-1).unbind(2)
    return (first - lam[:, :, start:stop].unsqueeze(-1) * second) @ v[:, :, :seen]


def _pick(tensor: Tensor) -> Tensor:
    """Return the first and last sequence and head of (B, H, …)."""
    rows, heads = (sorted({0, size - 1}) for size in tensor.shape[:2])
    return tensor[rows][:, heads]


def _rms(values: Tensor) -> Tensor:
    """Compute the root mean square by blocks of positions, of (B, H, …, N, width), or of λ's (B, H, N)."""
    return rms_by_position(values.unsqueeze(-1) if values.dim() == 3 else values, POSITIONS)


def flops(shape: Shape, pass_: str) -> int | None:
    """Count the Transformer's operations in a causal pass; None for decoding, which is bound by bytes.

    Half of the N × S pairs are visible. All candidates get this count, so that TFLOP/s compare as times do.
    """
    if pass_ == DECODE:
        return None
    pairs = shape.batch * shape.heads * shape.queries * shape.keys // 2
    return PRODUCTS[pass_] * 2 * pairs * shape.width


def matrix_peak(dtype: torch.dtype, device: torch.device, size: int = PEAK_SIZE) -> float:
    """Measure the TFLOP/s of one large product of two random matrices, the median of some rounds."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = functools.partial(torch.mm, left, right)
    for _ in range(3):
        product()
    seconds = alternate({"product": product}, kernel_clock(device))["product"]
    return 2 * size**3 / statistics.median(seconds) / 1e12
