"""torch.compile(fullgraph=True) of the model, forward and backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from full_run import short_run
from tiny_model import KINDS

each_kind = pytest.mark.parametrize("kind", short_run(KINDS, ["diff"]))


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# "aot_eager" traces the whole forward and backward into one graph each, through the operator's fake implementation,
# and runs them without making machine code, which takes a minute. The operator itself is compiled in tests/ops.
@each_kind
def test_forward_and_backward(kind: str, make: Any, tokens: Any, check: Any) -> None:
    model, inputs = make(kind, num_hidden_layers=1), tokens()
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for options in ({}, {"attention_mask": mask}):
        model.zero_grad()
        expected = model(inputs, labels=inputs, use_cache=False, **options)
        expected.loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        out = compiled(inputs, labels=inputs, use_cache=False, **options)
        out.loss.backward()
        check(out.logits, expected.logits)
        for name, parameter in model.named_parameters():
            check(parameter.grad, gradients[name], least=0.1, dtype=torch.float32)  # the loss upcasts to float32


@pytest.mark.parametrize("implementation", short_run(["diff_attention", "sdpa"], ["diff_attention"]))
def test_decoding_into_a_static_cache(kind: str, implementation: str, make: Any, tokens: Any, check: Any) -> None:
    """One graph for all tokens: nothing is compiled anew as the cache fills up, nor for another prompt."""
    model = make(kind, torch.float32, num_hidden_layers=1, attn_implementation=implementation)
    inputs = tokens(length=12)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        for prompt in (inputs, inputs.flip(1)):
            expected = model(prompt, use_cache=False).logits
            cache.reset()
            model(prompt[:, :4], past_key_values=cache)
            for i in range(4, 12):
                stance = "default" if prompt is inputs and i == 4 else "fail_on_recompile"
                with torch.compiler.set_stance(stance):
                    logits = compiled(
                        prompt[:, i : i + 1], position_ids=torch.full((1, 1), i), past_key_values=cache
                    ).logits
                check(logits[:, 0], expected[:, i])
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@each_kind
def test_generate_compiles_one_step(kind: str, make: Any, tokens: Any) -> None:
    """As ``generate`` does on a GPU by itself: the same text, one graph, also for a second and shorter text."""
    model, inputs = make(kind, num_hidden_layers=1), tokens(batch=3)
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager", mode=None)
    config._compile_all_devices = True  # transformers compiles for GPUs alone unless told so
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    static = {"cache_implementation": "static", "compile_config": config}
    expected = model.generate(inputs, **settings)
    assert torch.equal(model.generate(inputs, **settings, **static), expected)
    assert hasattr(model, "_compiled_call")
    assert counters["stats"]["unique_graphs"] == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        again = model.generate(inputs, **settings | {"max_new_tokens": 4}, **static)
    assert torch.equal(again, expected[:, : again.shape[1]])
    assert counters["stats"]["unique_graphs"] == 1
