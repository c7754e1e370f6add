"""Problems for the operator, and how far from the float64 oracle an answer in a given dtype may be.

The budget is that of `diff_transformer.ops.reference`, with the most exact band that there is. An answer in dtype T
passes when every entry of the output and of every gradient satisfies

    |answer − oracle|  ≤  2 · max |plain − oracle|  +  band

`plain` is the straight formula, softmax minus λ softmax times V, with automatic differentiation, every step in T. The
band exists because the plain formula may be right by luck where the sizes are tiny, and is what rounding alone can do:

    band = ROUNDINGS · eps(T)/2 · M(P)  +  eps(accumulator) · M(P ⊙ L)  +  ROUNDINGS · smallest(T) · (terms in the sum)

M is the quantity computed with absolute values everywhere, so that nothing cancels: |A1||V| + |λ||A2||V| for the
output, and likewise for each gradient of Equation 7. A backend rounds to T at most the maps, λ, their difference, dP,
dS and the result, each by a relative eps(T)/2: four roundings on the way to the output and to dV, six to the others.
The second term is the error of the logits: a relative error of a weight is an absolute error of its logit, whose
magnitude is L = |s||q||k| + |mask| (plus its mean over the row, for the normalisation), and which is never computed in
less than float32. The third is underflow, which matters in float16 only. Where M is 0 (a query that sees nothing, a key
that nobody sees) the answer has to be exactly 0.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import oracle
from diff_transformer import diff_attention
from diff_transformer.ops.attention_request import segment_bounds_from
from diff_transformer.ops.cpu.cpu_backend import reason_against_cpu_kernel
from diff_transformer.ops.reference import PLAIN_ERRORS, ROUNDINGS
from diff_transformer.ops.triton.triton_backend import interpreted

Array = NDArray[np.float64]

BACKENDS = ("reference", "blockwise", "sdpa", "cpu", "triton")


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The fused kernels do not take float64, and triton's interpreter cannot multiply bfloat16.
FUSED_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "triton": (torch.float32, torch.float16)}


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    """What a backend computes in on the CPU, where it is there."""
    return FUSED_DTYPES.get(backend, DTYPES)


def takes(backend: str, dtype: torch.dtype) -> bool:
    """Whether a backend computes in this dtype here, on the CPU.

    Without a compiler there is no "cpu"; tests/ops/cpu says so. Where there is a GPU, triton runs natively in
    tests/ops/triton and not here.
    """
    is_there = {"cpu": lambda: reason_against_cpu_kernel() is None, "triton": interpreted}.get(backend, lambda: True)
    return dtype in dtypes_of(backend) and is_there()


def skip_unless_it_takes(backend: str, dtype: torch.dtype, tokens: int = 0) -> None:
    """Skip the test where a backend does not compute in this dtype here, or not so many tokens in a reasonable time.

    Triton's interpreter takes long for 100 tokens, and some of its blocks are of 16: 37 tokens have several too.
    """
    if not takes(backend, dtype):
        pytest.skip(f"{backend} does not compute in {dtype} here")
    if backend == "triton" and tokens > 100:
        pytest.skip(f"triton's interpreter would take long for {tokens} tokens")


@dataclass(frozen=True)
class Case:
    """One request to the operator. The logits' standard deviation is gain²: 4 by default, so attention is peaked."""

    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    ratio: int = field(default=1, repr=False)  # signal heads to a noise map
    key_maps: int = 2
    queries: int = 9
    keys: int = 9
    d: int = 4
    dv: int = 8
    dtype: torch.dtype = torch.float32
    is_causal: bool = False
    window: int | None = None
    mask: str | None = None
    documents: tuple[int, ...] | None = None  # their lengths; only where there is one sequence and N = S
    lam: str = "scalar"
    scale: float | None = None
    gain: float = 2.0
    layout: str = "contiguous"

    @property
    def groups(self) -> int:
        return self.heads // self.ratio


