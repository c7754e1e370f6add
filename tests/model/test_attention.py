"""The one call of each layer through transformers' attention interface, what each implementation runs, and options."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from diff_lab.train.plan import multiplied_weights
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.ops.attention_request import Request
from tiny_model import COMPUTES_IN, OPTIONS, PAIRED, make, sizes_for, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# What each implementation has to have run in float64, for each layer: of DIFF and DIFF V2, and of the Transformer.
RUNS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "eager": ({"eager": 1}, {"eager": 1}),
    "sdpa": ({"torch": 1}, {"torch": 1}),
    "diff_attention": ({"blockwise": 1}, {"torch": 1}),
    "diff_attention_reference": ({"reference": 1}, {"torch": 1}),
    "diff_attention_blockwise": ({"blockwise": 1}, {"torch": 1}),
    "diff_attention_sdpa": ({"sdpa": 1}, {"torch": 1}),
}


def expect_runs(ran: Counter[str], implementation: str, kind: str) -> None:
    expected = {name: 2 * count for name, count in RUNS[implementation][kind == "softmax"].items()}
    if "sdpa" in expected:  # two calls of torch's attention a layer at least; more where values are cut into pieces
        assert ran.pop("torch") >= 4
    assert ran == expected
    ran.clear()


def test_switching_a_live_model(kind: str, ran: Counter[str]) -> None:
    model, inputs = make(kind), tokens()
    assert model.config._attn_implementation == "diff_attention"  # by default
    with torch.no_grad():
        first = model(inputs).logits
        expect_runs(ran, "diff_attention", kind)
        ran.clear()
        for implementation in (*RUNS, "diff_attention"):
            model.set_attn_implementation(implementation)
            check(model(inputs).logits, first, dtype=COMPUTES_IN.get(implementation))
            expect_runs(ran, implementation, kind)


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
CALL = {
    "diff": (8, 8, 2, 8),
    "diff_grouped": (8, 8, 2, 8),
    "diff_v2": (16, 4, 4, 4),
    "diff_v3": (16, 4, 4, 4),
    "diff_v2_grouped": (8, 4, 2, 4),
    "gdla": (8, 6, 2, 6),  # without a cache
    "softmax": (8, 4, 4, 4),
}


def test_one_call_for_each_layer(kind: str, calls: list[dict[str, Any]]) -> None:
    """What Llama's layer would ask for: any kernel, cache or server that answers that call runs ours."""
    model, inputs = make(kind), tokens()
    expected = model(inputs).logits
    model.set_attn_implementation("spy")
    check(model(inputs).logits, expected)
    assert [call["module"].layer_idx for call in calls] == [0, 1]
    query_heads, query_width, kv_heads, kv_width = CALL[kind]
    for call in calls:
        assert call["query"].shape == (2, query_heads, 9, query_width)
        assert call["key"].shape == (2, kv_heads, 9, kv_width)
        assert call["value"].shape == (2, kv_heads, 9, 4 if kind == "gdla" else kv_width)
        assert call["kwargs"]["scaling"] == (6 if kind == "gdla" else 4) ** -0.5
        assert call["kwargs"]["dropout"] == 0.0
        assert call["module"].is_causal is True
        assert call["module"].num_key_value_groups == query_heads // kv_heads
        assert model.config.get_text_config().num_attention_heads == query_heads
        assert "lam" not in call["kwargs"]
        if kind in PAIRED:
            noise = torch.arange(8) % (call["module"].ratio + 1) == call["module"].ratio
            assert not call["query"][:, ~noise, :, 4:].any()
            assert not call["query"][:, noise, :, :4].any()
            assert call["query"][:, ~noise, :, :4].all()
            assert call["query"][:, noise, :, 4:].all()


def test_the_window_reaches_kernels_that_take_no_mask(kind: str, calls: list[dict[str, Any]]) -> None:
    model = make(kind, sliding_window=4, layer_types=["full_attention", "sliding_attention"])
    model.set_attn_implementation("spy")
    model(tokens())
    assert [call["kwargs"]["sliding_window"] for call in calls] == [None, 4]


def test_our_own_operator_gets_views_of_what_the_projection_made(requests: list[Request]) -> None:
    """No zeros, no copies: the values in their projection's memory, nothing beside queries and keys in theirs."""
    model, values = make("diff"), list[Tensor]()
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, __, output: values.append(output))
    model(tokens(), use_cache=False)
    q, k, v = requests[0][:3]
    assert (q.shape, k.shape, v.shape) == ((2, 4, 2, 9, 4), (2, 2, 2, 9, 4), (2, 2, 9, 8))
    assert v.untyped_storage().data_ptr() == values[0].untyped_storage().data_ptr()
    for x in (q, k, v):
        assert x.untyped_storage().nbytes() == x.nbytes
        assert not x.is_contiguous()  # a copy would be


def test_generation_and_saving_with_every_option(kind: str, tmp_path: Path) -> None:
    model = make(kind, torch.float32, **OPTIONS)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = tokens(1, 5)
    cached, computed = (model.generate(prompt, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, computed)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(prompt).logits, model(prompt).logits)


def test_the_weights_of_the_gate_are_counted(kind: str) -> None:
    sizes = {"attention_type": kind, **sizes_for(kind)}
    plain, gated = (DiffTransformerConfig(**sizes, output_gate=gate) for gate in (False, True))
    layers = [DiffTransformerForCausalLM(config).model.layers[0].self_attn for config in (plain, gated)]
    difference = sum(p.numel() for p in layers[1].parameters()) - sum(p.numel() for p in layers[0].parameters())
    assert multiplied_weights(gated) - multiplied_weights(plain) == 2 * difference


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_sdpa", "sdpa", "eager"])
def test_dropout_in_training_alone(kind: str, implementation: str) -> None:
    """Of whole rows and of packed documents, which our own implementation reads one by one."""
    plain, inputs = make(kind, torch.float32), tokens(1, 9)
    model = make(kind, torch.float32, attn_implementation=implementation, attention_dropout=0.5)
    check(model(inputs).logits, plain(inputs).logits)
    model.train()
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    for more in ({}, packed):
        model.zero_grad()
        torch.manual_seed(0)
        first, second = model(inputs, **more).logits, model(inputs, **more).logits
        torch.manual_seed(0)
        assert torch.equal(model(inputs, **more).logits, first)
        assert not torch.equal(first, second)
        first.sum().backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
