"""Heads as the paper counts them."""

import pytest

from diff_lab.experiments.experiment import heads_of
from diff_lab.train import load_recipe


@pytest.mark.parametrize(
    ("overrides", "heads"),
    [
        (("model.attention_type=diff",), (12, 128, True)),
        (("model.attention_type=softmax",), (24, 128, False)),
        (("model.attention_type=diff_v2",), (24, 128, True)),
        (("model.attention_type=softmax", "model.num_attention_heads=12", "model.head_dim=256"), (12, 256, False)),
        (("model.attention_type=diff", "model.num_key_value_heads=4"), (12, 128, True)),
    ],
)
def test_heads_of_the_3b_model(overrides: tuple[str, ...], heads: tuple[int, int, bool]) -> None:
    assert heads_of(load_recipe("paper-3b", overrides)) == heads
