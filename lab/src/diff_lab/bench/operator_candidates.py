"""Lists the candidates of `bench operator`: each backend, the Transformer's attention, compositions of torch's own.

A candidate arranges a problem's tensors in the layout that suits it, outside of the time, and attends to them. All
dtypes get the same numbers, which bfloat16 represents exactly, so one truth (Equation 1 in float64) serves them all.
The first and the last head of the first and the last sequence stand for all heads, which are independent.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diff_lab.bench.benchmark import BACKWARD, BASELINE, DECODE, FORWARD, TRAINING
from diff_transformer.ops import diff_attention, flash
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.backends import BACKENDS, choose, reason_against
from diff_transformer.ops.cpu.cpu_build import capability
from diff_transformer.ops.reference import ROUNDINGS, rms_by_position, rounding_band, share_of_allowed

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
POSITIONS = 256  # in a block of the comparison
# Queries in a block of the plain formula, which holds all their scores: at most so many, and at most so many scores.
ROWS, BLOCK_SCORES = 512, 1 << 23
LAMBDA = 0.5
# Matrix products of the Transformer: two forward (scores, values), five backward (the scores again, four gradients).
PRODUCTS = {FORWARD: 2, BACKWARD: 5, TRAINING: 7}


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

    q (B, H, 2, N, d), k (B, H, 2, S, d), v (B, H, S, 2d), lam a scalar in float32, grad (B, H, N, 2d).
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
    # For fewer queries than keys, these are the view that the model's cache gives: both maps' keys side by side.
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
    """Count the Transformer's operations in a causal pass; None for decoding, which is bound by bytes."""
    if pass_ == DECODE:
        return None
    pairs = shape.batch * shape.heads * shape.queries * shape.keys // 2
    return PRODUCTS[pass_] * 2 * pairs * shape.width


@dataclass(frozen=True)
class Candidate:
    """One way to compute differential attention.

    `attend` computes the output from the inputs that `arrange` makes of a problem's (q, k, v), differentiably. The
    baseline, torch's own attention, is not checked and has no λ. `backend` is the one that it asks for by name.
    """

    name: str
    about: str
    attend: Attend
    arrange: Arrange = lambda q, k, v: (q, k, v)  # the operator's own layout
    is_baseline: bool = False
    backend: str | None = None
    only_forward: bool = False

    def reason(self, problem: OperatorProblem, pass_: str) -> str | None:
        """Return why it does not run a case, or is not measured at its size; None if it is."""
        device, shape = problem.q.device, problem.shape
        if self.only_forward and differentiates(pass_):
            return "it has no backward"
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


def _softmax_fa4(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs)
    return flash.attend(q, k, v, "fa4", q.shape[-1] ** -0.5, causal, None)[0].transpose(1, 2)


def _vllm_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Return queries by tokens, keys and values in vLLM's cache, and the plan that it makes once for all layers."""
    q, k, v = _softmax_inputs(q, k, v)
    (batch, heads, n, d), s, block = q.shape, k.shape[2], 128
    pages = torch.arange(batch * -(-s // block), dtype=torch.int32).view(batch, -1)
    slots = (pages[:, :1] * block + torch.arange(s)).flatten()
    cache = q.new_zeros(pages.numel(), heads, 2 * block, d).chunk(2, dim=2)
    queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1).contiguous() for tensor in (q, k, v))
    instructions = "amx" if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    torch.ops._C.cpu_attn_reshape_and_cache(keys, values, *cache, slots, instructions)
    lengths, starts = torch.full((batch,), s, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * n
    sizes = (batch, heads, heads, d, lengths, q.dtype, starts)
    plan = torch.ops._C.get_scheduler_metadata(*sizes, True, -1, instructions, True, None)
    return queries, *cache, starts, lengths, pages, plan


def _softmax_vllm(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    queries, keys, values, starts, lengths, pages, plan = inputs
    out, scale = torch.empty_like(queries), queries.shape[-1] ** -0.5
    call = (queries, keys, values, out, starts, lengths, scale, True, None, -1, pages, 0.0, plan, None, None)
    torch.ops._C.cpu_attention_with_kv_cache(*call)
    return out.unflatten(0, (len(lengths), -1)).transpose(1, 2)


def _softmax_zentorch(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    return torch.ops.zentorch.zentorch_sdpa(*inputs, is_causal=causal)[0]


@functools.cache
def _has_library(package: str, name: str) -> bool:
    """Load a library of another project, without its package; return whether it is installed."""
    found = find_spec(package)
    path = found and found.origin and Path(found.origin).with_name(name)
    if not path or not path.is_file():
        return False
    torch.ops.load_library(path)
    return True


def _softmax_fa3(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found, unused-ignore]  # there is no stub

    out = flash_attn_func(*(tensor.transpose(1, 2) for tensor in inputs), causal=causal)
    return (out if isinstance(out, Tensor) else out[0]).transpose(1, 2)  # versions of 2025 give the log-sums, too


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
_FA4 = replace(_SOFTMAX, name=f"{BASELINE} FA4", about="it by FlashAttention-4", attend=_softmax_fa4, backend="fa4")
_VLLM = Candidate(f"{BASELINE} vLLM", "it by vLLM's C++ attention", _softmax_vllm, _vllm_inputs, True, None, True)
_ZENTORCH = Candidate(f"{BASELINE} zentorch", "it by zentorch", _softmax_zentorch, _softmax_inputs, True, None, True)
_FA3 = replace(_SOFTMAX, name=f"{BASELINE} FA3", about="it by FlashAttention-3, where installed", attend=_softmax_fa3)
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
        baselines = [_SOFTMAX, _SOFTMAX.held_to(*_FLASH), _SOFTMAX.held_to(*_CUDNN), _FA4, _FA3]
        compositions = [_FULL_V.held_to(*_EFFICIENT), _FULL_V.held_to(*_CUDNN)]
        compositions += [_SPLIT_V.held_to(*_FLASH), _SPLIT_V.held_to(*_CUDNN)]
    else:
        baselines, compositions = [_SOFTMAX], [_FULL_V, _SPLIT_V]
        # vLLM's for CUDA has no library with this name.
        library = {"AVX512_BF16": "_C", "AVX512": "_C_AVX512"}.get(capability(), "_C_AVX2")
        if _has_library("vllm", f"{library}.abi3.so"):
            baselines.append(_VLLM)
        if _has_library("zentorch", "libzentorch.so"):
            baselines.append(_ZENTORCH)
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
