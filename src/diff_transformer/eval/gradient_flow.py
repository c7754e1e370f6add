"""Equations 7 and 9: the gradients of one attention head in closed form, and how far autograd is from them."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diff_transformer.nn import Attention, DiffAttention, SoftmaxAttention


class HeadWeights(NamedTuple):
    """The matrices of one head of differential attention, or of the twin's two heads taken as one of width 2d.

    Attributes:
        q1, k1, q2, k2: (D, d).
        v: (D, 2d).
        o: (2d, D).
    """

    q1: Tensor
    k1: Tensor
    q2: Tensor
    k2: Tensor
    v: Tensor
    o: Tensor


def differential_gradients(
    x: Tensor, weights: HeadWeights, lam: float, output_gradient: Tensor, norm: tuple[Tensor, float] | None = None
) -> HeadWeights:
    """Equation 7: the gradients of one head of causal differential attention (Equation 6).

    The paper takes the derivative of the headwise norm for 1, and leaves the norm out of what W_O sees. So do we
    without `norm`: these are the gradients of a head that has none. With it they are exact for a head that has.

    Args:
        x: (N, D), the input.
        weights: of the head.
        lam: λ.
        output_gradient: (N, D), ∂L/∂O.
        norm: its scale (2d,), which is (1 − λ_init) times its weight, and its eps.
    """
    width = weights.q1.shape[1]
    first, second = (_softmax(x @ q, x @ k, width) for q, k in (weights[0:2], weights[2:4]))
    values = x @ weights.v
    heads = (first - lam * second) @ values
    upstream = output_gradient @ weights.o.T  # ∂L/∂O (W_O)ᵀ, what the paper calls so
    if norm is not None:
        heads, upstream = _through_norm(heads, upstream, *norm)
    q1, k1 = _through_softmax(x, weights.q1, weights.k1, first, upstream @ values.T, width)
    q2, k2 = _through_softmax(x, weights.q2, weights.k2, second, -lam * upstream @ values.T, width)
    return HeadWeights(q1, k1, q2, k2, x.T @ (first - lam * second).T @ upstream, heads.T @ output_gradient)


def ordinary_gradients(x: Tensor, weights: HeadWeights, output_gradient: Tensor) -> HeadWeights:
    """Equation 9: the gradients of one head of causal softmax attention of width 2d (Equation 8).

    Args: as :func:`differential_gradients`.
    """
    width = 2 * weights.q1.shape[1]
    queries, keys = (x @ torch.cat(both, dim=1) for both in ((weights.q1, weights.q2), (weights.k1, weights.k2)))
    attention, values = _softmax(queries, keys, width), x @ weights.v
    upstream = output_gradient @ weights.o.T
    q1, k1 = _through_softmax(x, weights.q1, weights.k1, attention, upstream @ values.T, width)
    q2, k2 = _through_softmax(x, weights.q2, weights.k2, attention, upstream @ values.T, width)
    return HeadWeights(q1, k1, q2, k2, x.T @ attention.T @ upstream, (attention @ values).T @ output_gradient)


def _softmax(queries: Tensor, keys: Tensor, width: int) -> Tensor:
    hidden = torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device).triu(1)
    return (queries @ keys.T / math.sqrt(width)).masked_fill(hidden, -torch.inf).softmax(-1)


def _through_softmax(
    x: Tensor, q: Tensor, k: Tensor, attention: Tensor, upstream: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The gradients of W_Q and W_K: with (A ⊙ G) J, J all ones, written as a sum over the row."""
    inner = attention * (upstream - (attention * upstream).sum(-1, keepdim=True)) / math.sqrt(width)
    return x.T @ inner @ (x @ k), x.T @ inner.T @ (x @ q)


