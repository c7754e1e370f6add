"""Defines the request that every backend answers, and functions that several backends need.

Operators registered with torch take the request's fields one by one, under the names in :data:`REQUEST_SCHEMA`.

Causality is aligned to the end of the keys: query i of N stands at position i + S − N among S keys.

A NaN or an infinity in keys and values is confined to the queries that see it. A weight of 0 does not hide it, since
0 · NaN is NaN, in the output as in the gradients. So a backend computes with zeros in place of such rows, and a NaN is
added to the outputs of the queries that see one of them. The kernels in C++ and Triton follow the rule by themselves.
"""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Of every operator; exported programs hold these names.
REQUEST_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor lam, Tensor? attn_mask, bool is_causal, float scale, SymInt? window, "
    "Tensor? documents"
)
SIGNAL_SCHEMA = "Tensor? signal_weight=None"  # comes last: programs exported before it was there call without it
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
    signal_weight: Tensor | None = None  # (B, H, N) as λ, the factor of the signal map, or None for 1

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
        inputs = (self.q, self.k, self.v, self.lam, self.signal_weight)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    def ungrouped(self) -> "Request":
        """Return the same request with a noise map for each signal head: q (B, H, 2, N, d)."""
        if self.ratio == 1:
            return self
        signal, noise = self.q[:, :, :-1], self.q[:, :, -1:]
        return self._replace(q=torch.stack((signal, noise.expand_as(signal)), dim=3).flatten(1, 2))

    def difference(self, first: Tensor, second: Tensor) -> Tensor:
        """Subtract λ times the second map, or its product with V, from the first, times its weight: (B, H, N, …)."""
        if self.signal_weight is not None:
            first = self.signal_weight.unsqueeze(-1) * first
        return first - self.lam.unsqueeze(-1) * second

    def key_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the keys that position leaves to each query, as :func:`key_ranges` does."""
        return key_ranges(self.n, self.s, self.is_causal, self.window, self.segment_bounds, self.q.device)

    def position_mask(self) -> Tensor | None:
        """Return the (N, S) boolean mask of causality, window and documents, or None if they hide nothing."""
        return position_mask(self.n, self.s, self.is_causal, self.window, self.segment_bounds, self.q.device)


def constant_when_compiled(function: Any) -> Any:
    """Mark a function whose answer torch.compile takes as a constant.

    ``torch.compiler.assume_constant_result`` sets this mark, and imports torch._dynamo: half of the operator's import.
    """
    function._dynamo_marked_constant = True
    return function


def is_eager(*tensors: Tensor | None) -> bool:
    """Return whether tensors hold values: no torch.compile, torch.func, make_fx, fake tensor or subclass is at work.

    Only then may stored values be read, and results be cached. A conjugate's imaginary part means their negative.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        return False
    # Zeros without memory and the batches of autograd.grad(is_grads_batched=True) are of torch's plain type, too.
    is_batch = torch._C._functorch.is_legacy_batchedtensor
    given = (x for x in tensors if x is not None)
    return all(type(x) in PLAIN and not (x.is_neg() or x._is_zerotensor() or is_batch(x)) for x in given)


