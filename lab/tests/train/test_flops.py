"""Operations of a training step, against torch's counter of matrix products."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diff_lab.train.plan import flops_per_token, multiplied_weights, visible_pairs
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import SIZES, sizes_for

# Implementations made of matrix products alone, which the counter sees: torch's own attention on the CPU it does not.
# All of them compute every pair, also the hidden ones, and each product once.
COUNTED = {
    "diff": "diff_attention_reference",
    "diff_grouped": "diff_attention_reference",
    "diff_v2": "diff_attention_reference",
    "softmax": "eager",
    "dex": "eager",
}


def counted(attention_type: str, length: int, **settings: Any) -> int:
    """What a training step of one sequence takes, by torch's counter."""
    config = DiffTransformerConfig(**sizes_for(attention_type, **settings), attention_type=attention_type)
    config._attn_implementation = COUNTED[attention_type]
    model = DiffTransformerForCausalLM(config)
    tokens = torch.arange(length).unsqueeze(0) % config.vocab_size
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    # Some versions of transformers make the angles of the rotary embedding with a matrix product.
    angles = counter.get_flop_counts().get("DiffTransformerForCausalLM.model.rotary_emb", {})
    return counter.get_total_flops() - sum(angles.values())


@pytest.mark.parametrize("attention_type", COUNTED)
@pytest.mark.parametrize("settings", [{}, {"num_key_value_heads": 8, "tie_word_embeddings": True}], ids=["gqa", "tied"])
def test_products_are_those_that_torch_counts(attention_type: str, settings: dict[str, Any]) -> None:
    config = DiffTransformerConfig(**sizes_for(attention_type, **settings), attention_type=attention_type)
    for length in (1, 12):
        weights = length * multiplied_weights(config)
        pairs = config.num_hidden_layers * config.spec.attention_products(config) * length**2
        assert counted(attention_type, length, **settings) == 6 * (weights + pairs)
    # Of all pairs the visible ones are the model's: with one token that is all of them.
    assert flops_per_token(config, 1) == counted(attention_type, 1, **settings)
    hidden = 12 * 11 // 2
    products = config.num_hidden_layers * hidden * config.spec.attention_products(config)
    expected = counted(attention_type, 12, **settings) - 6 * products
    assert flops_per_token(config, 12) * 12 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("length", [1, 5, 8, 9, 33])
@pytest.mark.parametrize("window", [None, 2, 8, 64])
def test_visible_pairs_are_those_of_the_mask(length: int, window: int | None) -> None:
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    mask = (key <= query) & (key > query - (window or length))
    assert visible_pairs(length, window) == int(mask.sum())


def test_a_window_of_some_layers_counts_for_those() -> None:
    sizes = {**SIZES, "num_hidden_layers": 3, "sliding_window": 4}
    types = ["full_attention", "sliding_attention", "full_attention"]
    config = DiffTransformerConfig(**sizes, layer_types=types)
    every, none = DiffTransformerConfig(**sizes), DiffTransformerConfig(**{**sizes, "sliding_window": None})
    expected = (2 * flops_per_token(none, 20) + flops_per_token(every, 20)) / 3
    assert flops_per_token(config, 20) == pytest.approx(expected, rel=1e-12)
    assert flops_per_token(every, 20) < flops_per_token(none, 20)


def test_twins_take_the_same_and_the_papers_3b_what_its_size_says() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 100_288, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "max_position_embeddings": 4096,
    }  # fmt: skip
    diff, softmax, second = (
        flops_per_token(DiffTransformerConfig(**sizes, attention_type=kind), 4096)
        for kind in ("diff", "softmax", "diff_v2")
    )
    assert diff == softmax < second
    weights = 28 * (4 * 3072**2 + 3 * 3072 * 8192) + 3072 * 100_288
    assert diff == pytest.approx(6 * weights + 6 * 28 * 2 * 3072 * 4097 / 2, rel=1e-12)


def test_some_corrected_heads_of_dex() -> None:
    of = {
        name: flops_per_token(DiffTransformerConfig(**SIZES, attention_type=kind, dex_heads=heads), 8)
        for name, kind, heads in [("none", "softmax", None), ("all", "dex", None), ("some", "dex", [[0, 3], []])]
    }
    assert of["all"] - of["none"] == 6 * 2 * 8 * 4**2
    assert of["some"] - of["none"] == 6 * 2 * 4**2
