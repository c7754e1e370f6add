"""The entropy of heads, on attention that is known, and the choice of heads by it."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert.loaded_models import head_entropies, widest_heads
from tiny_model import SIZES

MODEL: dict[str, Any] = {**SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
LENGTHS = (9, 5)


def sequences() -> list[torch.Tensor]:
    return [torch.randint(0, 29, (length,)) for length in LENGTHS]


def llama() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**MODEL, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.8)
    return model


def test_heads_that_see_all_alike_and_one_that_sees_little() -> None:
    """No query: log n in row n, averaged over the rows of all sequences. Queries of great length: nearly 0."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[: 2 * 4] = 0
        model.model.layers[0].self_attn.q_proj.weight[2 * 4 : 3 * 4] *= 1e4
    entropies = head_entropies(model, sequences())
    assert entropies.shape == (2, 6)
    rows = [math.log(n) for length in LENGTHS for n in range(1, length + 1)]
    for head in (0, 1):
        assert entropies[0, head].item() == pytest.approx(sum(rows) / len(rows), rel=1e-5)
    assert entropies[0, 2] < 0.05
    assert ((entropies >= 0) & (entropies <= entropies[0, 0] + 1e-6)).all()
    assert widest_heads(entropies, 0.34)[0] == [0, 1]


def test_our_twin_answers_as_llama() -> None:
    source, tokens = llama(), sequences()
    softmax = DiffTransformerForCausalLM(DiffTransformerConfig(**MODEL, attention_type="softmax")).eval()
    softmax.load_state_dict(source.state_dict())
    torch.testing.assert_close(head_entropies(softmax, tokens), head_entropies(source, tokens))


def test_the_choice() -> None:
    entropies = torch.tensor([[0.1, 0.9, 0.5, 0.8], [3.0, 1.0, 2.0, 0.0]])
    assert widest_heads(entropies, 0.5) == [[1, 3], [0, 2]]
    assert widest_heads(entropies, 0.01) == [[1], [0]]
    assert widest_heads(entropies, 1) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_bad_share(share: float) -> None:
    with pytest.raises(ValueError, match=rf"^share must be more than 0 and up to 1, got {share}\.$"):
        widest_heads(torch.zeros(1, 4), share)


def test_refusals() -> None:
    model = llama()
    with pytest.raises(ValueError, match=r"needs one sequence or more, got none\.$"):
        head_entropies(model, [])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM returns no attention weights as 'sdpa'; .*'eager'.*\.$"):
        head_entropies(model, sequences())
