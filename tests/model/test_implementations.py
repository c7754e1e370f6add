"""Every attention implementation of transformers computes our models: outputs and every gradient, in each case.

The truth is our own model on its reference backend, in float64. FlashAttention is a stand-in that keeps its contract,
behind transformers' own code around it; FlexAttention is torch's, whose gradient needs a GPU.
"""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import flash_stand_in
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.interface_attention import OPERATOR_IMPLEMENTATIONS, eager_attention_forward
from diff_transformer.ops.cpu.cpu_build import is_faster
from diff_transformer.ops.triton.triton_backend import interpreted
from full_run import short_run
from rounding import check_within, rounding_limits
from tiny_model import CACHES, COMPUTES_IN, NOT_LATENT, OPTIONS, PAIRED, SIZES, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TRUTH = "diff_attention_reference"
IMPLEMENTATIONS = (
    *("diff_attention", "diff_attention_blockwise", "diff_attention_sdpa"),
    *("eager", "sdpa", *flash_stand_in.NAMES),
)


def implementations(kind: str) -> list[str]:
    return [name for name in IMPLEMENTATIONS if kind in NOT_LATENT or name not in flash_stand_in.NAMES]


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return flash_stand_in.install(monkeypatch)


@pytest.fixture
def calls(flash: list[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each function of the attention interface was called, by name."""
    counter: Counter[str] = Counter()
    functions = AttentionInterface._global_mapping
    for name in (*OPERATOR_IMPLEMENTATIONS, "sdpa", *flash_stand_in.NAMES):
        monkeypatch.setitem(functions, name, partial(counted, counter, name, functions[name]))
    eager = partial(counted, counter, "eager", eager_attention_forward)
    monkeypatch.setitem(functions, "eager", eager)
    return counter


def counted(counter: Counter[str], name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    counter[name] += 1
    return function(*args, **kwargs)


def full(tokens: Tensor) -> dict[str, Any]:
    return {}


def padded(row: int, hidden: slice, tokens: Tensor) -> dict[str, Any]:
    mask = torch.ones_like(tokens)
    mask[row, hidden] = 0
    return {"attention_mask": mask}


left_padded, right_padded = partial(padded, 0, slice(4)), partial(padded, 1, slice(-3, None))


def packed(tokens: Tensor) -> dict[str, Any]:
    positions = torch.cat((torch.arange(4), torch.arange(5))).expand(tokens.shape[0], -1)
    return {"position_ids": positions}


# name → configuration, batch, what the forward is given
CASES: dict[str, tuple[dict[str, Any], int, Callable[[Tensor], dict[str, Any]]]] = {
    "plain": ({}, 2, full),
    "one key/value head for all": ({"num_key_value_heads": 2}, 2, full),
    "padded left": ({}, 2, left_padded),
    "padded right": ({}, 2, right_padded),
    "packed": ({}, 1, packed),
    "window": ({"sliding_window": 3}, 2, full),
    "window, padded": ({"sliding_window": 3}, 2, left_padded),
    "window in one layer": ({"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]}, 2, full),
    "options": (OPTIONS, 2, full),
    "the other way with the headwise norm": ({"headwise_norm": None}, 2, full),
}


def answers(model: DiffTransformerForCausalLM, tokens: Tensor, masks: dict[str, Any]) -> dict[str, Tensor]:
    """Logits of the tokens that are no padding, and the gradient of every parameter for a loss that sees them all."""
    model.zero_grad()
    logits = model(tokens, use_cache=False, **masks).logits
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(logits.dtype)
    if "attention_mask" in masks:
        logits = logits[masks["attention_mask"].bool()]
        direction = direction[masks["attention_mask"].bool()]
    logits.backward(direction)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in gradients.values())
    return {"logits": logits.detach(), **gradients}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_agree(kind: str, case: str, flash: list[str], calls: Counter[str]) -> None:
    config, batch, give = CASES[case]
    if "headwise_norm" in config:  # Table 6's controls: DIFF without it, the others with one
        config = {"headwise_norm": kind not in PAIRED}
    inputs = tokens(batch=batch)
    masks = give(inputs)
    exact = make(kind, torch.float32, attn_implementation=TRUTH, **config).double()
    truth, limits = answers(exact, inputs, masks), rounding_limits(lambda: answers(exact, inputs, masks))
    for implementation in implementations(kind):
        # Rows of padding are NaN in float64: the mask holds its smallest number, −∞ to eager's float32 softmax.
        dtype = torch.float32 if implementation == "eager" and "padded" in case else torch.float64
        model = make(kind, torch.float32, attn_implementation=implementation, **config).to(dtype)
        calls.clear()
        flash.clear()
        computed = answers(model, inputs, masks)
        assert calls == {implementation: 2}
        assert len(flash) == (2 if implementation in flash_stand_in.NAMES else 0)
        for name, value in truth.items():
            check_within(computed[name], value, limits[name], COMPUTES_IN.get(implementation, torch.float64))
    unlimited = make(kind, attn_implementation=TRUTH)
    if config and "num_key_value_heads" not in config and (kind in NOT_LATENT or "headwise_norm" not in config):
        assert (answers(unlimited, inputs, masks)["logits"] - truth["logits"]).abs().max() > 0.01


# The backend that runs.
FUSED = {
    "diff_attention": "cpu" if is_faster() else "blockwise",
    "diff_attention_cpu": "cpu",
    **({"diff_attention_triton": "triton"} if interpreted() else {}),
}


@pytest.mark.parametrize("case", ["plain", "padded left"])
@pytest.mark.parametrize("implementation", short_run(FUSED, FUSED.keys() - {"diff_attention_triton"}))
def test_the_fused_kernels_agree_in_float32(kind: str, implementation: str, case: str, ran: Counter[str]) -> None:
    """They take no float64: off by what rounding to float32 explains. The Transformer's attention is torch's."""
    inputs = tokens()
    masks = CASES[case][2](inputs)
    exact = make(kind, torch.float32, attn_implementation=TRUTH).double()
    truth, limits = answers(exact, inputs, masks), rounding_limits(lambda: answers(exact, inputs, masks))
    ran.clear()
    computed = answers(make(kind, torch.float32, attn_implementation=implementation), inputs, masks)
    assert ran == {"torch" if kind == "softmax" else FUSED[implementation]: 2}
    for name, value in truth.items():
        check_within(computed[name], value, limits[name], torch.float32)


@pytest.mark.parametrize("cache_name", CACHES)
def test_decoding_makes_one_call_a_layer_and_step(kind: str, cache_name: str, calls: Counter[str]) -> None:
    """Prefill, chunked prefill and decoding, without a mask."""
    inputs = tokens()
    model = make(kind, attn_implementation=TRUTH)
    with torch.no_grad():
        truth = model(inputs, use_cache=False).logits
        for implementation in implementations(kind):
            if cache_name == "static" and implementation in flash_stand_in.NAMES:
                continue  # FlashAttention takes no mask that hides the empty slots: transformers' Llama cannot either
            model.set_attn_implementation(implementation)
            for chunks in ((6, 1, 2), (1,) * 9, (4, 5)):
                cache, parts = CACHES[cache_name](config=model.config), []
                for step, part in enumerate(inputs.split(chunks, dim=1), start=1):
                    calls.clear()
                    parts.append(model(part, past_key_values=cache).logits)
                    assert calls == {implementation: 2}, step
                assert cache.get_seq_length() == 9
                check(torch.cat(parts, 1), truth, dtype=COMPUTES_IN.get(implementation))


def test_an_unknown_one_is_refused(tmp_path: Any) -> None:
    model = make("diff", torch.float32)
    model.save_pretrained(tmp_path)
    message = "attn_implementation must be one of 'eager', .*'diff_attention_blockwise'.*, got 'diff_attention_nosuch'"
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("diff_attention_nosuch")
    assert model.config._attn_implementation == "diff_attention"
    for name in ("flash_attention_2", "paged|eager"):
        with pytest.raises(ValueError, match=rf"caches latents, .* or one of ours, got '{re.escape(name)}'\.$"):
            make("gdla").set_attn_implementation(name)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="diff_attention_nosuch")


def test_other_models_may_run_ours(calls: Counter[str]) -> None:
    """It is registered for all of transformers, and is ordinary attention there, also within a window."""
    inputs = tokens()
    for window in (None, 3):
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval()
        model.set_attn_implementation("sdpa")
        expected = model(inputs, use_cache=False).logits
        model.set_attn_implementation("diff_attention")
        calls.clear()
        check(model(inputs, use_cache=False).logits, expected)
        assert calls == {"diff_attention": 2}


# Models whose attention SDPA's forward does not compute, and the argument that says so.
OF_OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)),
    "s_aux": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, rope_parameters={"rope_type": "default"})
    ),
}


@pytest.mark.parametrize("argument", OF_OTHERS)
def test_what_would_be_dropped_is_refused(argument: str) -> None:
    model = OF_OTHERS[argument]().eval()
    model.set_attn_implementation("eager")
    model(tokens())
    model.set_attn_implementation("diff_attention")
    with pytest.raises(ValueError, match=f"^{argument} changes the numbers, and attn_implementation 'diff_attention' "):
        model(tokens())


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_blockwise", "eager", "sdpa"])
def test_our_model_refuses_what_it_would_drop(kind: str, implementation: str) -> None:
    model, inputs = make(kind, attn_implementation=implementation), tokens()
    numbers = {"softcap": 20.0, "s_aux": torch.ones(8), "sinks": torch.ones(8), "position_bias": torch.ones(1, 8, 9, 9)}
    for name, value in {**numbers, "indices": inputs, "block_indices": inputs}.items():
        if name == "position_bias" and implementation == "sdpa":  # which computes it
            continue
        with pytest.raises(
            ValueError,
            match=f"^{name} changes the numbers, .*'{implementation}' .* left out, .* got (20.0|a Tensor)\\.$",
        ):
            model(inputs, **{name: value})
        model(inputs, **{name: None})


def test_a_model_that_attends_itself_is_refused() -> None:
    """It makes its mask by the implementation's name, and adds what it gets."""
    theirs = BloomForCausalLM(BloomConfig(vocab_size=29, hidden_size=24, n_layer=1, n_head=4)).eval()
    theirs(tokens())
    theirs.config._attn_implementation = "diff_attention"
    with pytest.raises(ValueError, match=r"attention themselves: .* must be 'eager', got 'diff_attention'\.$"):
        theirs(tokens())
