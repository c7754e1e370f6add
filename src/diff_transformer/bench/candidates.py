"""The candidates of `bench operator`: the twin, our backends, and what else computes differential attention.

Each takes the inputs in the layout that suits it; bringing them there is not timed. All but the twin, whose output is
(B, A, N, d), give (B, H, N, 2d).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.bench.problem import Problem, Shape
from diff_transformer.bench.records import FORWARD, TRAINING
from diff_transformer.ops import diff_attention
from diff_transformer.ops.backends import BACKENDS, Request, choose, reason_against
from diff_transformer.ops.sdpa import wide_values_allowed

TWIN, AUTO, PLAIN = "twin", "auto", "reference"
# The longest sequences that are timed of what is slow. The compositions' cost relative to the twin hardly changes with
# the length, so that a few long ones show it; decoding is timed at any length.
LONGEST_PLAIN = LONGEST_FLEX = 2048
LONGEST_COMPOSED = {
    "wide": {FORWARD: 8192, TRAINING: 4096},
    "pieces": {FORWARD: 8192, TRAINING: 4096},
    "DiffLlama": {FORWARD: 8192, TRAINING: 4096},
    "one call": {FORWARD: 2048, TRAINING: 2048},
    "sdpa": {FORWARD: 2048, TRAINING: 2048},  # the same as "wide" or "pieces"
}
HOLDS_SCORES = f"it holds all scores: measured up to length {LONGEST_PLAIN}"

Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Candidate:
    """One way to compute differential attention.

    Attributes:
        arrange: (q, k, v) of a problem → the candidate's own inputs, differentiably.
        attend: its inputs, λ (B, H, N) and whether the queries are a causal sequence → the output.
        reason: why it does not run a case, or None.
        may_fail: whether a RuntimeError is an answer, and not a bug: torch cannot compile it here.
    """

    name: str
    about: str
    arrange: Callable[[Tensor, Tensor, Tensor], Inputs]
    attend: Callable[[Inputs, Tensor, bool], Tensor]
    reason: Callable[[Problem, Shape, str], str | None] = lambda problem, shape, pass_: None
    may_fail: bool = False


def candidates() -> dict[str, Candidate]:
    """All candidates by name, the twin first."""
    ours = [_ours(name) for name in (AUTO, *BACKENDS)]
    return {candidate.name: candidate for candidate in (_TWIN, *ours, *_OTHERS)}


def backend_of_auto(problem: Problem) -> str:
    """The backend that "auto" takes for a problem."""
    return choose(_request(problem))


def _request(problem: Problem) -> Request:
    return Request(problem.q, problem.k, problem.v, problem.lam, None, True, 1.0, None, None)


def _as_they_are(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return q, k, v


def _ours(name: str) -> Candidate:
    def attend(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
        q, k, v = inputs
        # Aligned to the end of the keys: a single query sees them all.
        return diff_attention(q, k, v, lam, is_causal=True, backend=name)

    def reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
        if name == AUTO:
            return None
        if name == PLAIN and shape.keys > LONGEST_PLAIN and shape.queries > 1:
            return HOLDS_SCORES
        return _too_long(name, shape, pass_) or reason_against(name, _request(problem))

    about = {AUTO: 'diff_attention(…, backend="auto")', PLAIN: "the plain formula, backend reference"}
    return Candidate(name, about.get(name, f"backend {name}"), _as_they_are, attend, reason)


def _too_long(name: str, shape: Shape, pass_: str) -> str | None:
    longest = LONGEST_COMPOSED.get(name, {}).get(pass_)
    if longest is None or shape.keys <= longest:
        return None
    return f"{pass_} measured up to length {longest}"


def _wide_reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
    q, v = problem.q, problem.v
    fused = wide_values_allowed(q.device.type, q.dtype, q.shape[-1], v.shape[-1], False)
    if not fused and shape.keys > LONGEST_PLAIN and shape.queries > 1:
        return f"torch has no fused kernel for it here, and {HOLDS_SCORES}"
    return _too_long("wide", shape, pass_)


def split_values(v: Tensor) -> Tensor:
    """(B, H, S, 2d) → the twin's values (B, 2H, S, d)."""
    return v.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)


