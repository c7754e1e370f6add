"""A Llama becomes a DIFF V2 that computes the same, goes on training from there, and whose maps part."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

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


@pytest.fixture(scope="module")
def text() -> Tensor:
    """Sequences (B, N) in which every token is the one before plus the one two before it, modulo 13."""
    generator = torch.Generator().manual_seed(1)
    columns = list(torch.randint(0, 13, (2, 64), generator=generator))
    for _ in range(14):
        columns.append((columns[-1] + columns[-2]) % 13)
    return torch.stack(columns, 1)


def train(model: torch.nn.Module, text: Tensor, steps: int, rate: float) -> list[float]:
    """The loss on all of `text` before each step and after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    losses = []
    for step in range(steps + 1):
        loss = model(text, labels=text).loss
        losses.append(loss.item())
        if step < steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


@pytest.fixture(scope="module")
def trained_llama(text: Tensor, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a small Llama, trained on the spot, and its loss."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=13, num_hidden_layers=2, max_position_embeddings=16, **sizes))
    losses = train(model, text, 18, 1e-2)
    assert losses[-1] < losses[0] - 0.3  # it has learnt something, and has something left to learn
    assert losses[-1] > 0.5
    folder = tmp_path_factory.mktemp("trained") / "llama"
    model.save_pretrained(folder)
    return folder, losses[-1]


def test_training_goes_on_from_the_source_s_loss_and_parts_the_maps(
    trained_llama: tuple[Path, float], text: Tensor, tmp_path: Path
) -> None:
    source, last = trained_llama
    convert_from("llama", source, tmp_path / "new", attention_type="diff_v2")
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new")
    for maps in attention_maps(model, text):
        assert torch.equal(maps.first, maps.second)
        assert torch.equal(maps.difference, maps.first / 2)
    losses = train(model, text, 10, 1e-3)
    assert losses[0] == pytest.approx(last, abs=1e-5)
    assert all(after < before for before, after in itertools.pairwise(losses)), "the loss jumped"
    assert losses[-1] < last - 0.15
    # The Llama itself, trained on: neither start is behind the other.
    assert losses == pytest.approx(train(LlamaForCausalLM.from_pretrained(source), text, 10, 1e-3), abs=0.03)
    for maps in attention_maps(model, text):
        assert (maps.first - maps.second).abs().max() > 0.01


def test_gradients_part_the_maps_from_the_first_step(
    trained_llama: tuple[Path, float], text: Tensor, tmp_path: Path
) -> None:
    """The queries' gradients are 1 : −½, and that of W_λ is not 0."""
    convert_from("llama", trained_llama[0], tmp_path / "new", attention_type="diff_v2")
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path / "new")
    model(text, labels=text).loss.backward()
    for layer in model.model.layers:
        first, second = layer.self_attn.q_proj.weight.grad.unflatten(0, (4, 2, 8)).unbind(1)
        assert first.abs().max() > 1e-4
        torch.testing.assert_close(second, -first / 2, rtol=1e-3, atol=1e-7)
        assert layer.self_attn.lambda_proj.weight.grad.abs().max() > 1e-5
