"""Measures gradients by kind of parameter, and compares Equations 7 and 9 with autograd (Appendix G)."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.data.batches import grouped
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.record import Result
from diff_lab.results_files import number_of
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.nn import Attention, DiffAttention, DifferentialAttention, SoftmaxAttention


class HeadWeights(NamedTuple):
    """The matrices of heads of differential attention, or of a Transformer's, two taken as one of width 2d."""

    q1: Tensor  # (…, D, d), as the next three
    k1: Tensor
    q2: Tensor
    k2: Tensor
    v: Tensor  # (…, D, 2d)
    o: Tensor  # (…, 2d, D)


def differential_gradients(
    x: Tensor, weights: HeadWeights, lam: float, output_gradient: Tensor, norm: tuple[Tensor, float] | None = None
) -> HeadWeights:
    """Compute the gradients of heads of causal differential attention (Equation 6) by Equation 7.

    The paper takes the derivative of the headwise norm for 1, and leaves the norm out of W_O's input. So do we without
    `norm`: these are the gradients of a head that has none. With it, its scale (2d,), which is (1 − λ_init) times its
    weight, and its eps, they are exact for a head that has. The input x and ∂L/∂O are (N, D).
    """
    first, second = (_softmax(x @ q, x @ k) for q, k in (weights[0:2], weights[2:4]))
    values = x @ weights.v
    heads = (first - lam * second) @ values
    upstream = output_gradient @ weights.o.mT  # ∂L/∂O (W_O)ᵀ, what the paper calls so
    if norm is not None:
        heads, upstream = _through_norm(heads, upstream, *norm)
    q1, k1 = _through_softmax(x, weights.q1, weights.k1, first, upstream @ values.mT)
    q2, k2 = _through_softmax(x, weights.q2, weights.k2, second, -lam * upstream @ values.mT)
    return HeadWeights(q1, k1, q2, k2, x.T @ (first - lam * second).mT @ upstream, heads.mT @ output_gradient)


def ordinary_gradients(x: Tensor, weights: HeadWeights, output_gradient: Tensor) -> HeadWeights:
    """Compute the gradients of heads of causal softmax attention of width 2d (Equation 8) by Equation 9."""
    queries, keys = (x @ torch.cat(both, dim=-1) for both in (weights[0:3:2], weights[1:4:2]))
    attention, values = _softmax(queries, keys), x @ weights.v
    upstream = output_gradient @ weights.o.mT
    # The logits are divided by the root of 2d, of which each half knows d.
    inner = upstream @ values.mT / math.sqrt(2)
    q1, k1 = _through_softmax(x, weights.q1, weights.k1, attention, inner)
    q2, k2 = _through_softmax(x, weights.q2, weights.k2, attention, inner)
    return HeadWeights(q1, k1, q2, k2, x.T @ attention.mT @ upstream, (attention @ values).mT @ output_gradient)