@dataclass(frozen=True)
class Problem:
    """Tensors (leaves without gradient) and options; `dout` is the gradient that arrives at the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    lam: Tensor | float
    dout: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> "Problem":
        """The same problem on another device, its tensors views of all the memory that they are views of here.

        `Tensor.to` would give a tensor with gaps another layout.
        """

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
            return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())

        options = {name: moved(value) for name, value in self.options.items()}
        return Problem(*(moved(x) for x in (self.q, self.k, self.v, self.lam, self.dout)), options)

    def double(self) -> "Problem":
        """The same numbers in float64. λ too: it is the backends' business to keep it in float32."""
        return replace(self, **{name: getattr(self, name).double() for name in ("q", "k", "v", "lam", "dout")})

    def solve(self, attention: Callable[..., Tensor], **more: Any) -> dict[str, Tensor]:
        """out and the gradients that `attention(q, k, v, lam, **options)` gives, by name."""
        leaves = {name: getattr(self, name).detach().requires_grad_() for name in "qkv"}
        if isinstance(self.lam, Tensor):
            leaves["lam"] = self.lam.detach().requires_grad_()
        out = attention(leaves["q"], leaves["k"], leaves["v"], leaves.get("lam", self.lam), **self.options, **more)
        assert out.shape == self.dout.shape
        assert out.dtype == self.dout.dtype
        gradients = torch.autograd.grad(out, list(leaves.values()), self.dout)
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def forward(problem: Problem, backend: str, **more: Any) -> Tensor:
    """The output alone, where no gradient is wanted: other kernels may compute it."""
    with torch.no_grad():
        arguments = problem.q, problem.k, problem.v, problem.lam
        return diff_attention(*arguments, **{**problem.options, **more}, backend=backend)


def operator_arguments(case: Case) -> tuple[Any, ...]:
    """(q, k, v, lam, attn_mask, is_causal, scale, window, documents) as registered operators take them."""
    problem = build(case)
    assert isinstance(problem.lam, Tensor)
    lam = problem.lam.expand(case.batch, case.heads, case.queries)
    mask = problem.options.get("attn_mask")
    mask = mask if mask is None else mask[(None,) * (4 - mask.dim())]
    ends = problem.options.get("cu_seqlens")
    documents = None if ends is None else segment_bounds_from(ends, case.keys)
    return problem.q, problem.k, problem.v, lam, mask, case.is_causal, case.d**-0.5, case.window, documents


MASKS = (
    "bool (1, 1, N, S)",
    "bool (B, 1, 1, S)",
    "bool (B, H, N, S)",
    "bool (N, S)",
    "bool (H, 1, S)",
    "add (1, 1, N, S)",
    "add (B, H, N, S)",
    "add (H, N, S)",
    "add -inf (B, 1, N, S)",
    "add -inf (N, S)",
    "add min (B, 1, N, S)",
)
LAMBDAS = ("float", "scalar", "one", "per head", "per token", "tokens alone", "full", "above one", "negative", "zero")


def _mask(kind: str, case: Case, generator: torch.Generator) -> Tensor:
    """A mask named "bool SHAPE" or "add [what] SHAPE"; some queries and (with a batch axis) a whole row see nothing."""
    sizes = {"B": case.batch, "H": case.heads, "N": case.queries, "S": case.keys, "1": 1}
    kind, shape = kind.split(" (")
    shape = [sizes[letter] for letter in shape.rstrip(")").split(", ")]
    may = torch.rand(shape, generator=generator) < 0.6
    if shape[-2] > 2:
        may[..., 1, :] = False
    if len(shape) == 4 and shape[0] > 1:
        may[-1, ..., : case.keys // 2 + 1] = False  # left padding
        if shape[-2] == 1 and case.batch > 2:
            may[0] = False
    if kind == "bool":
        return may
    if kind == "add min":  # finite, so it cannot make a query blind: leave every query its own key
        may = may | (torch.arange(case.keys) == torch.arange(case.queries)[:, None] + case.keys - case.queries)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64).mul(2).to(case.dtype)
    if kind == "add":
        return bias
    return bias.masked_fill(~may, float("-inf") if kind == "add -inf" else torch.finfo(case.dtype).min)


def _lam(kind: str, case: Case, generator: torch.Generator) -> Tensor | float:
    """λ: float64 with float64 inputs, otherwise float32, as the model keeps it."""
    fixed = {"float": 0.7, "scalar": 0.6, "above one": 1.8, "negative": -0.4, "zero": 0.0}
    dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    if kind == "float":
        return fixed[kind]
    if kind in fixed:
        return torch.tensor(fixed[kind], dtype=dtype)
    shape = {
        "one": (1,),
        "per head": (case.heads, 1),
        "per token": (case.batch, 1, case.queries),
        "tokens alone": (case.queries,),
        "full": (case.batch, case.heads, case.queries),
    }[kind]
    return torch.rand(shape, generator=generator, dtype=torch.float64).mul(1.5).to(dtype)


