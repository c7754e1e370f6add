"""Lists the candidates of `bench operator`: each backend, the Transformer's attention, compositions of torch's own.

A candidate arranges a problem's tensors in the layout that suits it, outside of the time, and attends to them.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diff_lab.bench.benchmark import BACKWARD, BASELINE, DECODE, TRAINING
from diff_lab.bench.operator_problem import OperatorProblem
from diff_transformer.ops import diff_attention
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.backends import BACKENDS, choose, reason_against

Inputs = tuple[Tensor, ...]
# (inputs in the candidate's layout, λ (B, H, N), whether the queries are a causal sequence) → output.
Attend = Callable[[Inputs, Tensor, bool], Tensor]
Arrange = Callable[[Tensor, Tensor, Tensor], Inputs]

BASELINE_FLASH, BASELINE_CUDNN = f"{BASELINE} flash", f"{BASELINE} cuDNN"
AUTO, PLAIN, FLEX, DIFFLLAMA = "auto", "reference", "flex", "DiffLlama"
# The compositions of torch's scaled_dot_product_attention (SDPA) in Appendix A: one call a map with values of 2d, or
# two calls a map, each with half of the values.
FULL_V, SPLIT_V = "sdpa_full_v", "sdpa_split_v"
# The longest sequences at which slow candidates are timed on the CPU: their time relative to the baseline hardly grows
# with the length. They decode at any length, but for flex, which compiles anew for every one.
LONGEST = {PLAIN: 2048, FLEX: 2048, FULL_V: 2048, "sdpa": 2048, SPLIT_V: 4096, DIFFLLAMA: 4096}
# On CUDA: all scores in float32, of which the plain formula holds about ten at a time, as a share of the memory.
SCORES_SHARE = 1 / 16


@dataclass(frozen=True)
class Candidate:
    """One way to compute differential attention.

    `attend` computes the output from the candidate's own inputs, which `arrange` makes of a problem's (q, k, v),
    differentiably. The baseline is the Transformer's attention, torch's own: it is not checked and has no λ. `backend`
    is the backend that it asks for by name.
    """

    name: str
    about: str
    attend: Attend
    arrange: Arrange = lambda q, k, v: (q, k, v)  # the operator's own layout
    is_baseline: bool = False
    backend: str | None = None

    def reason(self, problem: OperatorProblem, pass_: str) -> str | None:
        """Return why it does not run a case, or is not measured at its size; None if it is."""
        device, shape = problem.q.device, problem.shape
        if device.type == "cpu":
            longest = LONGEST.get(self.name, shape.keys)
            if shape.keys > longest and (pass_ != DECODE or self.name == FLEX):
                return f"it takes long: measured up to length {longest}"
        elif self.name == PLAIN:
            scores = 4 * shape.batch * shape.heads * shape.queries * shape.keys
            if scores > SCORES_SHARE * torch.cuda.get_device_properties(device).total_memory:
                return f"it holds all scores, {scores / 2**30:.0f} GiB"
        return None if self.backend is None else reason_against(self.backend, _request(problem, pass_))

    def held_to(self, kernel: str, label: str, backend: SDPBackend) -> "Candidate":
        """Return the same with torch's SDPA held to one kernel: a RuntimeError for inputs that it does not take."""

        def attend(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
            with sdpa_kernel(backend):
                return self.attend(inputs, lam, causal)

        return replace(self, name=f"{self.name} {label}", about=f"{self.about}, held to {kernel}", attend=attend)


def split_values(v: Tensor) -> Tensor:
    """Split values (B, H, S, 2d) into the Transformer's (B, 2H, S, d)."""
    return v.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)


def _softmax_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Return the same bytes as the Transformer has them: A heads of d, all with keys and values of their own."""
    return (*(tensor.flatten(1, 2).contiguous() for tensor in (q, k)), split_values(v).contiguous())


def _softmax(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _composed(inputs: Inputs, lam: Tensor, causal: bool, *, parts: int) -> Tensor:
    """Make one call for each map and each part of the values."""
    q, k, v = inputs
    attend = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    maps = []
    for c in range(2):
        outputs = [attend(q[:, :, c], k[:, :, c], part) for part in v.chunk(parts, dim=-1)]
        maps.append(outputs[0] if parts == 1 else torch.cat(outputs, dim=-1))
    first, second = maps
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def _diffllama_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Arrange all first maps, then all second ones, and values likewise, as transformers pairs head h with h + A/2."""
    halves = v.unflatten(-1, (2, -1)).movedim(-2, 1)
    return tuple(tensor.contiguous().flatten(1, 2) for tensor in (q.transpose(1, 2), k.transpose(1, 2), halves))


# What transformers' attention functions read of the module that calls them.
_CALLING_MODULE: Any = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)


