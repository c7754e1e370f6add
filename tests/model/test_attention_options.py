"""Options of the attention in a model: in every implementation, with one call in each layer, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diff_lab.train.plan import flops_per_token, multiplied_weights
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert.layout_tables import LAYOUTS, write_settings
from tiny_model import SIZES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPTIONS: dict[str, Any] = {"attention_bias": True, "qk_norm": True, "output_gate": True}


def test_generation_and_saving(kind: str, make: Any, tokens: Any, tmp_path: Path) -> None:
    model = make(kind, torch.float32, **OPTIONS)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = tokens(1, 5)
    cached, computed = (model.generate(prompt, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, computed)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(prompt).logits, model(prompt).logits)


def test_the_weights_are_counted(kind: str) -> None:
    plain, gated = (DiffTransformerConfig(attention_type=kind, **SIZES, output_gate=gate) for gate in (False, True))
    layers = [DiffTransformerForCausalLM(config).model.layers[0].self_attn for config in (plain, gated)]
    difference = sum(p.numel() for p in layers[1].parameters()) - sum(p.numel() for p in layers[0].parameters())
    assert multiplied_weights(gated) - multiplied_weights(plain) == 2 * difference
    assert flops_per_token(gated, 8) - flops_per_token(plain, 8) == 12 * difference


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_sdpa", "sdpa", "eager"])
def test_dropout_in_training_alone(kind: str, implementation: str, make: Any, tokens: Any, check: Any) -> None:
    plain, inputs = make(kind, torch.float32), tokens()
    model = make(kind, torch.float32, attn_implementation=implementation, attention_dropout=0.5)
    check(model(inputs).logits, plain(inputs).logits)
    model.train()
    torch.manual_seed(0)
    first, second = model(inputs).logits, model(inputs).logits
    torch.manual_seed(0)
    assert torch.equal(model(inputs).logits, first)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["diff", "diff_v2"])
def test_an_implementation_that_drops_nothing_refuses_it(kind: str, make: Any, tokens: Any) -> None:
    model = make(kind, torch.float32, attn_implementation="diff_attention_blockwise", attention_dropout=0.5)
    model(tokens())
    with pytest.raises(ValueError, match="'blockwise' cannot run this request: it drops no attention weights"):
        model.train()(tokens())


@pytest.mark.parametrize("packed", [True, False])
def test_dropout_of_packed_documents(kind: str, packed: bool, make: Any, tokens: Any) -> None:
    """With our own implementation, which computes ordinary attention document by document."""
    model = make(kind, torch.float32, attention_dropout=0.5).train()
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    more = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5} if packed else {}
    inputs = tokens(1, 9)
    torch.manual_seed(0)
    first, second = model(inputs, **more).logits, model(inputs, **more).logits
    assert not torch.equal(first, second)
    assert torch.isfinite(first).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_dropout must be at least 0 and below 1, got 1.5"):
        DiffTransformerConfig(**SIZES, attention_dropout=1.5)
    for name, value in (*OPTIONS.items(), ("attention_dropout", 0.1)):
        with pytest.raises(ValueError, match=f"{name} must be left out for attention_type 'dex', got {value}"):
            DiffTransformerConfig(**SIZES, attention_type="dex", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("qk_norm", True), ("output_gate", True), ("is_causal", False)])
def test_a_layout_without_them_says_so(name: str, value: bool) -> None:
    config = DiffTransformerConfig(**SIZES, attention_type="softmax", **{name: value})
    with pytest.raises(ValueError, match=f"the layout 'llama' cannot hold {name} {value}"):
        write_settings(LAYOUTS["llama"]["softmax"], config)
