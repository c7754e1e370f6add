"""Defines the request that every backend answers, and functions that several backends need.

Operators registered with torch take the request's fields one by one, under the names in :data:`REQUEST_SCHEMA`.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from diff_transformer.ops.visibility import key_ranges, position_mask

# Of every operator; exported programs hold these names.
REQUEST_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, bool is_causal, float scale, SymInt? window, "
    "Tensor? documents"
)
WIDEST_WINDOW = 1 << 62  # of those that 64 bits hold; no sequence is as long
PLAIN = (Tensor, torch.nn.Parameter)  # classes of tensors whose numbers are where their strides say, if they are dense
# Classes of torch that stand for something else than what they store.
_STANDING_FOR_OTHERS = ("CausalBias", "MaskedTensor", "DTensor")
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the fused kernels
# Modes in which tensors hold no values.
_TRACING = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.FAKE,
)


class Norm(NamedTuple):
    """The headwise norm of Equation 3: ``factor`` · RMSNorm(head) · ``weight``, whose weight is (dv,)."""

    weight: Tensor
    eps: float
    factor: float


class Request(NamedTuple):
    """The input of every backend: the arguments of :func:`diff_transformer.diff_attention`, checked."""

    q: Tensor  # (B, G, r + 1, N, d): the queries of r signal heads, and that of the noise map which they share
    k: Tensor  # (B, H_kv, 2 or 1, S, d)
    v: Tensor  # (B, H_kv, S, dv)
    lam: Tensor  # (B, H, N), float32 at least
    attn_mask: Any  # a tensor of four axes, some perhaps of size 1; for flex alone a BlockMask; or None
    is_causal: bool
    scale: float
    window: int | None
    segment_bounds: Tensor | None  # (2, N) int32: the first key of each query's document, and the one past its last

    @property
    def n(self) -> int:
        """N, the number of queries."""
        return self.q.shape[3]

    @property
    def s(self) -> int:
        """S, the number of keys."""
        return self.k.shape[3]

    @property
    def ratio(self) -> int:
        """r, how many signal heads share a noise map; 1 but in grouped differential attention."""
        return self.q.shape[2] - 1

    @property
    def heads(self) -> int:
        """H = r·G, the signal heads: each has an output, and a λ."""
        return self.q.shape[1] * self.ratio

    @property
    def heads_per_key(self) -> int:
        """H / H_kv, how many heads share a key head."""
        return self.heads // self.k.shape[1]

    @property
    def needs_gradient(self) -> bool:
        if torch.jit.is_tracing():  # torch traces again without gradients, and compares the graphs
            return True
        return torch.is_grad_enabled() and (
            self.q.requires_grad or self.k.requires_grad or self.v.requires_grad or self.lam.requires_grad
        )

    def first_queries(self) -> Tensor:
        """Return the signal heads' queries, (B, H, N, d); a view if each has a noise map of its own."""
        return self.q[:, :, 0] if self.ratio == 1 else self.q[:, :, :-1].flatten(1, 2)

    def second_queries(self) -> Tensor:
        """Return the noise maps' queries, (B, G, N, d), a view."""
        return self.q[:, :, -1]

    def ungrouped(self) -> "Request":
        """Return the same request with a noise map for each signal head: q (B, H, 2, N, d)."""
        if self.ratio == 1:
            return self
        signal, noise = self.q[:, :, :-1], self.q[:, :, -1:]
        return self._replace(q=torch.stack((signal, noise.expand_as(signal)), dim=3).flatten(1, 2))

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the keys that position leaves to each query, as :func:`diff_transformer.ops.visibility.key_ranges`."""
        return key_ranges(self.n, self.s, self.is_causal, self.window, self.segment_bounds, self.q.device)

    def position_mask(self) -> Tensor | None:
        """Return the (N, S) boolean mask of causality, window and documents, or None if they hide nothing."""
        return position_mask(self.n, self.s, self.is_causal, self.window, self.segment_bounds, self.q.device)


def is_eager(*tensors: Tensor | None) -> bool:
    """Return whether the tensors hold values: no torch.compile, torch.func, make_fx, fake tensor or subclass is at
    work.

    Only then may stored values be read, and results be cached. The imaginary part of a conjugate means the negative of
    the stored values.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        return False
    return all(x is None or (type(x) in PLAIN and not x.is_neg()) for x in tensors)


def may_skip_dispatcher() -> bool:
    """Return whether no trace, transform, forward-mode derivative or counting mode has to see the operators."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    return torch._C._len_torch_dispatch_stack() == 0 and torch._C._get_tracing_state() is None


def check_dense(name: str, x: Tensor) -> None:
    """Refuse a tensor that does not hold its numbers side by side, as kernels read them."""
    kind = None
    if type(x) not in PLAIN:
        kinds = (base.__name__ for base in type(x).__mro__ if base.__module__.startswith("torch."))
        kind = next((kind for kind in kinds if kind in _STANDING_FOR_OTHERS), None)
    if kind is None and (x.is_nested or x.layout != torch.strided):
        kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
    # What torch makes for gradients of zeros; torch.compile has none.
    if kind is None and not torch.compiler.is_compiling() and x._is_zerotensor():
        kind = "tensor of zeros without memory"
    if kind is not None:
        raise TypeError(f"{name} must be a dense tensor that holds its own numbers, got a {kind}.")


def is_floating(x: Tensor) -> bool:
    """Return whether a tensor is of a floating dtype that torch computes in: not float8, which is for storage."""
    return x.is_floating_point() and x.dtype.itemsize > 1


def has_autocast(device: str) -> bool:
    """Return whether a type of device has autocast: "meta" has none.

    CPU and CUDA are not asked for: the question is felt in a call for a single query, and torch 2.11 does not trace it.
    """
    return device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)


def reason_against_dtype(dtype: torch.dtype) -> str | None:
    """Return why the fused kernels do not take tensors of this dtype, or None."""
    return None if dtype in FUSED_DTYPES else f"it computes float32, bfloat16 and float16, got {dtype}"


@functools.cache
def triton_is_installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: made unimportable
        return False


def register_gradient(backend: str, forward: Any, backward: Any) -> None:
    """Make one operator the gradient of another, and refuse to differentiate it in turn.

    ``forward`` takes the fields of a :class:`Request` first, and its results after the output are saved. ``backward``
    takes the gradient of the output, the request's first five fields, the saved tensors, and the other fields.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, is_causal, scale, window, segment_bounds = inputs[: len(Request._fields)]
        saved = output[1:] if isinstance(output, tuple) else ()
        ctx.save_for_backward(*tensors, *saved, segment_bounds)
        ctx.mark_non_differentiable(*saved)
        ctx.settings, ctx.others = (is_causal, scale, window), (None,) * (len(inputs) - 4)

    def differentiate(ctx: Any, grad_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *tensors, segment_bounds = ctx.saved_tensors
        return (*backward(grad_out, *tensors, *ctx.settings, segment_bounds), *ctx.others)

    def fake(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in inputs[:4])

    torch.library.register_autograd(forward, differentiate, setup_context=save)
    torch.library.register_fake(backward, fake)
    refuse_second_order(backend, backward)


def refuse_second_order(backend: str, backward: Any) -> None:
    """Make the derivative of an operator raise; otherwise torch would take its results for constants."""

    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(
            f"backend {backend!r} cannot be differentiated twice. For second-order gradients diff_attention takes "
            "backend='reference', and a model attn_implementation='diff_attention_reference'."
        )

    torch.library.register_autograd(backward, refuse)
