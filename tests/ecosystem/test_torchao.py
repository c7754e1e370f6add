"""Weights in int8 by torchao: the model generates, and what makes λ and the norms is left alone."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from byte_models import make, tokens
from diff_transformer import DiffTransformerForCausalLM
from tiny_model import PAIRED
from tiny_model import check_rounding as check

Int8WeightOnlyConfig = pytest.importorskip(
    "torchao.quantization", reason="torchao is in the environment of `make test-titan`"
).Int8WeightOnlyConfig


def rounded(model: DiffTransformerForCausalLM, int8: Any) -> DiffTransformerForCausalLM:
    """The float model with the weights that `int8` stands for, after a check that they are its own, rounded."""
    model = copy.deepcopy(model)
    for name in quantised(int8):
        weight, held = model.get_parameter(f"{name}.weight"), int8.get_parameter(f"{name}.weight").data
        meant = held.qdata.float() * held.scale
        step = weight.abs().amax(1, keepdim=True) / 127.5
        assert ((weight - meant).abs() <= 0.502 * step).all(), name  # the steps are rounded too
        weight.data.copy_(meant)
    return model


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))


def quantised(model: nn.Module) -> set[str]:
    """The layers whose weights torchao holds: they look like the dtype they were in, and store one byte an entry."""
    names = set()
    for name, module in linear_layers(model):
        if type(module.weight.data) is not Tensor:
            assert module.weight.qdata.dtype == torch.int8
            names.add(name)
    return names


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    config = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_in_int8(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Which is a rounding of the weights, and nothing else."""
    model = make(kind).to(dtype).eval()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, dtype)
    assert type(loaded) is DiffTransformerForCausalLM
    assert quantised(loaded) == {name for name, _ in linear_layers(model)} - {"lm_head"}
    others = {name: parameter for name, parameter in model.named_parameters() if name[:-7] not in quantised(loaded)}
    assert any("norm" in name for name in others)
    assert any(".lam." in name for name in others) == (kind in PAIRED)
    for name, parameter in others.items():
        assert torch.equal(loaded.get_parameter(name), parameter), name
        assert loaded.get_parameter(name).dtype == (torch.float32 if ".lam." in name else dtype), name
    assert loaded.lambdas() == model.lambdas()
    inputs = tokens()
    if dtype == torch.float32:
        with torch.no_grad():
            answer, plain, expected = (each(inputs).logits for each in (loaded, model, rounded(model, loaded)))
        check(answer, expected)
        assert not torch.equal(answer, plain)
    written = loaded.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=5, do_sample=False)
    assert written.shape == (2, 14)
