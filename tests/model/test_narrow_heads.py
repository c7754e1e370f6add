"""The Transformer's narrow heads in training on a CPU: the kernel runs, and agrees with torch's attention."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.ops.cpu.cpu_backend import is_faster, reason_against_cpu_kernel

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(not is_faster() or reason_against_cpu_kernel() is not None, reason="needs the kernel"),
]

N = 70
ENDS = torch.tensor([0, 5, 6, 30, 2 * N])


def padding() -> Tensor:
    mask = torch.ones(2, N, dtype=torch.long)
    mask[0, :9] = 0
    return mask


INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"attention_mask": padding()},
    "documents": {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS},
}
CONFIGS: dict[str, dict[str, Any]] = {"all tokens": {}, "window": {"sliding_window": 7}}


def answers(model: DiffTransformerForCausalLM, tokens: Tensor, mask: Tensor | None, **more: Any) -> dict[str, Tensor]:
    """Logits, 0 at padding, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(tokens, attention_mask=mask, use_cache=False, **more).logits
    seen = torch.ones_like(tokens) if mask is None else mask
    logits = logits * seen[..., None]
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("inputs", INPUTS)
def test_training_agrees_with_torchs_attention(inputs: str, config: str, make: Any, ran: Counter[str]) -> None:
    tokens, more = torch.randint(1, 29, (2, N)), dict(INPUTS[inputs])
    if inputs == "documents":
        tokens = tokens.view(1, -1)
    mask = more.pop("attention_mask", None)
    settings: dict[str, Any] = {"max_position_embeddings": 2 * N, **CONFIGS[config]}
    model = make("softmax", torch.float32, **settings).train()
    assert model.config.head_dim <= 8
    computed = answers(model, tokens, mask, **more)
    assert ran == {"cpu": 2}
    ran.clear()
    truth = answers(make("softmax", torch.float64, **settings).train(), tokens, mask, **more)
    assert ran["cpu"] == 0
    assert ran["torch"] >= 2
    assert computed.keys() == truth.keys()
    for name, value in truth.items():
        assert value.any(), name
        limit = 1e-3 * value.abs().max().item()
        torch.testing.assert_close(
            computed[name].double(), value, rtol=0, atol=limit, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_without_a_gradient_torchs_attention_runs(make: Any, ran: Counter[str]) -> None:
    model = make("softmax", torch.float32, max_position_embeddings=N)
    with torch.no_grad():
        model(torch.randint(1, 29, (2, N)), use_cache=False)
    assert ran == {"torch": 2}


@pytest.mark.parametrize("implementation", ["sdpa", "diff_attention_cpu"])
def test_an_implementation_asked_for_by_name_is_left_alone(implementation: str, make: Any, ran: Counter[str]) -> None:
    model = make("softmax", torch.float32, max_position_embeddings=N, attn_implementation=implementation)
    model(torch.randint(1, 29, (2, N)), use_cache=False).logits.sum().backward()
    assert ran == {"torch": 2}