def build(case: Case) -> Problem:
    """The problem of a case: the same numbers every time, different ones for every case (but equal across dtypes)."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(replace(case, dtype=torch.float32)).encode()))

    def normal(*shape: int, gain: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(gain).to(case.dtype)

    c, g = case, case.gain
    if c.layout == "contiguous":
        q = normal(c.batch, c.groups, c.ratio + 1, c.queries, c.d, gain=g)
        k = normal(c.batch, c.key_heads, c.key_maps, c.keys, c.d, gain=g)
        v, dout = normal(c.batch, c.key_heads, c.keys, c.dv), normal(c.batch, c.heads, c.queries, c.dv)
    elif c.layout == "projection":  # what linear layers give: (batch, length, heads, …)
        q = normal(c.batch, c.queries, c.groups, c.ratio + 1, c.d, gain=g).permute(0, 2, 3, 1, 4)
        k = normal(c.batch, c.keys, c.key_heads, c.key_maps, c.d, gain=g).permute(0, 2, 3, 1, 4)
        v = normal(c.batch, c.keys, c.key_heads, c.dv).transpose(1, 2)
        dout = normal(c.batch, c.queries, c.heads, c.dv).transpose(1, 2)
    elif c.layout == "cache":  # what a cache holds: longer than used, the maps' keys side by side in one head
        q = normal(c.batch, c.groups, c.queries, (c.ratio + 1) * c.d + 1, gain=g)[..., 1:]
        q = q.unflatten(-1, (c.ratio + 1, c.d)).transpose(2, 3)
        k = normal(c.batch, c.key_heads, c.keys + 3, c.key_maps * c.d, gain=g)[:, :, : c.keys]
        k = k.unflatten(-1, (c.key_maps, c.d)).transpose(2, 3)
        v = normal(c.batch, c.key_heads, c.keys + 3, c.dv)[:, :, 3:]
        dout = normal(1, 1, 1, 1).expand(c.batch, c.heads, c.queries, c.dv)  # what out.sum() sends back
    elif c.layout == "expanded":  # one sequence seen by the whole batch, channels not contiguous
        q = normal(1, c.groups, c.ratio + 1, c.d, c.queries, gain=g).mT.expand(c.batch, -1, -1, -1, -1)
        k = normal(c.batch, 1, c.key_maps, c.d, c.keys, gain=g).mT.expand(-1, c.key_heads, -1, -1, -1)
        v = normal(1, 1, c.dv, c.keys).mT.expand(c.batch, c.key_heads, -1, -1)
        dout = normal(c.dv, c.queries, c.heads, c.batch).permute(3, 2, 1, 0)
    else:
        raise KeyError(c.layout)
    options: dict[str, Any] = {"is_causal": c.is_causal, "scale": c.scale, "window": c.window}
    if c.mask is not None:
        options["attn_mask"] = _mask(c.mask, c, generator)
    if c.documents is not None:
        assert (c.batch, sum(c.documents), c.queries) == (1, c.keys, c.keys)
        options["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(c.documents)], dtype=torch.int32)
    return Problem(q, k, v, _lam(c.lam, c, generator), dout, options)


@st.composite
def random_cases(draw: st.DrawFn, *, dtypes: tuple[torch.dtype, ...] = DTYPES, **sizes: int) -> Case:
    """Requests that hypothesis makes up, of sizes up to these."""
    most = {"batch": 3, "key_heads": 3, "queries": 9, "keys": 9, "d": 9, "dv": 13, "window": 11} | sizes
    heads, documents, ratio = draw(st.integers(1, most["key_heads"])), None, draw(st.sampled_from([1, 1, 2, 3]))
    batch, queries, keys = (draw(st.integers(1, most[name])) for name in ("batch", "queries", "keys"))
    if draw(st.booleans()):
        batch, keys = 1, queries
        ends = [0, *sorted(draw(st.lists(st.integers(0, keys), max_size=5))), keys]
        documents = tuple(end - begin for begin, end in itertools.pairwise(ends))
    return Case(
        batch=batch,
        key_heads=heads,
        heads=heads * draw(st.integers(1, 3)) * ratio,
        ratio=ratio,
        key_maps=draw(st.sampled_from([2, 2, 1])),
        queries=queries,
        keys=keys,
        d=draw(st.integers(1, most["d"])),
        dv=draw(st.integers(1, most["dv"])),
        dtype=draw(st.sampled_from(dtypes)),
        is_causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, most["window"])),
        mask=draw(st.sampled_from([None, *(mask for mask in MASKS if queries <= keys or "min" not in mask)])),
        documents=documents,
        lam=draw(st.sampled_from(LAMBDAS)),
        scale=draw(st.none() | st.sampled_from([0.25, 1.0])),
        gain=draw(st.sampled_from([0.5, 2.0, 3.0])),
        layout=draw(st.sampled_from(["contiguous", "projection", "cache", "expanded"])),
    )


def ungrouped(q: Any) -> Any:
    """Queries (B, G, r + 1, N, d) as (B, H, 2, N, d), of numpy or torch: the noise query beside each signal query."""
    ratio = q.shape[2] - 1
    signal = [i for i in range(q.shape[1]) for _ in range(ratio)], [*range(ratio)] * q.shape[1]
    both = [q[:, signal[0], signal[1]], q[:, signal[0], [ratio] * len(signal[0])]]
    return torch.stack(both, 2) if isinstance(q, Tensor) else np.stack(both, 2)


def regrouped(x: Array, ratio: int) -> Array:
    """What was found for (B, H, 2, N, d), added up where several heads have one noise query: (B, G, r + 1, N, d)."""
    x = x.reshape(x.shape[0], -1, ratio, *x.shape[2:])
    return np.concatenate([x[:, :, :, 0], x[:, :, :, 1].sum(2, keepdims=True)], 2)


def float64(x: Tensor | float) -> Any:
    return x.detach().cpu().double().numpy() if isinstance(x, Tensor) and x.dtype != torch.bool else np.asarray(x)


def solve_by_oracle(problem: Problem, rules: oracle.Rules = oracle.SPEC) -> tuple[dict[str, Array], oracle.Forward]:
    q, k, v, lam, dout = (float64(getattr(problem, name)) for name in ("q", "k", "v", "lam", "dout"))
    options = dict(problem.options)
    if options.get("attn_mask") is not None:
        options["attn_mask"] = float64(options["attn_mask"])
    if options.get("cu_seqlens") is not None:
        options["cu_seqlens"] = options["cu_seqlens"].tolist()
    forward = oracle.attention(q, k, v, lam, **options, rules=rules)
    values = {"out": forward.out, **oracle.gradients(q, k, v, lam, dout, forward, rules)}
    if not isinstance(problem.lam, Tensor):
        del values["lam"]
    return values, forward


def solve_plainly(problem: Problem, forward: oracle.Forward) -> dict[str, Tensor]:
    """The straight formula, every step in the problem's dtype; which keys are visible is taken from the oracle."""
    visible, bias = torch.from_numpy(forward.visible), torch.from_numpy(forward.bias)
    return replace(problem, options={}).solve(plain_attention(visible, bias, forward.scale))