def _through_norm(heads: Tensor, upstream: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normed heads, and the gradient before the norm."""
    inverse = (heads.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, scaled = heads * inverse, upstream * scale
    return unit * scale, inverse * (scaled - unit * (unit * scaled).mean(-1, keepdim=True))


def closed_form_error(attention: Attention, x: Tensor) -> float:
    """How far the closed form is from autograd in float64, for all heads of a layer.

    The layer attends causally and without rotary embedding, as in the equations, to a drawn gradient of its output.

    Args:
        attention: a layer of the first DIFF (Equation 7, exact where there is a norm) or of the twin (Equation 9).
        x: (N, D), its input.

    Returns:
        The largest error of any entry of a gradient, relative to that gradient's largest entry.

    Raises:
        ValueError: another attention, one whose heads share keys and values, or heads that cannot be halved.
    """
    layer, x = _in_float64(attention), x.detach().double()
    drawn = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    output_gradient = drawn.to(x.device)
    layer(x.unsqueeze(0), is_causal=True).backward(output_gradient.unsqueeze(0))
    matrices = [getattr(layer, f"{letter}_proj").weight for letter in "qkvo"]
    with torch.no_grad():
        closed = [_closed_form(layer, x, weights, output_gradient) for weights in _heads(layer, *matrices)]
    expected = _heads(layer, *(matrix.grad for matrix in matrices))
    errors = []
    for name in HeadWeights._fields:
        ours, theirs = (torch.stack([getattr(head, name) for head in heads]) for heads in (closed, expected))
        errors.append(((ours - theirs).abs().max() / theirs.abs().max()).item())
    return max(errors)


def _closed_form(layer: Attention, x: Tensor, weights: HeadWeights, output_gradient: Tensor) -> HeadWeights:
    if not isinstance(layer, DiffAttention):
        return ordinary_gradients(x, weights, output_gradient)
    norm = None
    if layer.head_norm is not None:
        norm = (layer.head_norm.factor * layer.head_norm.weight, layer.head_norm.eps)
    return differential_gradients(x, weights, layer.lam().item(), output_gradient, norm)


def _in_float64(attention: Attention) -> Attention:
    """A layer of its own with the same weights, without what a model wraps around it."""
    heads, hidden = attention.q_proj.out_features // attention.head_dim, attention.q_proj.in_features
    sizes: dict[str, Any] = {"head_dim": attention.head_dim}
    number = attention.layer_idx + 1
    layer: Attention
    if isinstance(attention, DiffAttention):
        norm = attention.head_norm
        sizes |= {"lambda_init": attention.lam.lambda_init, "headwise_norm": norm is not None}
        layer = DiffAttention(hidden, heads, number, norm_eps=1e-5 if norm is None else norm.eps, **sizes)
    elif isinstance(attention, SoftmaxAttention) and attention.head_dim % 2 == 0 and attention.head_norm is None:
        layer = SoftmaxAttention(hidden, heads, number, **sizes)
    else:
        raise ValueError(
            "Equations 7 and 9 are of DiffAttention, and of SoftmaxAttention with heads of even width and no norm, got "
            f"{type(attention).__name__} with heads of {attention.head_dim}."
        )
    if attention.k_proj.out_features != attention.q_proj.out_features:
        raise ValueError("Equations 7 and 9 are of heads with keys and values of their own, and here several share.")
    layer.load_state_dict(attention.state_dict())
    return layer.to(attention.q_proj.weight.device).double()


def _heads(layer: Attention, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> list[HeadWeights]:
    """Weights of a layer, or their gradients, by head."""
    # A head of the twin has one query; its halves are the equations' two.
    half = layer.head_dim if isinstance(layer, DiffAttention) else layer.head_dim // 2
    (q1, q2), (k1, k2) = (matrix.unflatten(0, (-1, 2, half)).unbind(1) for matrix in (q, k))
    values, outputs = v.unflatten(0, (-1, 2 * half)), o.T.unflatten(0, (-1, 2 * half))
    parts = zip(q1, k1, q2, k2, values, outputs, strict=True)
    return [HeadWeights(a.T, b.T, c.T, d.T, value.T, output) for a, b, c, d, value, output in parts]
