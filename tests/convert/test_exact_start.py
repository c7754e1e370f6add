"""A Llama becomes a DIFF V2 that computes the same, and whose maps part in training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from diff_transformer import DiffTransformerForCausalLM, attention_maps
from diff_transformer.convert import convert_from

Folder = Callable[..., Path]
SHAPES = ({}, {"num_key_value_heads": 2}, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_the_source_s(
    shape: dict[str, int],
    tied: bool,
    theirs: Folder,
    logits: Callable[..., Tensor],
    check: Callable[[Tensor, Tensor], None],
    tmp_path: Path,
) -> None:
    source = theirs(LlamaForCausalLM, tie_word_embeddings=tied, **shape)
    assert convert_from("llama", source, tmp_path / "new", attention_type="diff_v2").attention_type == "diff_v2"
    check(logits(tmp_path / "new"), logits(source, LlamaForCausalLM))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nothing_is_rounded(dtype: torch.dtype, theirs: Folder, tmp_path: Path) -> None:
    source = theirs(LlamaForCausalLM)
    old = {key: x.to(dtype) for key, x in load_file(source / "model.safetensors").items()}
    save_file(old, source / "model.safetensors", {"format": "pt"})
    convert_from("llama", source, tmp_path / "new", attention_type="diff_v2")
    new = load_file(tmp_path / "new/model.safetensors")
    assert {x.dtype for x in new.values()} == {dtype}
    prefix = "model.layers.1.self_attn."
    assert torch.equal(new[prefix + "o_proj.weight"] / 2, old[prefix + "o_proj.weight"])
    assert not new[prefix + "lambda_proj.weight"].any()
    for query in new[prefix + "q_proj.weight"].unflatten(0, (8, 2, 4)).unbind(1):
        assert torch.equal(query.flatten(0, 1), old[prefix + "q_proj.weight"])


def test_a_weight_too_large_to_double_is_refused(theirs: Folder, tmp_path: Path) -> None:
    source = theirs(LlamaForCausalLM)
    old = {key: x.half() for key, x in load_file(source / "model.safetensors").items()}
    old["model.layers.1.self_attn.o_proj.weight"][0, 0] = 40000
    save_file(old, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.o_proj\.weight cannot be converted in torch\.float16"):
        convert_from("llama", source, tmp_path / "new", attention_type="diff_v2")
    assert not (tmp_path / "new").exists()


def test_gradients_part_the_equal_maps_from_the_first_step(theirs: Folder, tokens: Tensor, tmp_path: Path) -> None:
    """The queries' gradients are 1 : −½, and that of W_λ is not 0."""
    convert_from("llama", theirs(LlamaForCausalLM), tmp_path / "new", attention_type="diff_v2")
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new")
    for maps in attention_maps(model, tokens):
        assert torch.equal(maps.first, maps.second)
        assert torch.equal(maps.difference, maps.first / 2)
    model(tokens, labels=tokens).loss.backward()
    for layer in model.model.layers:
        first, second = layer.self_attn.q_proj.weight.grad.unflatten(0, (8, 2, 4)).unbind(1)
        assert first.abs().max() > 1e-4
        torch.testing.assert_close(second, -first / 2, rtol=1e-3, atol=1e-6)
        assert layer.self_attn.lambda_proj.weight.grad.abs().max() > 1e-5
