"""The candidates of `bench operator`: the twin, our backends, and what else computes differential attention.

Each takes the inputs in the layout that suits it; bringing them there is not timed. All but the twins, whose output is
(B, A, N, d), give (B, H, N, 2d).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from diff_transformer.bench import compositions
from diff_transformer.bench.compositions import Attend, Inputs, as_they_are, with_kernels
from diff_transformer.bench.problem import Problem, Shape
from diff_transformer.bench.records import BACKWARD, FORWARD, TRAINING
from diff_transformer.ops import diff_attention
from diff_transformer.ops.backends import BACKENDS, Request, choose, reason_against
from diff_transformer.ops.sdpa import wide_values_allowed

TWIN, TWIN_FLASH, TWIN_CUDNN, AUTO, PLAIN, FLEX = "twin", "twin flash", "twin cuDNN", "auto", "reference", "flex"
# Both of Appendix A's compositions under all their names.
COMPOSITIONS = ("sdpa", "wide", "pieces", "wide efficient", "wide cuDNN", "pieces flash", "pieces cuDNN")
# The longest sequences that are timed on the CPU of what is slow. The compositions' cost relative to the twin hardly
# changes with the length, so that a few long ones show it; decoding is timed at any length.
LONGEST_PLAIN = LONGEST_FLEX = 2048
LONGEST_COMPOSED = {
    "wide": {FORWARD: 8192, TRAINING: 4096},
    "pieces": {FORWARD: 8192, TRAINING: 4096},
    "DiffLlama": {FORWARD: 8192, TRAINING: 4096},
    "one call": {FORWARD: 2048, TRAINING: 2048},
    "sdpa": {FORWARD: 2048, TRAINING: 2048},  # the same as "wide" or "pieces"
}
HOLDS_SCORES = f"it holds all scores: measured up to length {LONGEST_PLAIN}"
# On CUDA: all scores in float32, of which the plain formula holds about ten at a time, as a share of the memory.
SCORES_SHARE = 1 / 16


@dataclass(frozen=True)
class Candidate:
    """One way to compute differential attention.

    Attributes:
        arrange: (q, k, v) of a problem → the candidate's own inputs, differentiably.
        attend: its inputs, λ (B, H, N) and whether the queries are a causal sequence → the output.
        reason: why it does not run a case, or None.
        may_fail: whether a RuntimeError is an answer, and not a bug: torch cannot compile it here.
        twin: whether it is the Transformer's attention: torch's own, which is not checked, and knows no λ.
    """

    name: str
    about: str
    arrange: Callable[[Tensor, Tensor, Tensor], Inputs]
    attend: Attend
    reason: Callable[[Problem, Shape, str], str | None] = lambda problem, shape, pass_: None
    may_fail: bool = False
    twin: bool = False

    def answers(self, device: torch.device) -> tuple[type[Exception], ...]:
        """The exceptions that say that it does not run, besides memory that ran out.

        On CUDA every one: torch, cuDNN, Triton and the driver refuse in their own ways what is too large for them, and
        a run of many minutes must not end there. The reason stands in the row, and breaks a bar that needs its time.
        """
        if device.type == "cuda":
            return (Exception,)
        return (RuntimeError,) if self.may_fail else ()


def candidates(device: torch.device | str = "cpu") -> dict[str, Candidate]:
    """All candidates on a device by name, the twin first."""
    ours = [_ours(name) for name in (AUTO, *BACKENDS)]
    on_cuda = torch.device(device).type == "cuda"
    twins, others = (_CUDA_TWINS, _CUDA_OTHERS) if on_cuda else ((_TWIN,), _OTHERS)
    return {candidate.name: candidate for candidate in (*twins, *ours, *others)}


def backend_of_auto(problem: Problem, pass_: str) -> str:
    """The backend that "auto" takes for a problem."""
    return choose(_request(problem, pass_))


def _request(problem: Problem, pass_: str) -> Request:
    differentiates = pass_ in (BACKWARD, TRAINING)
    given = (problem.q, problem.k, problem.v, problem.lam.expand(problem.grad.shape[:3]))
    q, k, v, lam = (tensor.detach().requires_grad_(differentiates) for tensor in given)
    return Request(q, k, v, lam, None, True, 1.0, None, None)


def _ours(name: str) -> Candidate:
    def attend(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
        q, k, v = inputs
        # Aligned to the end of the keys: a single query sees them all.
        return diff_attention(q, k, v, lam, is_causal=True, backend=name)

    def reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
        if name == AUTO:
            return None
        long = _scores_reason(problem, shape) if name == PLAIN else _too_long(name, problem, shape, pass_)
        return long or reason_against(name, _request(problem, pass_))

    about = {AUTO: 'diff_attention(…, backend="auto")', PLAIN: "the plain formula, backend reference"}
    return Candidate(name, about.get(name, f"backend {name}"), as_they_are, attend, reason, may_fail=name == FLEX)


def _scores_reason(problem: Problem, shape: Shape) -> str | None:
    device = problem.q.device
    if device.type != "cuda":
        return HOLDS_SCORES if shape.keys > LONGEST_PLAIN and shape.queries > 1 else None
    scores = 4 * shape.batch * shape.heads * shape.queries * shape.keys
    if scores <= SCORES_SHARE * torch.cuda.get_device_properties(device).total_memory:
        return None
    return f"it holds all scores, {scores / 2**30:.0f} GiB"


def _too_long(name: str, problem: Problem, shape: Shape, pass_: str) -> str | None:
    longest = LONGEST_COMPOSED.get(name, {}).get(pass_)
    if problem.q.device.type != "cpu":
        return None
    if name == FLEX and shape.keys > LONGEST_FLEX:
        return f"it compiles anew for every length: measured up to length {LONGEST_FLEX}"
    if longest is None or shape.keys <= longest:
        return None
    return f"{pass_} measured up to length {longest}"


def _wide_reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
    q, v = problem.q, problem.v
    if q.device.type != "cpu":  # held to fused kernels there
        return None
    fused = wide_values_allowed(q.device.type, q.dtype, q.shape[-1], v.shape[-1], False)
    if not fused and shape.keys > LONGEST_PLAIN and shape.queries > 1:
        return f"torch has no fused kernel for it here, and {HOLDS_SCORES}"
    return _too_long("wide", problem, shape, pass_)


def _composed(name: str, about: str, arrange: Callable[[Tensor, Tensor, Tensor], Inputs], attend: Attend) -> Candidate:
    def reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
        return _too_long(name, problem, shape, pass_)

    return Candidate(name, about, arrange, attend, reason)


def _held(candidate: Candidate, name: str, kernel: str, *backends: SDPBackend) -> Candidate:
    """A candidate with torch held to one kernel of its own."""
    attend = with_kernels(candidate.attend, *backends)
    return replace(candidate, name=name, about=f"{candidate.about}, held to {kernel}", attend=attend)


_TWIN = Candidate(
    TWIN,
    "the Transformer with the same parameters: A heads of d, torch's SDPA",
    compositions.twin_inputs,
    compositions.twin,
    twin=True,
)
_CUDA_TWINS = (
    _TWIN,
    _held(_TWIN, TWIN_FLASH, "flash", SDPBackend.FLASH_ATTENTION),
    _held(_TWIN, TWIN_CUDNN, "cuDNN", SDPBackend.CUDNN_ATTENTION),
)
_WIDE = Candidate("wide", "SDPA once a map, values 2d wide", as_they_are, compositions.wide, _wide_reason)
_PIECES = _composed("pieces", "SDPA twice a map, values in two pieces of d", as_they_are, compositions.pieces)
_REST = (
    _composed(
        "one call", "SDPA once, queries padded with zeros to 2d", compositions.cached_keys, compositions.one_call
    ),
    _composed(
        "DiffLlama",
        "transformers' DiffLlamaAttention without projections, rotary embedding and norm",
        compositions.diffllama_inputs,
        compositions.diffllama,
    ),
)
_OTHERS = (_WIDE, _PIECES, *_REST)
# As torch chooses, "wide" could be the plain formula. Here each composition is held to the kernels that can be best.
_CUDA_OTHERS = (
    _held(_WIDE, "wide efficient", "the memory-efficient kernel", SDPBackend.EFFICIENT_ATTENTION),
    _held(_WIDE, "wide cuDNN", "cuDNN", SDPBackend.CUDNN_ATTENTION),
    _held(_PIECES, "pieces flash", "flash", SDPBackend.FLASH_ATTENTION),
    _held(_PIECES, "pieces cuDNN", "cuDNN", SDPBackend.CUDNN_ATTENTION),
    *_REST,
)
