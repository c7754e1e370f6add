"""torch.compile(fullgraph=True) of the model, forward and backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _cold() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# "aot_eager" traces the whole forward and backward into one graph each, through the operator's fake implementation,
# and runs them without making machine code, which takes a minute. The operator itself is compiled in tests/ops.
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
