"""A DIFF Transformer grows signal heads: it answers as before, and its copies part in training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert import grow_signal_heads
from tiny_model import SIZES, check_rounding

TOKENS = torch.randint(0, SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(0))


def make(kind: str = "diff", **config: Any) -> DiffTransformerForCausalLM:
    torch.manual_seed(5)
    sizes = {**SIZES, "initializer_range": 0.4, **config}
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes)).double().eval()


@pytest.mark.parametrize("spread", [0.0, 0.1])
@pytest.mark.parametrize(("kind", "signal_heads"), [("diff", 1), ("diff", 3), ("diff", 4), ("diff_grouped", 6)])
def test_it_computes_the_same(kind: str, signal_heads: int, spread: float, tmp_path: Path) -> None:
    """From four heads of DIFF, or two groups of three signal heads."""
    model = make(kind)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    grown = grow_signal_heads(model, signal_heads, spread=spread)
    groups = 4 if kind == "diff" else 2
    assert grown.config.attention_type == "diff_grouped"
    assert (grown.config.num_noise_heads, grown.config.num_attention_heads) == (groups, (signal_heads + 1) * groups)
    assert grown.config.get_text_config().num_key_value_heads == model.config.get_text_config().num_key_value_heads
    check_rounding(grown(TOKENS).logits, model(TOKENS).logits)
    assert grown.lambdas() == model.lambdas()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    grown.save_pretrained(tmp_path)
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path).eval()
    for name, weight in grown.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    # Not to the bit: products may be rounded by where in memory their numbers begin.
    check_rounding(loaded(TOKENS).logits, grown(TOKENS).logits)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("diff", {"attention_bias": True}),
        ("diff", {"output_gate": True}),
        ("diff", {"qk_norm": True}),
        ("diff_grouped", {"token_lambda": True}),
        ("diff_grouped", {"attention_bias": True, "output_gate": True, "qk_norm": True, "token_lambda": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_options_grow_with_the_heads(kind: str, options: dict[str, bool]) -> None:
    model = make(kind, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "_norm.weight")):  # which begin all alike
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    check_rounding(grow_signal_heads(model, 6)(TOKENS).logits, model(TOKENS).logits)


def test_a_power_of_two_copies_are_not_rounded() -> None:
    model = make()
    grown = grow_signal_heads(model, 4, spread=0.0)
    for key, weight in model.state_dict().items():
        if "o_proj" in key:
            copies = grown.state_dict()[key].unflatten(1, (4, 4, 8))
            assert torch.equal(copies.sum(2).flatten(1), weight)
            assert all(torch.equal(4 * copy.flatten(1), weight) for copy in copies.unbind(2))


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_copies_part_where_their_outputs_differ(spread: float) -> None:
    grown = grow_signal_heads(make(), 3, spread=spread)
    grown(TOKENS, labels=TOKENS).loss.backward()
    gradient = grown.model.layers[0].self_attn.q_proj.weight.grad.unflatten(0, (4, 4, -1))[:, :3]
    assert gradient.abs().max() > 1e-6
    differences = (gradient - gradient[:, :1]).abs().max()
    assert (differences > 1e-3 * gradient.abs().max()) == (spread > 0)


def test_bfloat16_stays_with_lambda_in_float32() -> None:
    grown = grow_signal_heads(make().bfloat16(), 2)
    assert {p.dtype for name, p in grown.named_parameters() if ".lam." not in name} == {torch.bfloat16}
    assert {p.dtype for name, p in grown.named_parameters() if ".lam." in name} <= {torch.float32, torch.float64}


@pytest.mark.parametrize(
    ("kind", "signal_heads", "spread", "message"),
    [
        ("softmax", 3, 0.1, r"is 'diff' or 'diff_grouped', got 'softmax'\.$"),
        ("diff_grouped", 4, 0.1, r"a positive multiple of the 3 that share a noise map in the model, got 4\.$"),
        ("diff", 0, 0.1, r"a positive multiple of the 1 that share a noise map in the model, got 0\.$"),
        ("diff", 2, -0.1, r"spread must be 0 or more, got -0\.1\.$"),
    ],
)
def test_what_is_refused(kind: str, signal_heads: int, spread: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow_signal_heads(make(kind), signal_heads, spread=spread)


def test_it_keeps_the_settings_of_generation_and_what_is_frozen() -> None:
    model = make()
    model.generation_config.update(eos_token_id=7, do_sample=True, temperature=0.5)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    grown = grow_signal_heads(model, 3)
    assert grown.generation_config.to_dict() == model.generation_config.to_dict()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert {name: parameter.requires_grad for name, parameter in grown.named_parameters()} == trained