def _softmax(queries: Tensor, keys: Tensor) -> Tensor:
    scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def _through_softmax(x: Tensor, q: Tensor, k: Tensor, attention: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of W_Q and W_K: with (A ⊙ G) J, J all ones, written as a sum over the row."""
    inner = attention * (upstream - (attention * upstream).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return x.T @ inner @ (x @ k), x.T @ inner.mT @ (x @ q)


def _through_norm(heads: Tensor, upstream: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed heads, and the gradient before the norm."""
    inverse = (heads.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit, scaled = heads * inverse, upstream * scale
    return unit * scale, inverse * (scaled - unit * (unit * scaled).mean(-1, keepdim=True))


def closed_form_error(attention: Attention, x: Tensor) -> float:
    """Compare the closed form with autograd in float64: return the largest error of an entry of a head's gradient,
    relative to the largest entry of that gradient.

    The layer, of the first DIFF (Equation 7, exact if there is a norm) or of the Transformer (Equation 9), attends
    to its input (N, D) causally and without rotary embedding, as in the equations, with a drawn gradient of its output.
    Raises ValueError for another attention, one whose heads share keys and values, or heads that cannot be halved.
    """
    has_halves = attention.head_dim % 2 == 0 and len(attention.state_dict()) == 4  # the matrices, and no norm
    if not isinstance(attention, DiffAttention) and not (isinstance(attention, SoftmaxAttention) and has_halves):
        raise ValueError(
            "Equations 7 and 9 are of DiffAttention, and of SoftmaxAttention with heads of even width and no norm, got "
            f"{type(attention).__name__} with heads of {attention.head_dim}."
        )
    if attention.k_proj.out_features != attention.q_proj.out_features:
        raise ValueError(
            "Equations 7 and 9 are of heads that share no keys and values, got a layer with num_key_value_heads below "
            "num_attention_heads."
        )
    layer, x = deepcopy(attention).requires_grad_().double(), x.detach().double()
    output_gradient = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(x.device)
    # Without what a model wraps around its layers.
    Attention.forward(layer, x.unsqueeze(0), is_causal=True).backward(output_gradient.unsqueeze(0))
    matrices = [getattr(layer, f"{letter}_proj").weight for letter in "qkvo"]
    weights = _heads(layer, *(matrix.detach() for matrix in matrices))
    if isinstance(layer, DiffAttention):
        norm = layer.head_norm
        scale = None if norm is None else (norm.factor * norm.weight.detach(), norm.eps)
        closed = differential_gradients(x, weights, layer.lam().item(), output_gradient, scale)
    else:
        closed = ordinary_gradients(x, weights, output_gradient)
    pairs = zip(closed, _heads(layer, *(matrix.grad for matrix in matrices)), strict=True)
    return max(((ours - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs)


def _heads(layer: Attention, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> HeadWeights:
    """Return the weights of all heads of a layer, or their gradients."""
    # A head of the Transformer has one query; its halves are the equations' two.
    half = layer.head_dim if isinstance(layer, DiffAttention) else layer.head_dim // 2
    (q1, q2), (k1, k2) = (matrix.unflatten(0, (-1, 2, half)).mT.unbind(1) for matrix in (q, k))
    return HeadWeights(q1, k1, q2, k2, v.unflatten(0, (-1, 2 * half)).mT, o.T.unflatten(0, (-1, 2 * half)))


ERROR = "closed_form/error"


class ClosedForms(Measurement):
    """The largest error of Equation 7 or 9 against autograd in any layer, on one validation sequence (Appendix G)."""

    any_model = False

    def run(self, measured: EvalInput) -> list[Result]:
        tokens = next(iter(measured.data.validation_batches()))["input_ids"][:1].to(measured.model.device)
        with torch.no_grad():
            states = measured.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
            inputs = zip(measured.model.model.layers, states, strict=False)  # the last state leaves the model
            layers = [(layer.self_attn, layer.input_layernorm(state)[0]) for layer, state in inputs]
        largest = max(closed_form_error(attention, x) for attention, x in layers)
        return [measured.record(ERROR, largest, better="lower")]


SEQUENCES = 16
METHOD = "root mean square over the entries of ∂(mean loss)/∂W, all layers together"
# Which part of a name tells the kind; the first that fits.
_KINDS = {
    "q": ("q_proj",),
    "k": ("k_proj",),
    "v": ("v_proj",),
    "o": ("o_proj",),
    "lambda": ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"),  # DiffLlama's; ours are in their descriptions
    "head norm": ("head_norm",),
    "mlp": ("mlp",),
    "norm": ("norm", "input_layernorm", "post_attention_layernorm"),
    "embedding": ("embed_tokens",),
    "output": ("lm_head",),
}


def gradient_magnitudes(model: Any, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure the gradient of the loss for each kind of parameter: its root mean square over all layers.

    The kinds are "q", "k", "v", "o", "mlp", "norm", "embedding", "output" and, if there are such, "lambda", "head norm"
    and "other"; in our differential models also either half of the queries and keys: "q1", "q2", "k1", "k2". The model
    has Llama's names; ours, Llama and DiffLlama do. Its own ``grad`` are left alone. Raises ValueError if no parameter
    takes a gradient.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    if not parameters:
        raise ValueError(f"no parameter of this {type(model).__name__} takes a gradient.")
    device = next(iter(parameters.values())).device
    # Before torch 2.11, weights that autocast has cast without gradients, for a validation, would lead to none here.
    torch.clear_autocast_cache()
    with torch.enable_grad():
        loss = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False).loss
        gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    by_kind: dict[str, list[Tensor]] = {}
    lambdas = {module for described in ATTENTION_TYPES.values() for module in described.lambda_modules}
    for name, gradient in gradients.items():
        parts = name.split(".")
        kind = next((kind for kind, words in _KINDS.items() if any(word in parts for word in words)), "other")
        by_kind.setdefault("lambda" if lambdas.intersection(parts) else kind, []).append(gradient)
    for name, half, gradient in _halves(model, gradients):
        by_kind.setdefault(f"{name}{half}", []).append(gradient)
    magnitudes = {}
    for kind, tensors in by_kind.items():
        widest = torch.promote_types(tensors[0].dtype, torch.float32)
        squares = sum(float(torch.linalg.vector_norm(x, dtype=widest)) ** 2 for x in tensors)
        magnitudes[kind] = math.sqrt(squares / sum(x.numel() for x in tensors))
    return magnitudes


def gradient_callback(batches: Batches, sequences: int = SEQUENCES) -> Callable[[Any, int], dict[str, float]]:
    """Make the callback of training that logs "gradient/q" and so on: a function of the model and the step."""
    batch = _first(batches, sequences)
    return lambda model, _: {f"gradient/{kind}": value for kind, value in gradient_magnitudes(model, batch).items()}


class Gradients(Measurement):
    """The size of the loss' gradient by kind of parameter (Appendix G): records "gradient/q" and so on."""

    sequences: Count = Field(default=SEQUENCES, description="validation sequences")

    def run(self, measured: EvalInput) -> list[Result]:
        batch = _first(measured.data, self.sequences)
        fields: dict[str, Any] = {"n": len(batch["input_ids"]), "method": METHOD}
        magnitudes = gradient_magnitudes(measured.model, batch)
        return [measured.record(f"gradient/{kind}", value, **fields) for kind, value in magnitudes.items()]


class GradientsInTraining(Gradients):
    """The same of an experiment's run, before training and in it, as `gradient_callback` has logged it."""

    needs = "training"

    def run(self, measured: EvalInput) -> list[Result]:
        training = measured.training
        assert training is not None  # needs
        untrained = super().run(replace(measured, model=training.untrained()))
        return [replace(record, coordinates=Coordinates(step=0)) for record in untrained] + [
            measured.record(name, number_of(value), coordinates=Coordinates(step=line["step"]))
            for line in training.metrics
            for name, value in line.items()
            if name.startswith("gradient/")
        ]


def _first(batches: Batches, sequences: int) -> dict[str, Tensor]:
    rows = next(grouped(batches.validation_batches(), lambda batch: len(batch["input_ids"]), sequences))
    return {name: torch.cat([part[name] for part in rows])[:sequences] for name in rows[0]}


def _halves(model: nn.Module, gradients: Mapping[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    """Yield the rows of W_Q and W_K that make the first map's queries and keys, and the second's."""
    for name, module in model.named_modules():
        if not isinstance(module, DifferentialAttention):
            continue
        for letter in "qk" if module.pairs_kv_heads else "q":
            gradient = gradients.get(f"{name}.{letter}_proj.weight")
            if gradient is not None:
                first = module.ratio if letter == "q" else 1
                groups = gradient.unflatten(0, (-1, first + 1, module.head_dim))
                yield letter, 1, groups[:, :first]
                yield letter, 2, groups[:, first:]
