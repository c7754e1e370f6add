"""Table 6's controls as models: DIFF without its headwise norm, the others with one. The oracle is in test_modeling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import KINDS, PAIRED

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# The type and whether it has the norm, where that is not what it has by itself.
VARIANTS = {"diff": False, "diff_grouped": False, "diff_v2": True, "softmax": True}


def test_left_out_it_is_as_the_type_has_it() -> None:
    for kind in (*KINDS, "dex"):
        config = DiffTransformerConfig(attention_type=kind, num_noise_heads=3)
        assert config.headwise_norm is None
        assert config.has_headwise_norm is (kind in PAIRED)
    assert DiffTransformerConfig(attention_type="dex", headwise_norm=False).has_headwise_norm is False


@pytest.mark.parametrize(("kind", "norm"), VARIANTS.items())
def test_round_trip(kind: str, norm: bool, make: Any, tokens: Any, tmp_path: Path) -> None:
    model, inputs = make(kind, torch.float32, headwise_norm=norm), tokens()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["headwise_norm"] is norm
    assert any("head_norm" in name for name in load_file(tmp_path / "model.safetensors")) is norm
    loaded, report = DiffTransformerForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)


def test_a_config_from_before_the_key(make: Any, tokens: Any, tmp_path: Path) -> None:
    model, inputs = make("diff", torch.float32), tokens()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("headwise_norm", None)
    file.write_text(json.dumps(settings))
    loaded = DiffTransformerForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.has_headwise_norm
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)