def plain_attention(visible: Tensor, bias: Tensor, scale: float) -> Callable[..., Tensor]:
    """Equation 1 spelled out in the dtype of its inputs, for what every query sees and what is added, (B, H, N, S)."""

    def attention(q: Tensor, k: Tensor, v: Tensor, lam: Tensor | float, **_: object) -> Tensor:
        q = ungrouped(q)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = q @ k.transpose(-1, -2) * scale + bias.to(q.dtype)[:, :, None]
        hidden = ~visible[:, :, None]
        nothing = hidden.all(-1, keepdim=True)
        scores = scores.masked_fill(hidden, float("-inf")).masked_fill(nothing, 0.0)
        first, second = scores.softmax(-1).masked_fill(hidden, 0.0).unbind(2)
        if isinstance(lam, Tensor):
            lam = lam.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[3])[..., None]
        return (first - lam * second) @ v

    return attention


def magnitudes(problem: Problem, forward: oracle.Forward, errors: Array | None = None) -> dict[str, Array]:
    """M: output and gradients without cancellation.

    With `errors` (2, B, H, N, S), relative errors of the weights: what they add up to, to first order.
    """
    q, k, v, dout = (np.abs(float64(x)) for x in (problem.q, problem.k, problem.v, problem.dout))
    ratio, q = q.shape[2] - 1, ungrouped(q)
    group = q.shape[1] // k.shape[1]
    kk, vv = np.repeat(np.broadcast_to(k, (*k.shape[:2], 2, *k.shape[3:])), group, 1), np.repeat(v, group, 1)
    lam, s = np.abs(forward.lam)[..., None], abs(forward.scale)
    p = np.stack([forward.first, forward.second])
    e = p if errors is None else p * errors
    dp = dout @ vv.swapaxes(-1, -2)
    ds = e * (dp + (p * dp).sum(-1, keepdims=True)) + p * (e * dp).sum(-1, keepdims=True)
    ds = np.stack([ds[0], lam * ds[1]], 2)
    weights = e[0] + lam * e[1]

    def ungroup(x: Array) -> Array:
        return x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)

    dk = ungroup(s * ds.swapaxes(-1, -2) @ q)
    return {
        "out": weights @ vv,
        "q": regrouped(s * ds @ kk, ratio),
        "k": dk.sum(2, keepdims=True) if k.shape[2] == 1 else dk,
        "v": ungroup(weights.swapaxes(-1, -2) @ dout),
        "lam": oracle.sum_to((e[1] * dp).sum(-1), np.shape(problem.lam)),
    }


