"""Training settings do what they say."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from diff_lab.train import read_metrics, train
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.nn import SwiGLU
from small_runs import small_recipe, weights

LAYERS = 3
recipe = partial(small_recipe, model={"num_hidden_layers": LAYERS}, steps=3, warmup_steps=1)


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 1), (True, 2)])
def test_gradient_checkpointing_computes_each_layer_twice(tmp_path: Path, checkpointing: bool, times: int) -> None:
    calls = []

    def count(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, SwiGLU):  # one in each layer; hooks of a layer itself may lie outside what is recomputed
            calls.append(id(module))

    with register_module_forward_pre_hook(count):
        settings = {"gradient_checkpointing": checkpointing, "accumulation": 2, "precision": "bf16"}
        run = train(recipe(steps=2, inspect_every=None, **settings), tmp_path / "run")
    assert len(set(calls)) == LAYERS
    assert [calls.count(layer) for layer in set(calls)] == [2 * 2 * times] * LAYERS
    assert all(tensor.dtype == torch.float32 for tensor in weights(run.model_folder).values())


def test_precision_is_that_of_the_matrix_products(tmp_path: Path) -> None:
    losses, dtypes = {}, {}
    for precision in ("no", "bf16"):
        seen: set[torch.dtype] = set()

        def note(module: nn.Module, inputs: Any, output: Any, seen: set[torch.dtype] = seen) -> None:
            if isinstance(module, nn.Linear):
                seen.add(output.dtype)

        with register_module_forward_hook(note):
            losses[precision] = train(recipe(steps=1, precision=precision), tmp_path / precision).last["loss"]
        dtypes[precision] = seen
    assert dtypes == {"no": {torch.float32}, "bf16": {torch.bfloat16}}
    assert losses["bf16"] != losses["no"]
    assert losses["bf16"] == pytest.approx(losses["no"], rel=1e-2)


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_gradients_are_clipped_and_their_norm_is_logged_unclipped(tmp_path: Path, limit: float | None) -> None:
    applied = []

    def measure(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        applied.append(float(nn.utils.get_total_norm([parameter.grad for parameter in parameters])))

    with register_optimizer_step_pre_hook(measure):
        train(recipe(max_grad_norm=limit), tmp_path / "run")
    logged = [line["grad_norm"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(logged) == 3
    assert min(logged) > 1e-2
    assert applied == pytest.approx(logged if limit is None else [limit] * 3, rel=1e-3)


def test_a_step_after_an_evaluation_trains(tmp_path: Path) -> None:
    modes = []

    def note(module: nn.Module, inputs: Any) -> None:
        if isinstance(module, DiffTransformerForCausalLM):
            modes.append((torch.is_grad_enabled(), {part.training for part in module.modules()}))

    def evaluate(model: Any, step: int) -> dict[str, float]:
        model(torch.zeros(1, 4, dtype=torch.long))
        return {}

    with register_module_forward_pre_hook(note):
        train(recipe(evaluate_every=1, inspect_every=None), tmp_path / "run", on_evaluate=evaluate)
    assert modes == [(True, {True}), (False, {False})] * 3