def _diffllama(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """Attend as DiffLlamaAttention between its rotary embedding and its norm, with transformers' own SDPA function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = inputs
    scale = q.shape[-1] ** -0.5
    halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
    parts = [sdpa_attention_forward(_CALLING_MODULE, q, k, half, None, scaling=scale)[0] for half in halves]
    first, second = torch.cat(parts, dim=-1).chunk(2, dim=2)
    # The product with λ is in the model's dtype there. Heads are (B, N, H, 2d).
    return (first - lam.transpose(1, 2).unsqueeze(-1).to(q.dtype) * second).transpose(1, 2)


def backend_of_auto(problem: OperatorProblem, pass_: str) -> str:
    """Return the backend that "auto" takes for a problem."""
    return choose(_request(problem, pass_))


def _request(problem: OperatorProblem, pass_: str) -> Request:
    lam = problem.lam.expand(problem.grad.shape[:3])
    inputs = (problem.q, problem.k, problem.v, lam)
    q, k, v, lam = (tensor.detach().requires_grad_(differentiates(pass_)) for tensor in inputs)
    return Request(q, k, v, lam, None, True, 1.0, None, None)


def _backend(name: str) -> Candidate:
    """Return a backend of the operator, or the one that "auto" chooses."""

    def attend(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
        q, k, v = inputs
        # Aligned to the end of the keys: a single query sees them all.
        return diff_attention(q, k, v, lam, is_causal=True, backend=name)

    about = {AUTO: 'diff_attention(…, backend="auto")', PLAIN: "the plain formula, backend reference"}
    return Candidate(name, about.get(name, f"backend {name}"), attend, backend=None if name == AUTO else name)


_SOFTMAX_ABOUT = "the Transformer with the same parameters: A heads of d, torch's SDPA"
_SOFTMAX = Candidate(BASELINE, _SOFTMAX_ABOUT, _softmax, _softmax_inputs, is_baseline=True)
_FULL_V = Candidate(FULL_V, "SDPA once a map, values 2d wide", functools.partial(_composed, parts=1))
_SPLIT_V = Candidate(SPLIT_V, "SDPA twice a map, each with half of the values", functools.partial(_composed, parts=2))
_DIFFLLAMA_ABOUT = "transformers' DiffLlamaAttention without projections, rotary embedding and norm"
_DIFFLLAMA = Candidate(DIFFLLAMA, _DIFFLLAMA_ABOUT, _diffllama, _diffllama_inputs)
# As torch chooses, `sdpa_full_v` could be the plain formula. On CUDA each composition is held to the kernels that can
# be best for it, and so is the baseline.
_FLASH = ("flash", "flash", SDPBackend.FLASH_ATTENTION)
_CUDNN = ("cuDNN", "cuDNN", SDPBackend.CUDNN_ATTENTION)
_EFFICIENT = ("the memory-efficient kernel", "efficient", SDPBackend.EFFICIENT_ATTENTION)


def candidates(device: torch.device | str = "cpu") -> dict[str, Candidate]:
    """Return all candidates on a device by name, the baseline first."""
    backends = [_backend(name) for name in (AUTO, *BACKENDS)]
    if torch.device(device).type == "cuda":
        baselines = [_SOFTMAX, _SOFTMAX.held_to(*_FLASH), _SOFTMAX.held_to(*_CUDNN)]
        compositions = [_FULL_V.held_to(*_EFFICIENT), _FULL_V.held_to(*_CUDNN)]
        compositions += [_SPLIT_V.held_to(*_FLASH), _SPLIT_V.held_to(*_CUDNN)]
    else:
        baselines, compositions = [_SOFTMAX], [_FULL_V, _SPLIT_V]
    return {candidate.name: candidate for candidate in (*baselines, *backends, *compositions, _DIFFLLAMA)}


def differentiates(pass_: str) -> bool:
    return pass_ in (BACKWARD, TRAINING)


def timed_run(candidate: Candidate, problem: OperatorProblem, pass_: str) -> Callable[[], Any]:
    """Return one timed run of a candidate, without arguments: its output, or the gradients of its own inputs."""
    arranged = candidate.arrange(problem.q, problem.k, problem.v)
    leaves = tuple(tensor.detach().requires_grad_(differentiates(pass_)) for tensor in arranged)
    lam = problem.lam.detach().clone().requires_grad_(differentiates(pass_))
    size = problem.grad.shape[:3]
    if not differentiates(pass_):
        return torch.no_grad()(functools.partial(candidate.attend, leaves, lam.expand(size), pass_ != DECODE))
    # The baseline has no λ, and the gradient arrives at heads of d.
    inputs = leaves if candidate.is_baseline else (*leaves, lam)
    grad = problem.grad
    if candidate.is_baseline:
        grad = split_values(grad)[:, : leaves[0].shape[1]].contiguous()

    def training() -> tuple[Tensor, ...]:
        return torch.autograd.grad(candidate.attend(leaves, lam.expand(size), True), inputs, grad)

    if pass_ == TRAINING:
        return training
    out = candidate.attend(leaves, lam.expand(size), True)
    return functools.partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)


def compute(candidate: Candidate, problem: OperatorProblem, pass_: str) -> dict[str, Tensor]:
    """Return the output and, with a backward, the gradients of q, k, v and of λ for each head and token."""
    if not differentiates(pass_):
        return {"out": timed_run(candidate, problem, pass_)()}
    leaves = [tensor.detach().requires_grad_() for tensor in (problem.q, problem.k, problem.v)]
    # The expanded view and not λ itself: its gradient belongs to one head, so that a few heads can be checked.
    lam = problem.lam.detach().requires_grad_().expand(problem.grad.shape[:3])
    out = candidate.attend(candidate.arrange(*leaves), lam, True)
    gradients = torch.autograd.grad(out, [*leaves, lam], problem.grad)
    return {"out": out.detach(), **dict(zip(("q", "k", "v", "lam"), gradients, strict=True))}
