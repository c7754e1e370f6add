"""A converted model computes what its source computed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.convert import as_our_model, convert_from, convert_to
from layers_by_hand import check, tensors_in
from tiny_model import SIZES

SHAPES = (  # groups of two queries, of four, none, one pair of wide heads
    {},
    {"num_key_value_heads": 2},
    {"num_key_value_heads": 8},
    {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
)
ROPES = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
)
Folder = Callable[..., Path]
Logits = Callable[..., Tensor]


@pytest.mark.parametrize("shape", SHAPES)
def test_from_diffllama(shape: dict[str, Any], theirs: Folder, logits: Logits, tmp_path: Path) -> None:
    source = theirs(DiffLlamaForCausalLM, **shape)
    convert_from("diffllama", source, tmp_path / "new")
    check(logits(tmp_path / "new"), logits(source, DiffLlamaForCausalLM))


@pytest.mark.parametrize("shape", [*SHAPES, {"head_dim": 6}])
def test_to_diffllama_takes_the_norm_weight_into_the_output(
    shape: dict[str, Any], ours: Folder, logits: Logits, tmp_path: Path
) -> None:
    source = ours("diff", **shape)
    convert_to("diffllama", source, tmp_path / "new")
    check(logits(tmp_path / "new", DiffLlamaForCausalLM), logits(source))


OPTIONS = {"attention_bias": True, "attention_dropout": 0.1}


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}, OPTIONS], ids=str)
def test_llama_and_back(rope: Any, options: Any, theirs: Folder, logits: Logits, tmp_path: Path) -> None:
    source = theirs(LlamaForCausalLM, rope_parameters=dict(rope), rms_norm_eps=1e-3, **options)
    assert ("lm_head.weight" in tensors_in(source)) != options.get("tie_word_embeddings", False)
    convert_from("llama", str(source), str(tmp_path / "new"))
    check(logits(tmp_path / "new"), logits(source, LlamaForCausalLM))
    convert_to("llama", tmp_path / "new", tmp_path / "back")
    assert torch.equal(logits(tmp_path / "back", LlamaForCausalLM), logits(source, LlamaForCausalLM))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_one_file_comes_before_an_index(theirs: Folder, logits: Logits, tmp_path: Path) -> None:
    """As in transformers, whose save_pretrained removes shards and leaves their index."""
    source = theirs(LlamaForCausalLM, "5KB")
    model = LlamaForCausalLM.from_pretrained(source)
    model.model.norm.weight.data.mul_(2)
    model.save_pretrained(tmp_path / "newer")
    shutil.copyfile(tmp_path / "newer" / "model.safetensors", source / "model.safetensors")
    convert_from("llama", source, tmp_path / "new")
    check(logits(tmp_path / "new"), logits(tmp_path / "newer", LlamaForCausalLM))


def test_settings_of_old_llama_checkpoints(theirs: Folder, logits: Logits, tmp_path: Path) -> None:
    """Rotary settings beside each other, no head_dim, and a buffer that is no parameter."""
    source = theirs(LlamaForCausalLM)
    settings = json.loads((source / "config.json").read_text())
    settings |= {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float32"}
    for name in ("rope_parameters", "head_dim", "dtype"):
        settings.pop(name, None)
    (source / "config.json").write_text(json.dumps(settings))
    expected = logits(source, LlamaForCausalLM)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    tensors = {name: x.contiguous() for name, x in LlamaForCausalLM.from_pretrained(source).state_dict().items()}
    save_file({**tensors, **buffer}, source / "model.safetensors", {"format": "pt"})
    convert_from("llama", source, tmp_path / "new")
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new")
    assert model.config.rope_parameters["factor"] == 2.0
    check(logits(tmp_path / "new"), expected)


AUTHORS = {
    "microsoft": (
        {"num_heads": 4, "num_kv_heads": 2},
        {"num_heads": 4, "num_kv_heads": 1},
        {"num_heads": 4, "num_kv_heads": 4, "first_depth": 1},
        {"num_heads": 1, "num_kv_heads": 1, "first_depth": -1},
        {"num_heads": 4, "num_kv_heads": 2, "rms_norm_eps": 0.1},  # of the other norms: the headwise one's is fixed
    ),
    "microsoft-v2": (
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 4},
        {"num_heads": 3, "num_kv_heads": 1, "head_dim": 6},
        {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16},
    ),
}


@pytest.mark.parametrize(("layout", "settings"), [(layout, one) for layout, some in AUTHORS.items() for one in some])
@pytest.mark.parametrize("norm_weight", [True, False])
def test_from_the_authors(
    layout: str, settings: Any, norm_weight: bool, authors: Folder, authors_logits: Logits, logits: Logits
) -> None:
    source = authors(second=layout == "microsoft-v2", norm_weight=norm_weight, **settings)
    convert_from(layout, source, source.parent / "new")
    check(logits(source.parent / "new"), authors_logits(source))


@pytest.mark.parametrize(("kind", "layout"), [("diff", "microsoft"), ("diff_v2", "microsoft-v2")])
@pytest.mark.parametrize("shape", SHAPES)
def test_to_the_authors(
    kind: str, layout: str, shape: Any, ours: Folder, authors_logits: Logits, logits: Logits
) -> None:
    source = ours(kind, **shape, rope_parameters={"rope_type": "default", "rope_theta": 70.0}, lambda_init_offset=2)
    convert_to(layout, source, source.parent / "new")
    check(authors_logits(source.parent / "new"), logits(source))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_diffllama_in_memory(tied: bool, dtype: torch.dtype, tokens: Tensor) -> None:
    """It computes the same in the same dtype, from copied weights; settings of generation and random state stay."""
    config = DiffLlamaConfig(**SIZES, attention_dropout=0.0, tie_word_embeddings=tied)
    theirs = DiffLlamaForCausalLM(config).to(dtype).eval()
    theirs.generation_config.update(eos_token_id=[2, 5], do_sample=True)
    before = torch.get_rng_state()
    ours = as_our_model(theirs)
    assert torch.equal(torch.get_rng_state(), before)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert not ours.training
    assert ours.lm_head.weight.dtype == dtype
    expected, answer = theirs(tokens).logits.double(), ours(tokens).logits.double()
    # DiffLlama's λ is in float32, or in the dtype of the model where that is narrower.
    torch.testing.assert_close(answer, expected, rtol=0, atol=1e-6 if dtype == torch.float64 else 0.02)
    with torch.no_grad():
        ours.lm_head.weight.zero_()
    assert torch.equal(theirs(tokens).logits.double(), expected)


def test_another_model_in_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="Only a DiffLlama is converted without a folder, got LlamaForCausalLM"):
        as_our_model(LlamaForCausalLM(LlamaConfig(**SIZES)))
    biased = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0, attention_bias=True))
    with pytest.raises(ValueError, match="attention_bias must be False"):
        as_our_model(biased)
