"""Attention maps: output_attentions and attention_maps."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import oracle
from diff_transformer import DiffTransformerForCausalLM, attention_maps
from sharp_layers import by_oracle
from tiny_model import PAIRED, has_lambda_vectors, make, tokens

HEADS = {"diff": 4, "diff_grouped": 6, "diff_v2": 8, "diff_v3": 8, "diff_v2_grouped": 6, "gdla": 6, "softmax": 8}
# Maps that output_attentions gives of a head: one for each value of width d.
TIMES = {kind: 2 if kind in PAIRED else 1 for kind in HEADS}


def layer_input(model: DiffTransformerForCausalLM, layer: int, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """What the attention of a layer receives."""
    seen = []
    module = model.model.layers[layer].input_layernorm
    handle = module.register_forward_hook(lambda _, __, output: seen.append(output.detach()))
    model(tokens, attention_mask=mask, use_cache=False)
    handle.remove()
    return seen[0]


def maps_by_oracle(
    model: DiffTransformerForCausalLM, layer: int, tokens: Tensor, mask: Tensor | None = None
) -> oracle.Forward:
    """The maps of a layer, from its weights and what its attention receives."""
    found, attend = list[oracle.Forward](), oracle.attention

    def noted(*tensors: Any, **options: Any) -> oracle.Forward:
        found.append(attend(*tensors, **options))
        return found[-1]

    options: dict[str, Any] = {"attn_mask": None if mask is None else mask.bool()[:, None, None]}
    options |= {"layer": layer + 1} if model.config.attention_type in PAIRED else {}
    x, attention = layer_input(model, layer, tokens, mask), model.model.layers[layer].self_attn
    with mock.patch.object(oracle, "attention", noted):
        by_oracle(attention, x, positions=range(x.shape[1]), is_causal=True, **options)
    return found[0]


# transformers' rotary tables are float32, and so is its eager softmax.
def close(answer: Tensor, expected: Any) -> None:
    torch.testing.assert_close(answer.double(), torch.as_tensor(expected).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_reference", "eager"])
def test_output_attentions(kind: str, implementation: str) -> None:
    """A1 − λA2 of every layer, or the ordinary map: one for each head of the Transformer, as Llama's, (B, A, N, S).

    Rows add up to 1 − λ. Two heads of the Transformer are one of DIFF, and have its map.
    """
    model, inputs = make(kind, attn_implementation=implementation), tokens()
    out = model(inputs, output_attentions=True)
    assert torch.equal(out.logits, model(inputs).logits)
    model.config._output_attentions = True  # as a configuration that was made with output_attentions=True
    assert [*map(torch.equal, model(inputs).attentions, out.attentions)] == [True, True]
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, HEADS[kind] * TIMES[kind], 9, 9)] * 2
    maps = [weights[:, :: TIMES[kind]] for weights in out.attentions]
    for layer, weights in enumerate(maps):
        assert torch.equal(weights.repeat_interleave(TIMES[kind], 1), out.attentions[layer])
        expected = maps_by_oracle(model, layer, inputs)
        close(weights, expected.difference)
        assert not weights.triu(1).any()
        close(weights.sum(-1), expected.signal_weight - expected.lam)
        if kind != "softmax":
            assert (weights < -0.05).any()  # nothing is clamped
    if has_lambda_vectors(kind):
        for weights, lam in zip(maps, model.lambdas(), strict=True):
            close(weights.sum(-1), torch.full((2, HEADS[kind], 9), 1 - lam))


def test_output_attentions_weigh_the_values(kind: str) -> None:
    """Map a weighs the value channels a·d … (a + 1)·d, in every type; under "eager" a gradient reaches it."""
    model, inputs = make(kind, num_key_value_heads=8, attn_implementation="eager"), tokens()
    attention, seen = model.model.layers[1].self_attn, {}
    attention.v_proj.register_forward_hook(lambda _, __, output: seen.update(values=output))
    if kind in PAIRED:
        attention.head_norm.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0]))
    else:
        attention.o_proj.register_forward_pre_hook(lambda _, args: seen.update(heads=args[0]))
    out = model(inputs, output_attentions=True)
    maps = out.attentions[1]
    expected = torch.einsum("bans,bsad->bnad", maps.double(), seen["values"].unflatten(-1, (-1, 4)))
    close(seen["heads"].flatten(2), expected.flatten(2))
    maps.retain_grad()
    out.logits.sum().backward()
    assert maps.grad.abs().sum() > 0


def test_output_attentions_through_a_cache(kind: str) -> None:
    """N < S: the last rows of the whole maps."""
    model, inputs = make(kind), tokens()
    full_maps = model(inputs, output_attentions=True).attentions
    cache = model(inputs[:, :6]).past_key_values
    parts = model(inputs[:, 6:], past_key_values=cache, output_attentions=True).attentions
    for part, full in zip(parts, full_maps, strict=True):
        assert part.shape == (2, HEADS[kind] * TIMES[kind], 3, 9)
        close(part, full[:, :, 6:])


@pytest.mark.parametrize("cache", ["static", "quantized"])
def test_output_attentions_through_other_caches_are_those_of_eager(kind: str, cache: str) -> None:
    """A static cache has slots without a token, whose columns are 0; of one in eight bits the rounded keys are seen."""
    options: dict[str, Any] = {"output_attentions": True, "return_dict_in_generate": True, "do_sample": False}
    options |= {"cache_implementation": cache, "max_new_tokens": 3, "min_new_tokens": 3, "pad_token_id": 0}
    own, eager = (
        make(kind, attn_implementation=name).generate(tokens(), **options) for name in ("diff_attention", "eager")
    )
    assert torch.equal(own.sequences, eager.sequences)
    for step, expected in zip(own.attentions, eager.attentions, strict=True):
        for maps, others in zip(step, expected, strict=True):
            close(maps, others)


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_sdpa", "sdpa", "eager"])
def test_attention_maps(kind: str, implementation: str) -> None:
    """The same maps whatever the model is set to, which stays as it was."""
    model, inputs = make(kind, torch.float32, attn_implementation=implementation), tokens()
    maps = attention_maps(model, inputs)
    assert model.config._attn_implementation == implementation
    assert len(maps) == 2
    model = model.double()
    for layer, (first, second, difference) in enumerate(maps):
        expected = maps_by_oracle(model, layer, inputs)
        # float32 throughout: logits up to 20 are off by 20 eps, and the second layer's inputs by what the first made.
        limit = {"rtol": 0, "atol": 500 * torch.finfo(torch.float32).eps}
        assert difference.shape == (2, HEADS[kind], 9, 9)
        assert difference.dtype == torch.float32
        assert not difference.requires_grad
        torch.testing.assert_close(difference.double(), torch.from_numpy(expected.difference), **limit)
        if kind == "softmax":
            assert first is None
            assert second is None
        else:
            torch.testing.assert_close(first.double(), torch.from_numpy(expected.first), **limit)
            torch.testing.assert_close(second.double(), torch.from_numpy(expected.second), **limit)


def test_attention_maps_of_a_padded_batch(kind: str) -> None:
    """Nothing looks at padding, and padding looks at nothing."""
    model, inputs = make(kind), tokens()
    mask = torch.ones_like(inputs)
    mask[0, :4] = 0
    for layer, maps in enumerate(attention_maps(model, inputs, mask)):
        expected = maps_by_oracle(model, layer, inputs, mask)
        close(maps.difference, expected.difference)
        assert not maps.difference[0, :, :, :4].any()
        assert not maps.difference[0, :, :4].any()
        if kind != "softmax":
            sums = mask[:, None].double().expand(2, HEADS[kind], 9)
            close(maps.first.sum(-1), sums)
            close(maps.second.sum(-1), sums)


@pytest.mark.parametrize("implementation", ["diff_attention", "diff_attention_reference", "eager"])
def test_shapes_alone(kind: str, implementation: str) -> None:
    """On the meta device, the weights and the loss of a model that is too large to be there."""
    model = make(kind, torch.float32, attn_implementation=implementation).to("meta")
    inputs = tokens().to("meta")
    out = model(inputs, output_attentions=True)
    assert {a.shape[::2] for a in out.attentions} == {(2, 9)}
    assert all(a.shape[3] == 9 and a.is_meta for a in out.attentions)
    model(inputs, labels=inputs, chunked_loss=True).loss.backward()
    assert all(parameter.grad.is_meta for parameter in model.parameters())
