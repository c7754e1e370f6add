"""The size of gradients by kind of parameter, of either twin (Appendix G)."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.data import Batches
from diff_transformer.eval.measures import Measure, Subject
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
    model: Any,
    batches: Batches,
    arm: str,
    *,
    sequences: int = SEQUENCES,
    seed: int | None = None,
    group: str | None = None,
) -> list[Result]:
    """:func:`gradient_magnitudes` on the first validation sequences, as "gradient/q" and so on.

    Args:
        model: as there.
        batches: the data.
        sequences: how many.
        arm, seed, group: for the records.
    """
    batch = _first(batches, sequences)
    shared: dict[str, Any] = {"arm": arm, "seed": seed, "group": group, "n": len(batch["input_ids"]), "method": METHOD}
    found = gradient_magnitudes(model, batch)
    return [Result(name=f"gradient/{kind}", value=value, **shared) for kind, value in found.items()]


def gradient_callback(batches: Batches, sequences: int = SEQUENCES) -> Callable[[Any, int], dict[str, float]]:
    """The same for training to log, as "gradient/q" and so on: a function of the model and the step."""
    batch = _first(batches, sequences)

    def on_evaluate(model: Any, step: int) -> dict[str, float]:
        return {f"gradient/{kind}": value for kind, value in gradient_magnitudes(model, batch).items()}

    return on_evaluate


def _measure(subject: Subject) -> list[Result]:
    assert subject.batches is not None  # needs="recipe"
    return gradient_records(subject.model, subject.batches, subject.arm, seed=subject.seed, **subject.options)


GRADIENTS = Measure(
    shows="the size of the loss' gradient by kind of parameter (Appendix G)",
    measure=_measure,
    needs="recipe",
    any_model=True,
    options={"sequences": SEQUENCES},
)


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
