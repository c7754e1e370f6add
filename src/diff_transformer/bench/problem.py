"""A problem for the operator, its true answer, and how far from it an answer may be.

The truth is Equation 1 with its gradients in float64. An answer in a dtype T may be twice as far from it as the plain
formula with every step in T, plus a band for rounding alone: a few roundings to T. Errors are root mean squares over
blocks of positions: of a causal sequence the first rows are hundreds of times as large as the last ones, and would hide
any error there.

All dtypes get the same numbers, which bfloat16 holds, so one truth serves all of them. Heads do not know each other, so
the first and the last head of the first and the last sequence stand for all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

POSITIONS = 256  # to a block of the comparison
# Queries to a block of the plain formula, whose scores are all held: so many, or fewer where there are many keys.
ROWS, BLOCK_SCORES = 512, 1 << 23
ROUNDINGS = {"out": 4, "v": 4, "q": 6, "k": 6, "lam": 6}  # on the way to a quantity, each by half an eps
LAMBDA = 0.5


@dataclass(frozen=True)
class Shape:
    """Sizes of a case. `heads` are the twin's, of which two make a differential head."""

    batch: int
    heads: int
    head_dim: int
    queries: int
    keys: int

    def named(self) -> dict[str, int]:
        """The sizes as a reader calls them."""
        return dict(zip(("batch", "heads", "width", "queries", "keys"), vars(self).values(), strict=True))


@dataclass(frozen=True)
class Problem:
    """Inputs in the operator's layout, and the gradient that arrives at the output.

    q (B, H, 2, N, d), k (B, H, 2, S, d), v (B, H, S, 2d), lam a scalar in float32, grad (B, H, N, 2d). Where there are
    fewer queries than keys, the keys are the view that the model's cache gives: both maps' keys side by side.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same numbers in another dtype; λ keeps its own."""
        q, k, v, grad = (tensor.to(dtype) for tensor in (self.q, self.k, self.v, self.grad))
        return Problem(q, k, v, self.lam, grad)


def draw(shape: Shape, device: torch.device) -> Problem:
    """The problem of a shape, in float32: on one device the same numbers every time."""
    generator = torch.Generator(device).manual_seed(0)
    batch, heads, n, s, d = shape.batch, shape.heads // 2, shape.queries, shape.keys, shape.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).bfloat16().float()

    q, v, grad = normal(batch, heads, 2, n, d), normal(batch, heads, s, 2 * d), normal(batch, heads, n, 2 * d)
    if n < s:
        k = normal(batch, heads, s, 2, d).transpose(2, 3)
    else:
        k = normal(batch, heads, 2, s, d)
    return Problem(q, k, v, torch.tensor(LAMBDA, device=device), grad)


class Judge:
    """Knows the truth about a problem, and what the plain formula makes of it in each dtype."""

    def __init__(self, problem: Problem) -> None:
        self._problem = _part(problem)
        self._truth: dict[str, Tensor] = {}
        self._plain: dict[tuple[torch.dtype, bool], dict[str, Tensor]] = {}

    def error(self, answer: dict[str, Tensor]) -> float:
        """The largest error of an answer as a share of what is allowed in its dtype.

        Args:
            answer: "out" of the whole problem and, where there are gradients, "q", "k", "v" and "lam" (B, H, N).
        """
        dtype, backward = answer["out"].dtype, len(answer) > 1
        if not self._truth.keys() >= answer.keys():
            self._truth = self._solve(torch.float64, backward)
        if (dtype, backward) not in self._plain:
            self._plain[dtype, backward] = self._solve(dtype, backward)
        shares = []
        for name, value in answer.items():
            truth, plain = self._truth[name], self._plain[dtype, backward][name]
            band = ROUNDINGS[name] * torch.finfo(dtype).eps / 2 * _rms(truth)
            allowed = 2 * _rms(plain - truth) + band
            shares.append((_rms(_pick(value).double() - truth) / allowed).nan_to_num(nan=float("inf")).max().item())
        return max(shares)

    def _solve(self, dtype: torch.dtype, backward: bool) -> dict[str, Tensor]:
        """The plain formula with every step in `dtype`, by blocks of rows whose gradients are added up in float64."""
        problem = self._problem
        n, s = problem.q.shape[-2], problem.k.shape[-2]
        leaves = {name: getattr(problem, name).detach().to(dtype).requires_grad_(backward) for name in "qkv"}
        lam = problem.lam.to(dtype).expand(*problem.q.shape[:2], n)
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
    """Rows start … stop − 1 of (A1 − λA2) V; a query sees the keys up to its own position."""
    seen = stop + offset
    scores = q[:, :, :, start:stop] @ k[:, :, :, :seen].transpose(-1, -2) * q.shape[-1] ** -0.5
    rows = torch.arange(start, stop, device=q.device).unsqueeze(1) + offset
    hidden = torch.arange(seen, device=q.device) > rows
    first, second = scores.masked_fill(hidden, float("-inf")).softmax(-1).unbind(2)
    return (first - lam[:, :, start:stop].unsqueeze(-1) * second) @ v[:, :, :seen]


def _pick(tensor: Tensor) -> Tensor:
    """First and last sequence, first and last head of (B, H, …)."""
    rows, heads = (sorted({0, size - 1}) for size in tensor.shape[:2])
    return tensor[rows][:, heads]


def _part(problem: Problem) -> Problem:
    q, k, v, grad = (_pick(tensor) for tensor in (problem.q, problem.k, problem.v, problem.grad))
    return Problem(q, k, v, problem.lam, grad)


def _rms(values: Tensor) -> Tensor:
    """Root mean square by blocks of positions, of (B, H, …, N, width), or of λ's (B, H, N)."""
    by_position = values.unsqueeze(-1) if values.dim() == 3 else values
    squares = by_position.square().movedim(-2, 0).flatten(1).mean(1)
    return torch.stack([block.mean().sqrt() for block in squares.split(POSITIONS)])
