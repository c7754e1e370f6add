"""A Llama becomes a "dex" or a DIFF V2 that computes the same; what was trained as "dex" folds back into a Llama."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from diff_transformer import DiffTransformerForCausalLM, attention_maps
from diff_transformer.convert import convert_from, convert_to
from diff_transformer.nn import AnnealedLambda, DexCorrection
from layers_by_hand import check, tensors_in

Folder = Callable[..., Path]
Logits = Callable[..., Tensor]

SOME = [[1, 2, 7], [], [0]]  # three layers, one of them without
# Groups, none, and numbers of heads that are odd: no DIFF model has those.
SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 8},
    {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
)
V2_SHAPES = ({}, {"num_key_value_heads": 2}, {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None})


def trained(folder: Path, progress: float) -> None:
    """As after training: W_D large, λ_learn elsewhere, the annealing so far."""
    model = DiffTransformerForCausalLM.from_pretrained(folder)
    for module in model.modules():
        if isinstance(module, DexCorrection):
            torch.nn.init.normal_(module.weight, std=0.7)
        if isinstance(module, AnnealedLambda):
            torch.nn.init.uniform_(module.learned, 0.5, 1.5)
    model.set_dex_progress(progress)
    model.save_pretrained(folder)


def cast(folder: Path, dtype: torch.dtype, shard_size: str = "5GB") -> Path:
    """The Llama in a folder, in another dtype."""
    model = LlamaForCausalLM.from_pretrained(folder).to(dtype)
    model.save_pretrained(folder.with_name("cast"), max_shard_size=shard_size)
    return folder.with_name("cast")


@pytest.mark.parametrize("heads", [None, SOME], ids=["all heads", "some heads"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_the_start_is_exact_and_the_trained_model_folds(
    heads: Any, shape: dict[str, Any], tied: bool, theirs: Folder, logits: Logits, tmp_path: Path
) -> None:
    source = theirs(LlamaForCausalLM, tie_word_embeddings=tied, **shape)
    ours, back = tmp_path / "new", tmp_path / "back"
    expected = logits(source, LlamaForCausalLM)
    done = convert_from("llama", source, ours, attention_type="dex", dex_heads=heads)
    assert done.attention_type == "dex"
    assert json.loads((ours / "config.json").read_text()).get("dex_heads") == heads
    check(logits(ours), expected)
    convert_to("llama", ours, back)
    assert torch.equal(logits(back, LlamaForCausalLM), expected)  # W_D = 0 leaves W_O's bits alone
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())

    trained(ours, 0.7)
    corrected = logits(ours)
    assert (corrected - expected).abs().max() > 0.1 * expected.abs().max()
    convert_to("llama", ours, tmp_path / "folded")
    check(logits(tmp_path / "folded", LlamaForCausalLM), corrected)


def test_what_is_written(theirs: Folder, tmp_path: Path) -> None:
    """λ in float32 beside half-precision weights, W_D in their dtype, nothing for a layer without chosen heads."""
    source = cast(theirs(LlamaForCausalLM), torch.bfloat16, shard_size="20KB")
    before = tensors_in(source)
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16}
    arguments: dict[str, Any] = {"attention_type": "dex", "dex_heads": SOME, "dex_lambda_start": 1 / 3}
    convert_from("llama", source, tmp_path / "new", max_shard_size="20KB", **arguments)
    after = tensors_in(tmp_path / "new")
    added = {key: after.pop(key) for key in sorted(after.keys() - before.keys())}
    assert {key: (tuple(value.shape), value.dtype) for key, value in added.items()} == {
        f"model.layers.{layer}.self_attn.dex.{name}": (shape, dtype)
        for layer, count in ((0, 3), (2, 1))
        for name, shape, dtype in (
            ("weight", (count, 4, 4), torch.bfloat16),
            ("lam.learned", (1,), torch.float32),
            ("lam.progress", (), torch.float32),
        )
    }
    for key, value in added.items():
        expected = {"weight": 0.0, "learned": torch.tensor(1 / 3).item(), "progress": 1.0}[key.rpartition(".")[2]]
        assert (value == expected).all(), key
    assert all(torch.equal(after[key], before[key]) for key in before)
    _, report = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not any(report.values())


def test_folding_rounds_once_to_the_dtype(theirs: Folder, tmp_path: Path) -> None:
    source, ours = cast(theirs(LlamaForCausalLM), torch.bfloat16), tmp_path / "new"
    convert_from("llama", source, ours, attention_type="dex")
    weights = load_file(ours / "model.safetensors")
    key = "model.layers.1.self_attn."
    weights[f"{key}dex.weight"] = torch.randn(8, 4, 4).bfloat16()
    weights[f"{key}dex.lam.learned"], weights[f"{key}dex.lam.progress"] = torch.tensor([0.9]), torch.tensor(0.25)
    save_file(weights, ours / "model.safetensors", metadata={"format": "pt"})
    convert_to("llama", ours, tmp_path / "back")
    lam = 0.75 * 0.25 * (0.8 - 0.6 * 2.718281828459045**-0.3) + 0.25 * torch.tensor(0.9).item()
    blocks = [torch.eye(4).double() - lam * matrix.double() for matrix in weights[f"{key}dex.weight"]]
    expected = weights[f"{key}o_proj.weight"].double() @ torch.block_diag(*blocks).T
    folded = tensors_in(tmp_path / "back")
    assert torch.equal(folded[f"{key}o_proj.weight"], expected.bfloat16())
    assert torch.equal(
        folded["model.layers.0.self_attn.o_proj.weight"], weights["model.layers.0.self_attn.o_proj.weight"]
    )
    assert not any("dex" in name for name in folded)


def test_too_large_to_fold(theirs: Folder, tmp_path: Path) -> None:
    source, ours = cast(theirs(LlamaForCausalLM), torch.float16), tmp_path / "new"
    convert_from("llama", source, ours, attention_type="dex")
    weights = load_file(ours / "model.safetensors")
    weights["model.layers.0.self_attn.dex.weight"] += 60000
    weights["model.layers.0.self_attn.o_proj.weight"] += 10
    save_file(weights, ours / "model.safetensors", metadata={"format": "pt"})
    message = r"^model\.layers\.0\.self_attn\.o_proj\.weight cannot be converted in torch\.float16: .* not finite\.$"
    with pytest.raises(ValueError, match=message):
        convert_to("llama", ours, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_bad_choices(theirs: Folder, tmp_path: Path) -> None:
    source, target = theirs(LlamaForCausalLM), tmp_path / "new"
    with pytest.raises(ValueError, match=r"^dex_heads and dex_lambda_start belong to .* 'dex', not to 'softmax'\.$"):
        convert_from("llama", source, target, dex_heads=SOME)
    with pytest.raises(ValueError, match=r"dex_heads of layer 2, .* ascending numbers in 0 … 7, got 8\.$"):
        convert_from("llama", source, target, attention_type="dex", dex_heads=[[0], [1], [8]])
    with pytest.raises(ValueError, match=r"can become 'softmax' or 'diff_v2' or 'dex', not 'diff'\.$"):
        convert_from("llama", source, target, attention_type="diff")
    assert not target.exists()


@pytest.mark.parametrize("shape", V2_SHAPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_diff_v2_begins_with_the_logits_of_its_source(
    shape: dict[str, int], tied: bool, theirs: Folder, logits: Logits, tmp_path: Path
) -> None:
    source = theirs(LlamaForCausalLM, tie_word_embeddings=tied, **shape)
    assert convert_from("llama", source, tmp_path / "new", attention_type="diff_v2").attention_type == "diff_v2"
    check(logits(tmp_path / "new"), logits(source, LlamaForCausalLM))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_nothing_is_rounded_on_the_way_to_diff_v2(dtype: torch.dtype, theirs: Folder, tmp_path: Path) -> None:
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
