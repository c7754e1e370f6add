"""The one call of each layer through transformers' attention interface, and that all implementations agree."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.interface_attention import OPERATOR_IMPLEMENTATIONS, zero_padded
from diff_transformer.nn import differential
from diff_transformer.ops import backends, diff_attention
from diff_transformer.ops.attention_request import Request
from diff_transformer.ops.cpu.cpu_backend import is_faster
from diff_transformer.ops.triton.triton_backend import interpreted
from full_run import short_run
from rounding import check_within, rounding_limits
from tiny_model import PAIRED, ROUNDINGS, ROUNDINGS_OF_A_TERM, needs_vectors

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# What each implementation has to have run, for each layer: of DIFF and DIFF V2, and of the Transformer.
RUNS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "eager": ({"eager": 1}, {"eager": 1}),
    "sdpa": ({"torch": 1}, {"torch": 1}),
    "diff_attention": ({"cpu" if is_faster() else "blockwise": 1}, {"torch": 1}),
    "diff_attention_reference": ({"reference": 1}, {"torch": 1}),
    "diff_attention_blockwise": ({"blockwise": 1}, {"torch": 1}),
    "diff_attention_sdpa": ({"sdpa": 1}, {"torch": 1}),
    "diff_attention_cpu": ({"cpu": 1}, {"torch": 1}),
    "diff_attention_triton": ({"triton": 1}, {"torch": 1}),
}
# FlexAttention has no gradient on the CPU, so it is not among the implementations that are compared by gradients.
FORWARD_ONLY = {"diff_attention_flex"}
if not interpreted():
    del RUNS["diff_attention_triton"]
    FORWARD_ONLY = FORWARD_ONLY | {"diff_attention_triton"}
# The fused kernels do not take float64.
RUNS_IN_FLOAT64 = {
    name: runs for name, runs in RUNS.items() if name not in ("diff_attention_cpu", "diff_attention_triton")
}
RUNS_IN_FLOAT64["diff_attention"] = ({"blockwise": 1}, {"torch": 1})

# transformers' eager attention takes the softmax in float32, even of float64.
COMPUTES_IN = {"eager": torch.float32}


def expect_runs(ran: Counter[str], implementation: str, kind: str, runs: Any = RUNS, layers: int = 2) -> None:
    expected = {name: layers * count for name, count in runs[implementation][kind == "softmax"].items()}
    if "sdpa" in expected:  # two calls of torch's attention at least; more where values are cut into pieces
        assert ran.pop("torch") >= 2 * layers
    assert ran == expected
    ran.clear()


def answers(model: DiffTransformerForCausalLM, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter for a loss that sees all of them."""
    model.zero_grad()
    logits = model(tokens, attention_mask=mask, use_cache=False).logits
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)
    if mask is not None:
        # A row of padding sees nothing: 0 in our operator, anything in others. Nobody reads it.
        logits = logits * mask[..., None]
    logits.backward(direction)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"logits": logits.detach(), **gradients}


def test_every_own_implementation_is_listed_here() -> None:
    assert {*RUNS, *FORWARD_ONLY} == {"eager", "sdpa", *OPERATOR_IMPLEMENTATIONS}


def some_padding(tokens: Tensor) -> Tensor:
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    return mask


def test_a_billionth_more_in_any_step_is_caught(kind: str, make: Any, tokens: Any) -> None:
    """Rounding explains no relative error of 1e-9 in a projection, the scores, the heads, a norm or λ."""

    def add(module: Any, inputs: Any, out: Any) -> Any:
        first, *others = out if isinstance(out, tuple) else (out,)
        # In one channel alone: the norm takes away what all channels of a head have in common.
        factor = torch.ones(first.shape[-1:], dtype=torch.float64)
        factor.view(-1)[0] += 1e-9
        return (first * factor, *others) if others else first * factor

    inputs = tokens()
    model = make(kind, attn_implementation="diff_attention_reference")
    truth, limits = answers(model, inputs), rounding_limits(lambda: answers(model, inputs))
    layer = model.model.layers[0]
    steps = [layer.input_layernorm, layer.mlp.down_proj, layer.self_attn, *layer.self_attn.children()]
    assert len(steps) >= 7
    wrong = {}
    for step in steps:
        hook = step.register_forward_hook(add)
        wrong[str(step)] = answers(model, inputs)
        hook.remove()
    for attention in (layer.self_attn, model.model.layers[1].self_attn):
        attention.scaling *= 1 + 1e-9
        wrong[f"scores of layer {attention.layer_idx}"] = answers(model, inputs)
        attention.scaling = attention.head_dim**-0.5
    for step, computed in wrong.items():
        off = [name for name, value in truth.items() if (computed[name] - value).abs().max() > limits[name] * 2**-52]
        assert "logits" in off, step
    for name, value in answers(model, inputs).items():
        assert torch.equal(value, truth[name]), name