def _twin_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    return tuple(tensor.contiguous() for tensor in (q.flatten(1, 2), k.flatten(1, 2), split_values(v)))


def _twin(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _wide(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    first, second = (F.scaled_dot_product_attention(q[:, :, c], k[:, :, c], v, is_causal=causal) for c in range(2))
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def _pieces(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    first, second = (
        torch.cat(
            [F.scaled_dot_product_attention(q[:, :, c], k[:, :, c], half, is_causal=causal) for half in v.chunk(2, -1)],
            dim=-1,
        )
        for c in range(2)
    )
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def _cached_keys(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Keys as the model's cache holds them, [k1; k2] of 2d."""
    return q, k.transpose(2, 3).flatten(3), v


def _one_call(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    d = q.shape[-1]
    padded = torch.stack((F.pad(q[:, :, 0], (0, d)), F.pad(q[:, :, 1], (d, 0))), dim=2).flatten(1, 2)
    k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    heads = F.scaled_dot_product_attention(padded, k, v, is_causal=causal, scale=d**-0.5)
    first, second = heads.unflatten(1, (-1, 2)).unbind(2)
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def _diffllama_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """transformers pairs head h with h + A/2: all first maps, then all second ones; values likewise."""
    halves = v.unflatten(-1, (2, -1)).movedim(-2, 1)
    return tuple(tensor.contiguous().flatten(1, 2) for tensor in (q.transpose(1, 2), k.transpose(1, 2), halves))


class _Call(nn.Module):
    """What transformers' attention functions ask of the module that calls them."""

    is_causal = True
    num_key_value_groups = 1
    training = False


@functools.cache
def _caller() -> _Call:
    return _Call()


def _diffllama(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """DiffLlamaAttention.forward between its rotary embedding and its norm, with transformers' own SDPA function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = inputs
    halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
    parts = [sdpa_attention_forward(_caller(), q, k, half, None, scaling=q.shape[-1] ** -0.5)[0] for half in halves]
    first, second = torch.cat(parts, dim=-1).chunk(2, dim=2)
    # The product with λ is in the model's dtype there. Heads are (B, N, H, 2d).
    return (first - lam.transpose(1, 2).unsqueeze(-1).to(q.dtype) * second).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Without fullgraph torch falls back on the plain formula after a number of lengths.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@functools.lru_cache(maxsize=1)
def _causal_blocks(length: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)


def _flex(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    q, k, v = inputs
    blocks = _causal_blocks(k.shape[-2], k.device) if causal else None
    first, second = (_compiled_flex()(q[:, :, c], k[:, :, c], v, block_mask=blocks) for c in range(2))
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def _flex_reason(problem: Problem, shape: Shape, pass_: str) -> str | None:
    if pass_ == TRAINING and problem.q.device.type == "cpu":
        return "torch's FlexAttention has no backward on the CPU"
    if shape.keys > LONGEST_FLEX:
        return f"it compiles anew for every length: measured up to length {LONGEST_FLEX}"
    return None


_TWIN = Candidate(TWIN, "the Transformer with the same parameters: A heads of d, torch's SDPA", _twin_inputs, _twin)


def _composed(
    name: str,
    about: str,
    arrange: Callable[[Tensor, Tensor, Tensor], Inputs],
    attend: Callable[[Inputs, Tensor, bool], Tensor],
) -> Candidate:
    return Candidate(name, about, arrange, attend, lambda problem, shape, pass_: _too_long(name, shape, pass_))


_OTHERS = (
    Candidate("wide", "SDPA once a map, values 2d wide", _as_they_are, _wide, _wide_reason),
    _composed("pieces", "SDPA twice a map, values in two pieces of d", _as_they_are, _pieces),
    _composed("one call", "SDPA once, queries padded with zeros to 2d", _cached_keys, _one_call),
    _composed(
        "DiffLlama",
        "transformers' DiffLlamaAttention without projections, rotary embedding and norm",
        _diffllama_inputs,
        _diffllama,
    ),
    Candidate("flex", "FlexAttention once a map, compiled", _as_they_are, _flex, _flex_reason, may_fail=True),
)
