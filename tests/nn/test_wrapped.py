"""Wrappers in the place of a submodule, which have its call and none of its attributes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diff_transformer.nn import Attention
from sharp_layers import build, inputs

OPTIONS = {"qk_norm": True, "output_gate": True}


class Bent(nn.Module):
    """What it wraps, and a curve behind it, so that a wrapper that is passed by shows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return bend(self.inner(*args, **kwargs))


def bend(x: Tensor) -> Tensor:
    return x + torch.tanh(x + 1)


def layers(kind: str, build: Any) -> list[tuple[Attention, str]]:
    """A fresh layer for each of its submodules that has an input, with the name."""
    module = build(kind, **OPTIONS)
    names = [name for name, child in module.named_children() if name != "lam"]
    norms = {"q_a_layernorm", "kv_a_layernorm"} if kind == "gdla" else {"q_norm", "k_norm"}
    assert {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", *norms} <= set(names)
    return [(copy.deepcopy(module), name) for name in names]


def test_a_wrapper_of_each(kind: str) -> None:
    x = inputs()
    for module, name in layers(kind, build):
        wrapped = copy.deepcopy(module)
        setattr(wrapped, name, nn.Sequential(getattr(wrapped, name)))
        torch.testing.assert_close(wrapped(x, is_causal=True), module(x, is_causal=True), rtol=1e-12, atol=1e-12)
        setattr(wrapped, name, Bent(getattr(wrapped, name)))
        if name != "head_norm":  # which the operator applies itself: below
            getattr(module, name).register_forward_hook(lambda _, args, out: bend(out))
            torch.testing.assert_close(wrapped(x, is_causal=True), module(x, is_causal=True), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["diff", "diff_grouped"])
def test_a_wrapper_of_the_headwise_norm_sees_the_heads(kind: str) -> None:
    module, x = build(kind), inputs()
    bare = copy.deepcopy(module)
    bare.head_norm, bare.o_proj = None, nn.Identity()
    heads = bare(x).unflatten(-1, (-1, 2 * module.head_dim))
    expected = module.o_proj(bend(module.head_norm(heads)).flatten(-2))
    assert not torch.allclose(module(x), expected)
    module.head_norm = Bent(module.head_norm)
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)
