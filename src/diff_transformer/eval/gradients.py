"""Gradients by kind of parameter, of either twin (Appendix G): by a backward pass, and in closed form for one head."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diff_transformer.data import Batches
from diff_transformer.nn import DifferentialAttention
from diff_transformer.results import Result

SEQUENCES = 16
METHOD = "root mean square over the entries of ∂(mean loss)/∂W, all layers together"
# Which part of a name tells the kind; the first that fits.
_KINDS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "lambda": ("lam", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_proj"),
    "head norm": ("head_norm",),
    "mlp": ("mlp",),
    "norm": ("norm", "input_layernorm", "post_attention_layernorm"),
    "embedding": ("embed_tokens",),
    "output": ("lm_head",),
}


def gradient_magnitudes(model: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """How large the gradient of the loss is for each kind of parameter. The model's own ``grad`` are left alone.

    Args:
        model: a causal language model of transformers with Llama's names; ours, Llama and DiffLlama have them.
        batch: `input_ids`, `labels` and whatever else it is called with.

    Returns:
        The root mean square over all entries of all layers for "q", "k", "v", "o", "mlp", "norm", "embedding", "output"
        and, where there are such, "lambda", "head norm" and "other". In our differential models also for either half of
        the queries and keys: "q1", "q2", "k1", "k2".

    Raises:
        ValueError: no parameter takes a gradient.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise ValueError(f"no parameter of this {type(model).__name__} takes a gradient.")
    device = next(iter(parameters.values())).device
    with torch.enable_grad():
        loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
        found = torch.autograd.grad(loss, list(parameters.values()))
    gradients = dict(zip(parameters, found, strict=True))
    by_kind: dict[str, list[Tensor]] = {}
    for name, gradient in gradients.items():
        by_kind.setdefault(_kind(name), []).append(gradient)
    for name, half, gradient in _halves(model, gradients):
        by_kind.setdefault(f"{name}{half}", []).append(gradient)
    return {kind: _root_mean_square(tensors) for kind, tensors in by_kind.items()}


def gradient_records(
    model: Any, batches: Batches, arm: str, *, sequences: int = SEQUENCES, group: str | None = None
) -> list[Result]:
    """:func:`gradient_magnitudes` on the first validation sequences, as "gradient/q" and so on."""
    batch = _first(batches, sequences)
    return [
        Result(name=f"gradient/{kind}", arm=arm, value=value, n=len(batch["input_ids"]), group=group, method=METHOD)
        for kind, value in gradient_magnitudes(model, batch).items()
    ]


def gradient_callback(batches: Batches, sequences: int = SEQUENCES) -> Callable[[Any, int], dict[str, float]]:
    """The same for training to log, as "gradient/q" and so on: a function of the model and the step."""
    batch = _first(batches, sequences)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        return {f"gradient/{kind}": value for kind, value in gradient_magnitudes(model, batch).items()}

    return on_evaluate


def _first(batches: Batches, sequences: int) -> dict[str, Tensor]:
    if sequences < 1:
        raise ValueError(f"sequences must be 1 or more, got {sequences}.")
    rows: list[dict[str, Tensor]] = []
    for batch in batches.validation_batches():
        rows.append(batch)
        if sum(len(part["input_ids"]) for part in rows) >= sequences:
            break
    return {name: torch.cat([part[name] for part in rows])[:sequences] for name in rows[0]}


def _kind(name: str) -> str:
    parts = name.split(".")
    return next((kind for kind, words in _KINDS.items() if any(word in parts for word in words)), "other")


def _halves(model: nn.Module, gradients: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """The rows of W_Q and W_K that make the first map's queries and keys, and the second's."""
    for name, module in model.named_modules():
        if not isinstance(module, DifferentialAttention):
            continue
        for letter in "qk" if module.pairs_kv_heads else "q":
            gradient = gradients.get(f"{name}.{letter}_proj.weight")
            if gradient is not None:
                pairs = gradient.unflatten(0, (-1, 2, module.head_dim))
                yield letter, 1, pairs[:, 0]
                yield letter, 2, pairs[:, 1]


def _root_mean_square(tensors: list[Tensor]) -> float:
    widest = torch.promote_types(tensors[0].dtype, torch.float32)
    squares = sum(float(torch.linalg.vector_norm(x, dtype=widest)) ** 2 for x in tensors)
    return math.sqrt(squares / sum(x.numel() for x in tensors))


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
    x: Tensor, weights: HeadWeights, lam: float, output_gradient: Tensor, norm: tuple[float, float] | None = None
) -> HeadWeights:
    """Equation 7: the gradients of one head of causal differential attention (Equation 6).

    The paper takes the derivative of the headwise norm for 1, and leaves the norm out of what W_O sees. So do we
    without `norm`: these are the gradients of a head that has none. With it they are exact for a head that has.

    Args:
        x: (N, D), the input.
        weights: of the head.
        lam: λ.
        output_gradient: (N, D), ∂L/∂O.
        norm: the norm's factor γ = 1 − λ_init, and its eps.
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


def _through_norm(heads: Tensor, upstream: Tensor, factor: float, eps: float) -> tuple[Tensor, Tensor]:
    """The normed heads, and the gradient before the norm."""
    inverse = (heads.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = heads * inverse
    before = factor * inverse * (upstream - unit * (unit * upstream).mean(-1, keepdim=True))
    return factor * unit, before