@dataclass(frozen=True)
class Expected:
    """What the oracle says, by how much an answer may differ, the band in that, and how far off plain is."""

    values: dict[str, Array]
    limits: dict[str, Array]
    bands: dict[str, Array]
    plain_errors: dict[str, float]

    def ratios(self, answer: Mapping[str, Tensor]) -> dict[str, float]:
        """By name, the largest |answer − oracle| / limit; infinite for a NaN or for anything but 0 where 0 is due."""
        ratios = {}
        assert set(answer) == set(self.values)
        for name, value in self.values.items():
            computed, limit = float64(answer[name]), self.limits[name]
            assert computed.shape == value.shape, f"{name} has shape {computed.shape}, not {value.shape}"
            error = np.abs(computed - value)
            ratio = np.divide(error, limit, out=np.where(error == 0, 0.0, np.inf), where=limit > 0)
            ratios[name] = float(np.nan_to_num(ratio, nan=np.inf).max(initial=0.0))
        return ratios

    def check(self, answer: Mapping[str, Tensor]) -> None:
        ratios = self.ratios(answer)
        assert max(ratios.values()) <= 1, f"error over budget (1 = the limit): {ratios}"

    def check_output(self, out: Tensor) -> None:
        error, limit = np.abs(float64(out) - self.values["out"]), self.limits["out"]
        assert np.all(error <= limit), f"at most {np.max(error / np.maximum(limit, 1e-300))} of the limit"


def expect(problem: Problem) -> Expected:
    """The oracle's answer to a problem and the budget of an answer in the problem's dtype."""
    values, forward = solve_by_oracle(problem)
    plain = solve_plainly(problem, forward)
    plain_errors = {name: float(np.abs(float64(plain[name]) - value).max(initial=0)) for name, value in values.items()}
    q, k = (np.abs(float64(x)) for x in (problem.q, problem.k))
    q = ungrouped(q)
    k = np.repeat(k, q.shape[1] // k.shape[1], 1)
    logits = np.moveaxis(abs(forward.scale) * q @ k.swapaxes(-1, -2), 2, 0) + np.abs(forward.bias)
    weights = np.stack([forward.first, forward.second])
    logits = np.where(weights > 0, logits, 0)
    logits = logits + (weights * logits).sum(-1, keepdims=True)
    info = torch.finfo(problem.q.dtype)
    accumulator = min(info.eps, torch.finfo(torch.float32).eps)
    rounding, logit = magnitudes(problem, forward), magnitudes(problem, forward, logits)
    limits, bands = {}, {}
    for name, value in values.items():
        m = rounding[name]
        terms = max(problem.q.shape[3], problem.k.shape[3]) * max(1.0, m.max(initial=0))
        underflow = np.where(m > 0, info.smallest_normal * info.eps * terms, 0)
        band = ROUNDINGS[name] * (info.eps / 2 * m + underflow) + accumulator * logit[name]
        bands[name] = band
        limits[name] = np.where(band > 0, PLAIN_ERRORS * plain_errors[name] + band, 0)
        assert limits[name].shape == value.shape
    return Expected(values, limits, bands, plain_errors)


@cache
def prepared(case: Case) -> tuple[Problem, Expected]:
    """The problem of a case and what is expected of it, computed once for all backends."""
    problem = build(case)
    return problem, expect(problem)


def check_normed(
    out: Tensor, expected: Expected, weight: Tensor, norm_eps: float = 1e-5, norm_scale: float = 1.0
) -> None:
    """Equation 3 around the oracle's heads; allowed is what the heads' errors become, and the norm's own rounding."""
    heads, limits = expected.values["out"], expected.limits["out"]
    values = norm_scale * oracle.rms_norm(heads, float64(weight), norm_eps)
    root = np.sqrt((heads**2).mean(-1, keepdims=True) + norm_eps)
    errors = (limits + np.abs(heads) / root * np.sqrt((limits**2).mean(-1, keepdims=True))) / root
    limit = abs(norm_scale) * np.abs(float64(weight)) * errors + 4 * torch.finfo(out.dtype).eps * np.abs(values)
    assert np.all(np.abs(float64(out) - values) <= limit)