def may_skip_dispatcher() -> bool:
    """Return whether no trace, transform, forward-mode derivative or counting mode has to see the operators."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if forward_ad._current_level >= 0:
        return False
    if torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch):  # make_fx(pre_dispatch=True)
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


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that autocast casts to on a type of device; None if it is off."""
    on = has_autocast(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def reason_against_dtype(dtype: torch.dtype) -> str | None:
    """Return why the fused kernels do not take tensors of this dtype, or None."""
    return None if dtype in FUSED_DTYPES else f"it computes float32, bfloat16 and float16, got {dtype}"


@functools.cache
def triton_is_installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # sys.modules["triton"] is None: made unimportable
        return False


def register_gradient(backend: str, forward: Any, backward: Any, statistics: int = 0) -> None:
    """Make one operator the gradient of another, and refuse to differentiate it in turn.

    ``forward`` takes the fields of a :class:`Request`, whether it shall return ``statistics`` after the output, if it
    can, and the signal's weight. ``backward`` takes the gradient of the output, the request's first five fields, the
    statistics, the other fields, gradients of the statistics and the signal's weight, of which it returns a gradient
    too, or an empty tensor.
    """
    fields = len(Request._fields) - 1

    def signal_in(inputs: tuple[Any, ...], place: int) -> Tensor | None:
        return inputs[place] if len(inputs) > place else None  # it may be left out

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, is_causal, scale, window, segment_bounds = inputs[:fields]
        saved = output[1:] if isinstance(output, tuple) else ()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved, segment_bounds, signal_in(inputs, fields + statistics))
        ctx.settings, ctx.others = (is_causal, scale, window), (None,) * (len(inputs) - 4)

    def differentiate(ctx: Any, grad_out: Tensor | None, *grad_saved: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, segment_bounds, signal = ctx.saved_tensors
        if grad_out is None:  # a log-sum alone was asked for
            grad_out = tensors[2].new_zeros(*tensors[3].shape, tensors[2].shape[-1])
        *gradients, grad_signal = backward(grad_out, *tensors, *ctx.settings, segment_bounds, *grad_saved, signal)
        return *gradients, *ctx.others[:-1], None if signal is None else grad_signal

    def fake(grad_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        gradients = [x.new_empty(x.shape) for x in inputs[:4]]
        signal = signal_in(inputs, fields + 2 * statistics)
        return *gradients, inputs[3].new_empty(0 if signal is None else inputs[3].shape)

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


def is_block_mask(mask: object) -> "TypeGuard[BlockMask]":
    """Return whether a mask is one of FlexAttention's. Its module is imported for neither a tensor nor None."""
    if mask is None or isinstance(mask, Tensor):
        return False
    from torch.nn.attention.flex_attention import BlockMask

    return isinstance(mask, BlockMask)


def segment_bounds_from(cu_seqlens: Tensor, n: int) -> Tensor:
    """Return the first key of each query's document and the one past its last, (2, N) int32.

    ``cu_seqlens`` cuts positions 0 … N − 1: whatever its values, the bounds stay between 0 and N.
    """
    ends = cu_seqlens.clamp(0, n).to(torch.int32)
    ends = torch.cat((ends.new_zeros(1), ends, ends.new_full((1,), n)))
    tokens = torch.arange(n, device=ends.device, dtype=torch.int32)
    following = torch.searchsorted(ends, tokens, right=True, out_int32=True)
    return torch.stack((ends[following - 1], ends[following]))


def key_ranges(
    n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first key that position leaves to each query and the one past the last, (N,) int64 each, from 0 to S.

    A query sees nothing if the second is not above the first. ``segment_bounds`` is (2, N), as
    :func:`segment_bounds_from` gives it.
    """
    positions = torch.arange(s - n, s, device=device)
    begin = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    end = (positions + 1).clamp(min=0) if is_causal else torch.full_like(positions, s)
    if segment_bounds is not None:
        begin, end = torch.maximum(begin, segment_bounds[0]), torch.minimum(end, segment_bounds[1])
    return begin, end


def position_mask(
    n: int, s: int, is_causal: bool, window: int | None, segment_bounds: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return the (N, S) boolean mask of causality, window and documents, or None if they hide nothing."""
    causality_hides = is_causal and n > 1  # a single query is the last, and sees all keys
    if not causality_hides and window is None and segment_bounds is None:
        return None
    begin, end = key_ranges(n, s, is_causal, window, segment_bounds, device)
    keys = torch.arange(s, device=device)
    return (begin.unsqueeze(1) <= keys) & (keys < end.unsqueeze(1))


def isolate_nonfinite(attend: Callable[..., Tensor], *, drops_nan: bool = False) -> Callable[..., Tensor]:
    """Wrap ``attend(request, …)`` so that nothing hidden reaches its output or its gradients.

    A BlockMask is left to ``attend`` itself, because it cannot be read without making it as large as N · S. One that
    ``drops_nan`` gives 0 for a query all of whose scores are NaN, so keys and values are checked for it in any case.
    """

    @functools.wraps(attend)
    def attend_isolated(request: Request, *more: Any) -> Tensor:
        addend = None
        if request.attn_mask is None or isinstance(request.attn_mask, Tensor):
            request, addend = confine(request, always=drops_nan)
        out = attend(request, *more)
        return out if addend is None else out + addend.to(out.dtype)

    return attend_isolated


def confine(request: Request, always: bool = False) -> tuple[Request, Tensor | None]:
    """Return the request with zeros in place of keys and values that are not finite, and an addend of its output.

    The addend, (B, H, N, 1), is NaN for the queries that see such a row and 0 for the others. It is None if nothing is
    hidden (unless ``always``), or if a look at the values shows that all are finite.
    """
    hides_by_position = request.window is not None or (request.is_causal and request.n > 1)
    if not (always or hides_by_position or request.attn_mask is not None or request.segment_bounds is not None):
        return request, None
    (k, v), nonfinite = zero_nonfinite_rows(request.k, request.v)
    if nonfinite is None:
        return request, None
    seen = queries_with_visible_keys(nonfinite, request)
    addend = torch.zeros_like(seen, dtype=request.q.dtype).masked_fill(seen, math.nan).unsqueeze(-1)
    return request._replace(k=k, v=v), addend


def zero_nonfinite_rows(k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Zero keys and values of tokens at which one of them is not finite; return these tokens, (B, H_kv, S), too.

    They are None if a look at the values shows that there are none. The rows are always replaced away from the CPU, as
    looking would wait for the device, and in a call that is traced or transformed.
    """
    if k.device.type == "cpu" and is_eager(k, v):
        # No finite number makes up for a NaN or an infinity in a sum. One that overflows is looked into below.
        sums = (x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
        if math.isfinite(sum(float(each) for each in sums)):
            return (k, v), None
    with torch.no_grad():
        largest_k, largest_v = (torch.linalg.vector_norm(x.detach(), math.inf, dim=-1) for x in (k, v))  # NaN stays NaN
        nonfinite = ~largest_k.isfinite().all(2) | ~largest_v.isfinite()
    in_k, in_v = nonfinite.unsqueeze(2).unsqueeze(-1), nonfinite.unsqueeze(-1)
    if is_eager(k, v):  # the copies keep the strides: a matrix product of another layout may round otherwise
        return (k.clone().masked_fill_(in_k, 0.0), v.clone().masked_fill_(in_v, 0.0)), nonfinite
    return (k.masked_fill(in_k, 0.0), v.masked_fill(in_v, 0.0)), nonfinite


def queries_with_visible_keys(keys: Tensor, request: Request) -> Tensor:
    """Return which queries see one of the marked ``keys`` (B, H_kv, S): (B, H, N), boolean."""
    heads_per_key, dtype, attn_mask = request.heads_per_key, request.q.dtype, request.attn_mask
    visible = attn_mask
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        visible = attn_mask != -math.inf
    if visible is not None and visible.shape[2] > 1:
        allowed = request.position_mask()
        visible = visible if allowed is None else visible & allowed
        visible, marks = visible.expand(-1, -1, -1, request.s).to(dtype), keys.to(dtype)
        if visible.shape[1] == 1:  # all heads at once: (B, N, S) · (B, S, H_kv), and nothing that is larger
            counts = (visible[:, 0] @ marks.mT).mT.repeat_interleave(heads_per_key, dim=1)
        else:
            counts = (visible @ marks.repeat_interleave(heads_per_key, dim=1).unsqueeze(-1)).squeeze(-1)
        return counts > 0
    keys = keys.repeat_interleave(heads_per_key, dim=1)
    if visible is not None:
        keys = keys & visible[:, :, 0]
    # What position leaves to a query is a range of keys, in which the marks are counted.
    begin, end = request.key_ranges()
    counts = F.pad(keys.cumsum(-1), (1, 0))
    return counts[..., torch.maximum(begin, end)] > counts[..., begin]
