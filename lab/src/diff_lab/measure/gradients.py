"""Measures gradients by kind of parameter (Appendix G)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from diff_lab.coordinates import Coordinates
from diff_lab.data import Batches
from diff_lab.data.batches import grouped
from diff_lab.measure.measurement import Count, EvalInput, Measurement
from diff_lab.record import Result
from diff_lab.results_files import number_of
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.nn import DifferentialAttention

SEQUENCES = 16
METHOD = "root mean square over the entries of ∂(mean loss)/∂W, all layers together"
_KINDS = {  # by a part of a name; the first that fits
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

    The kinds are those of `_KINDS` and, if there are such, "other"; in our differential models also either half of the
    queries and keys: "q1", "q2", "k1", "k2". The model has Llama's names. Its own ``grad`` are left alone.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
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
    # The rows of W_Q and W_K that make the first map's queries and keys, and the second's.
    for name, module in model.named_modules():
        if not isinstance(module, DifferentialAttention):
            continue
        for letter, first in (("q", module.ratio), ("k", 1)) if module.pairs_kv_heads else (("q", module.ratio),):
            if (gradient := gradients.get(f"{name}.{letter}_proj.weight")) is not None:
                groups = gradient.unflatten(0, (-1, first + 1, module.head_dim))
                by_kind.setdefault(f"{letter}1", []).append(groups[:, :first])
                by_kind.setdefault(f"{letter}2", []).append(groups[:, first:])
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