WRONG_GRADIENTS_OF_LAMBDA: dict[str, Callable[[Tensor], Tensor]] = {
    "one query of one head left out": lambda gradient: gradient.index_fill(2, torch.tensor([4]), 0.0),
    "twice the last query": lambda gradient: torch.cat((gradient[..., :-1], 2 * gradient[..., -1:]), -1),
    "a billionth more": lambda gradient: gradient * (1 + 1e-9),
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS_OF_LAMBDA)
def test_a_wrong_gradient_of_lambda_is_caught(
    wrong: str, make: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its terms nearly cancel, so that its rounding is large."""
    inputs = tokens()
    exact = make("diff", attn_implementation="diff_attention_reference")
    truth, limits = answers(exact, inputs), rounding_limits(lambda: answers(exact, inputs))
    blockwise = backends._BACKENDS["blockwise"]

    def attend(request: Request) -> Tensor:
        lam = request.lam.clone()
        lam.register_hook(WRONG_GRADIENTS_OF_LAMBDA[wrong])
        return blockwise.attend(request._replace(lam=lam))

    monkeypatch.setitem(backends._BACKENDS, "blockwise", blockwise._replace(attend=attend))
    computed = answers(make("diff", attn_implementation="diff_attention_blockwise"), inputs)
    for name, value in truth.items():
        with pytest.raises(AssertionError, match="over the limit") if ".lam." in name else nullcontext():
            check_within(computed[name], value, limits[name])


# Triton's interpreter takes long for a model.
@pytest.mark.parametrize("padded", short_run([False, True], [True]))
@pytest.mark.parametrize("implementation", short_run(RUNS, RUNS.keys() - {"diff_attention_triton"}))
def test_implementations_agree_in_float32(
    kind: str, implementation: str, padded: bool, make: Any, tokens: Any, ran: Counter[str], lambda_terms: Any
) -> None:
    """Against the reference in float64: at most twice the error of the plain formula ("eager"), plus a rounding band.

    The band, 256 eps of the largest entry (or of 1), is there for what the plain formula gets right by luck. For λ's
    gradient, which nearly cancels, it is 16 eps of the sizes of its terms where that is more.
    """
    inputs, eps = tokens(), torch.finfo(torch.float32).eps
    mask = some_padding(inputs) if padded else None
    plain = answers(make(kind, torch.float32, attn_implementation="eager"), inputs, mask)
    rounded = make(kind, torch.float32, attn_implementation="diff_attention_reference").double()
    truth = answers(rounded, inputs, mask)
    terms = lambda_terms(rounded)
    ran.clear()
    computed = answers(make(kind, torch.float32, attn_implementation=implementation), inputs, mask)
    expect_runs(ran, implementation, kind)
    for name, value in truth.items():
        error, plain_error = ((x[name].double() - value.double()).abs().max().item() for x in (computed, plain))
        band = eps * max(ROUNDINGS * max(1.0, value.abs().max().item()), ROUNDINGS_OF_A_TERM * terms.get(name, 0.0))
        assert plain_error <= 4 * band, f"{name}: the plain formula itself is off by {plain_error:.3g}"
        limit = 2 * plain_error + band
        assert error <= limit, f"{name}: error {error:.3g}, the plain formula's {plain_error:.3g}, limit {limit:.3g}"


@pytest.mark.all
@needs_vectors
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, while it compiles
def test_flex_attention_as_our_backend(make: Any, tokens: Any, ran: Counter[str], check: Any) -> None:
    """With padding, whose mask is a tensor, and without, where causality is a block mask."""
    inputs = tokens()
    for mask in (None, some_padding(inputs)):
        logits = {}
        for name in ("reference", "flex"):
            model = make("diff", torch.float32, attn_implementation=f"diff_attention_{name}").eval()
            with torch.no_grad():
                logits[name] = model(inputs, attention_mask=mask, use_cache=False).logits
            assert ran == {name: 2}
            ran.clear()
        seen = torch.ones_like(inputs, dtype=torch.bool) if mask is None else mask.bool()
        check(logits["flex"][seen], logits["reference"][seen])


def test_own_operator_is_the_default(kind: str, make: Any, tokens: Any, ran: Counter[str]) -> None:
    model = make(kind)
    assert model.config._attn_implementation == "diff_attention"
    model(tokens())
    expect_runs(ran, "diff_attention", kind, RUNS_IN_FLOAT64)


def test_switching_a_live_model(kind: str, make: Any, tokens: Any, ran: Counter[str], check: Any) -> None:
    model, inputs = make(kind), tokens()
    with torch.no_grad():
        first = model(inputs).logits
        ran.clear()
        for implementation in (*RUNS_IN_FLOAT64, "diff_attention"):
            model.set_attn_implementation(implementation)
            check(model(inputs).logits, first, dtype=COMPUTES_IN.get(implementation))
            expect_runs(ran, implementation, kind, RUNS_IN_FLOAT64)


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """The calls of an attention function registered under a name of its own, "spy"."""
    seen: list[dict[str, Any]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append({"module": module, "query": query, "key": key, "value": value, "kwargs": kwargs})
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    yield seen
    del AttentionInterface._global_mapping["spy"]
    del AttentionMaskInterface._global_mapping["spy"]


# Heads and width of the one call's queries, heads and width of its keys and values: A = 8, 4 key/value heads, d = 4.
CALL = {"diff": (8, 8, 2, 8), "diff_grouped": (8, 8, 2, 8), "diff_v2": (16, 4, 4, 4), "softmax": (8, 4, 4, 4)}


def test_one_call_for_each_layer(kind: str, make: Any, tokens: Any, calls: list[dict[str, Any]], check: Any) -> None:
    """What Llama's layer would ask for: any kernel, cache or server that answers that call runs ours."""
    model, inputs = make(kind), tokens()
    expected = model(inputs).logits
    model.set_attn_implementation("spy")
    check(model(inputs).logits, expected)
    assert [call["module"].layer_idx for call in calls] == [0, 1]
    query_heads, query_width, kv_heads, kv_width = CALL[kind]
    for call in calls:
        assert call["query"].shape == (2, query_heads, 9, query_width)
        assert call["key"].shape == call["value"].shape == (2, kv_heads, 9, kv_width)
        assert call["kwargs"]["scaling"] == 4**-0.5
        assert call["kwargs"]["dropout"] == 0.0
        assert call["module"].is_causal is True
        assert call["module"].num_key_value_groups == query_heads // kv_heads
        assert "lam" not in call["kwargs"]
        if kind in PAIRED:
            noise = torch.arange(8) % (call["module"].ratio + 1) == call["module"].ratio
            assert not call["query"][:, ~noise, :, 4:].any()
            assert not call["query"][:, noise, :, :4].any()
            assert call["query"][:, ~noise, :, :4].all()
            assert call["query"][:, noise, :, 4:].all()


@pytest.mark.parametrize("ratio", [1, 3])
def test_queries_of_a_key_head_lie_side_by_side(ratio: int) -> None:
    """Groups of signal heads: the key head of a query is its number over as many as share one."""
    queries = torch.randn(2, 5, 8, 4)
    padded = zero_padded(queries, ratio)
    zero = torch.zeros(2, 5, 4)
    for head in range(8):
        halves = (zero, queries[:, :, head]) if head % (ratio + 1) == ratio else (queries[:, :, head], zero)
        assert torch.equal(padded[:, head], torch.cat(halves, -1))


def test_our_own_operator_gets_views_of_what_the_projection_made(
    make: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No zeros, no copies: queries and keys in the memory of the rotated ones, the values in their projection's."""
    seen: list[tuple[Tensor, ...]] = []
    projected: dict[str, Tensor] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, **kwargs: Any) -> Tensor:
        seen.append((q, k, v))
        return diff_attention(q, k, v, lam, **kwargs)

    model = make("diff")
    attention = model.model.layers[0].self_attn
    project = attention.project

    def keep(*args: Any) -> tuple[Tensor, ...]:
        projected["q"], projected["k"], projected["v"] = project(*args)
        return projected["q"], projected["k"], projected["v"]

    monkeypatch.setattr(attention, "project", keep)
    monkeypatch.setattr(differential, "diff_attention", spy)
    model(tokens(), use_cache=False)
    q, k, v = seen[0]
    assert (q.shape, k.shape, v.shape) == ((2, 4, 2, 9, 4), (2, 2, 2, 9, 4), (2, 2, 9, 8))
    for name, view in zip("qkv", (q, k, v), strict=True):
        assert view.untyped_storage().data_ptr() == projected[name].untyped_storage().data_ptr(), name
        assert view.numel() == projected[name].numel(), name
