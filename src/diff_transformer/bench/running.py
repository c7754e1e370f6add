"""One candidate on one problem: the run that is timed, the answer that is judged."""

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from diff_transformer.bench.attempt import attempt
from diff_transformer.bench.candidates import Candidate
from diff_transformer.bench.compositions import split_values
from diff_transformer.bench.problem import Judge, Problem, Shape
from diff_transformer.bench.records import BACKWARD, DECODE, TRAINING, WRONG, Row


def prepare(candidate: Candidate, problem: Problem, pass_: str) -> Callable[[], object]:
    """One run of a candidate, without arguments: what is timed."""
    differentiates, causal = pass_ in (BACKWARD, TRAINING), pass_ != DECODE
    arranged = candidate.arrange(problem.q, problem.k, problem.v)
    leaves = tuple(tensor.detach().requires_grad_(differentiates) for tensor in arranged)
    lam = problem.lam.detach().clone().requires_grad_(differentiates)
    size = problem.grad.shape[:3]
    if not differentiates:
        with torch.no_grad():
            expanded = lam.expand(size)

        def forward() -> Tensor:
            with torch.no_grad():
                return candidate.attend(leaves, expanded, causal)

        return forward
    # The twin has no λ, and the gradient arrives at heads of d.
    wanted = leaves if candidate.twin else (*leaves, lam)
    grad = split_values(problem.grad).contiguous() if candidate.twin else problem.grad

    def training() -> tuple[Tensor, ...]:
        return torch.autograd.grad(candidate.attend(leaves, lam.expand(size), causal), wanted, grad)

    if pass_ == TRAINING:
        return training
    out = candidate.attend(leaves, lam.expand(size), causal)
    return functools.partial(torch.autograd.grad, out, wanted, grad, retain_graph=True)


def answer(candidate: Candidate, problem: Problem, pass_: str) -> dict[str, Tensor]:
    """The output and, with a backward, the gradients of q, k, v and of λ for each head and token."""
    differentiates, causal = pass_ in (BACKWARD, TRAINING), pass_ != DECODE
    size = problem.grad.shape[:3]
    if not differentiates:
        with torch.no_grad():
            arranged = candidate.arrange(problem.q, problem.k, problem.v)
            return {"out": candidate.attend(arranged, problem.lam.expand(size), causal)}
    leaves = [tensor.detach().requires_grad_() for tensor in (problem.q, problem.k, problem.v)]
    # The expanded view and not λ itself: its gradient belongs to one head, so that a few heads can be checked.
    lam = problem.lam.detach().requires_grad_().expand(size)
    out = candidate.attend(candidate.arrange(*leaves), lam, causal)
    gradients = torch.autograd.grad(out, [*leaves, lam], problem.grad)
    return {"out": out.detach(), **dict(zip(("q", "k", "v", "lam"), gradients, strict=True))}


def check(candidate: Candidate, row: Row, problem: Problem, shape: Shape, judge: Judge, device: torch.device) -> Row:
    """The row with the candidate's error, or the reason why it does not run. A twin is torch's own: it only runs."""
    answers = candidate.answers(device)
    if candidate.twin:
        return replace(row, reason=attempt(lambda: prepare(candidate, problem, row.pass_)(), device, answers)[1])
    reason = candidate.reason(problem, shape, row.pass_)
    if reason is not None:
        return replace(row, reason=reason)
    error, reason = attempt(lambda: judge.error(answer(candidate, problem, row.pass_)), device, answers)
    row = replace(row, error=error, reason=reason)
    return replace(row, reason=WRONG) if row.wrong else row
