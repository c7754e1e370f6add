"""The maps of transformers' own models are those of ours after a conversion."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_lab.measure.retrieval import applied_maps
from diff_transformer.convert import convert_from
from diff_transformer.model import DiffTransformerForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("kind", ["llama", "diffllama"])
def test_maps_of_models_of_transformers(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        "diffllama": lambda: DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES)),
    }[kind]().eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(20)  # maps that are far from even
            if "lambda" in name:
                parameter.normal_(std=0.4)
    theirs.save_pretrained(tmp_path / "theirs")
    convert_from(kind, tmp_path / "theirs", tmp_path / "ours")
    ours = DiffTransformerForCausalLM.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.randint(40, (3, 13))
    implementation = theirs.config._attn_implementation
    maps, expected = applied_maps(theirs, tokens), applied_maps(ours, tokens)
    assert theirs.config._attn_implementation == implementation
    assert len(maps) == len(expected) == 2
    for one, other in zip(maps, expected, strict=True):
        assert one.shape == other.shape == (3, 2 if kind == "diffllama" else 4, 13, 13)
        # Heads may stand in another order.
        torch.testing.assert_close(one.mean(1), other.mean(1))
        torch.testing.assert_close(one.square().mean(1), other.square().mean(1))
    assert (maps[0].amin() < -1e-3) == (kind == "diffllama")


def test_a_model_without_maps_is_refused() -> None:
    class Mute:
        config = SimpleNamespace(_attn_implementation="eager", model_type="mute")

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(attentions=None)

    with pytest.raises(ValueError, match="Mute returns no attentions"):
        applied_maps(Mute(), torch.zeros(1, 3, dtype=torch.long))
