"""NaN in the keys and values of padding, and in the free slots of a cache: nothing that may be seen changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

from diff_transformer.ops.triton.triton_backend import interpreted
from full_run import short_run
from tiny_model import DIFFERENTIAL, make, tokens

# What triton's interpreter has numpy compute of them.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

BACKENDS = ("reference", "blockwise", "sdpa", "cpu", *(("triton",) if interpreted() else ()))


@contextmanager
def memory(model: nn.Module, mask: Tensor, value: float) -> Iterator[None]:
    """All keys and values at padding, where ``mask`` (B, N) is 0, become ``value``."""

    def overwrite(_module: nn.Module, _inputs: Any, projected: Tensor) -> Tensor:
        return projected.masked_fill(mask.unsqueeze(-1) == 0, value)

    projections = [module for name, module in model.named_modules() if name.endswith(("k_proj", "v_proj", "kv_a_proj"))]
    if len(projections) > 4:  # of latents, of which keys and values are made
        projections = [module for name, module in model.named_modules() if name.endswith("kv_a_proj")]
    assert len(projections) in (2, 4)
    handles = [projection.register_forward_hook(overwrite) for projection in projections]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("backend", short_run(BACKENDS, set(BACKENDS) - {"triton"}))
@pytest.mark.parametrize("kind", DIFFERENTIAL)
def test_free_slots_of_a_static_cache(kind: str, backend: str) -> None:
    """Prompt and two more tokens, the first row padded on the left."""
    model, inputs = make(kind, torch.float32, attn_implementation=f"diff_attention_{backend}"), tokens()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    answers = []
    for value in (0.0, float("nan"), float("inf")):
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(inputs[:, :1], past_key_values=cache)  # it takes its shape
        for layer in cache.layers:
            layer.reset()
            layer.keys.fill_(value)
            layer.values.fill_(value)
        with torch.no_grad(), memory(model, mask[:, :7], value):
            prompt = model(inputs[:, :7], attention_mask=mask[:, :7], past_key_values=cache)
        logits = [prompt.logits[mask[:, :7] > 0]]
        for at in (7, 8):
            with torch.no_grad():
                step = model(inputs[:, at : at + 1], attention_mask=mask[:, : at + 1], past_key_values=cache)
            logits.append(step.logits.flatten(0, 1))
        answers.append(torch.cat(logits))
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
