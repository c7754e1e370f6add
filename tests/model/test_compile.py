"""torch.compile(fullgraph=True) of the model, forward and backward."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from full_run import short_run
from tiny_model import KINDS, make, tokens
from tiny_model import check_rounding as check

each_kind = pytest.mark.parametrize("kind", short_run(KINDS, ["diff"]))


@pytest.fixture(autouse=True)
def _cold(cold: None) -> None:
    counters.clear()


# "aot_eager" traces the whole forward and backward into one graph each, through the operator's fake implementation,
# and runs them without making machine code, which takes a minute. The operator itself is compiled in tests/ops.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@each_kind
@pytest.mark.parametrize("given", short_run(["nothing", "a mask", "chunked_loss"], ["a mask"]))
def test_forward_and_backward(given: str, kind: str) -> None:
    model, inputs = make(kind, num_hidden_layers=1), tokens()
    mask = torch.ones_like(inputs)
    mask[0, :3] = 0
    options = {"nothing": {}, "a mask": {"attention_mask": mask}, "chunked_loss": {"chunked_loss": True}}[given]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(inputs, labels=inputs, use_cache=False, **options)
    expected.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    out = compiled(inputs, labels=inputs, use_cache=False, **options)
    out.loss.backward()
    if given != "chunked_loss":
        check(out.logits, expected.logits)
    for name, parameter in model.named_parameters():
        check(parameter.grad, gradients[name], least=0.1, dtype=torch.float32)  # the loss upcasts to float32


@each_kind
def test_generate_compiles_one_step(kind: str) -> None:
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
