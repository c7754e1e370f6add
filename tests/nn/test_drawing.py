"""First weights: their distribution, and that no processor draws others."""

import os

import pytest
import torch

import fresh
from diff_transformer.nn.layers import draw_normal

# A matrix, a vector that torch draws without vectors, and λ's, of a layer; all as a model draws them.
DIGEST = """
import hashlib, torch
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
torch.manual_seed(5)
model = DiffTransformerForCausalLM(DiffTransformerConfig(
    vocab_size=61, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, head_dim=12))
model.apply(model._init_weights)
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
print(torch.backends.cpu.get_cpu_capability(), hashlib.sha256(weights).hexdigest())
"""


def draw(capability: str | None) -> tuple[str, str]:
    """The capability that torch finds and the digest of the weights that it draws, told to use ``capability``."""
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    done = fresh.run(DIGEST, environment=environment)
    assert done.returncode == 0, done.stderr
    used, digest = done.stdout.split()
    return used, digest


def test_every_processor_draws_the_same() -> None:
    """This processor and those below it, which torch can pretend to have; told of one above it, torch would crash."""
    capability, digest = draw(None)
    lower = {"AVX512": ("avx2", "default"), "AVX2": ("default",)}.get(capability, ())
    if not lower:
        pytest.skip(f"torch has no capability below {capability}")
    assert {capability: draw(capability) for capability in lower} == {
        capability: (capability.upper(), digest) for capability in lower
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_numbers(dtype: torch.dtype) -> None:
    """Those of one stream in float64, scaled and rounded once; a part at a time, whatever the shape."""
    torch.manual_seed(3)
    weight = draw_normal(torch.nn.Parameter(torch.empty(1050, 1000, dtype=dtype)), 0.1)
    torch.manual_seed(3)
    expected = torch.cat([torch.randn(n, dtype=torch.float64) for n in (1 << 20, 1_050_000 - (1 << 20))]) * 0.1
    assert torch.equal(weight.detach().flatten(), expected.to(dtype))
    assert abs(weight.double().std().item() - 0.1) < 0.005
    assert weight.requires_grad
    assert weight.grad_fn is None


def test_nothing_is_drawn_on_the_meta_device() -> None:
    state = torch.random.get_rng_state()
    with torch.device("meta"):
        draw_normal(torch.nn.Parameter(torch.empty(3, 4)), 0.1)
    assert torch.equal(torch.random.get_rng_state(), state)
