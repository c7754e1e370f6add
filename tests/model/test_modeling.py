"""The causal language model: against the float64 oracle, its sizes, its outputs, its start."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import oracle
from diff_lab.train.run_setup import draw_weights
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.cache import CACHE_NAME
from sharp_layers import by_oracle as layer_by_oracle
from tiny_model import COMPUTES_IN, IMPLEMENTATIONS, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Rotary64(nn.Module):
    """The model's rotary tables in float64 (transformers' own are float32 in every dtype)."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * 10000.0 ** -(torch.arange(0, 4, 2, dtype=torch.float64) / 4).repeat(2)
        return angles.cos(), angles.sin()


def by_oracle(model: DiffTransformerForCausalLM, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits from the model's weights and the oracle's layers alone."""
    weights = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    config, hidden = model.config, weights["model.embed_tokens.weight"][tokens.numpy()]
    options: dict[str, Any] = {"positions": range(tokens.shape[1]), "is_causal": True}
    options |= {"eps": config.norm_eps_in_attention, "attn_mask": None if mask is None else mask.bool()[:, None, None]}
    if config.spec.pairs_heads:
        options["init"] = None if config.lambda_init == "schedule" else config.lambda_init
    for i in range(config.num_hidden_layers):
        part = {
            name.removeprefix(f"model.layers.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"model.layers.{i}.")
        }
        if config.spec.pairs_heads:
            options["layer"] = i + 1

        def attend(x: Any, layer: int = i) -> Any:
            return layer_by_oracle(model.model.layers[layer].self_attn, torch.from_numpy(x), **options)

        mlp = [part[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")]
        norms = [part["input_layernorm.weight"], part["post_attention_layernorm.weight"]]
        poly_norm = (part["mlp.act_fn.weight"], part["mlp.act_fn.bias"]) if config.hidden_act == "poly_norm" else None
        hidden = oracle.decoder_layer(hidden, attend, *mlp, *norms, config.rms_norm_eps, poly_norm)
    normed = oracle.rms_norm(hidden, weights["model.norm.weight"], config.rms_norm_eps)
    return torch.from_numpy(normed @ head.T)


VARIANTS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "no grouping": {"num_key_value_heads": 8},
    "one key head for all": {"num_key_value_heads": 2},
    "constant λ_init, another eps": {"lambda_init": 0.5, "rms_norm_eps": 1e-2},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 1},
    "with the headwise norm": {"headwise_norm": True, "rms_norm_eps": 1e-2},
    "without the headwise norm": {"headwise_norm": False},
    "another eps in attention": {"headwise_norm": True, "attention_norm_eps": 1e-2},
    "PolyNorm": {"hidden_act": "poly_norm"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_model_against_the_oracle(kind: str, variant: str) -> None:
    model, inputs = make(kind, **VARIANTS[variant]), tokens(length=6)
    expected = by_oracle(model, inputs)
    # transformers' tables are float32: their angles, up to 5, are off by up to 5 eps of it, and logits with them.
    check(model(inputs).logits, expected, dtype=torch.float32)
    model.model.rotary_emb = Rotary64()
    check(model(inputs).logits, expected)


def test_left_padding_against_the_oracle(kind: str) -> None:
    model, inputs = make(kind), tokens(length=6)
    model.model.rotary_emb = Rotary64()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    answer, expected = model(inputs, attention_mask=mask).logits, by_oracle(model, inputs, mask)
    check(answer, expected)  # padding included: it sees nothing and adds nothing


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("tied", "kv_heads", "layers", "head_dim"), [(False, 8, 1, 4), (True, 4, 3, 6)])
def test_parameter_counts(tied: bool, kv_heads: int, layers: int, head_dim: int) -> None:
    """DIFF and the Transformer differ by 4d (λ) + 2d (headwise norm) in each layer, and by nothing else."""
    sizes = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    sizes |= {"num_hidden_layers": layers, "head_dim": head_dim}
    diff, softmax, v2 = (make(kind, **sizes) for kind in ("diff", "softmax", "diff_v2"))
    assert count(diff) - count(softmax) == (4 * head_dim + 2 * head_dim) * layers
    assert count(v2) - count(softmax) == (24 * 8 * head_dim + 24 * 8) * layers
    attention = 24 * head_dim * (8 + 2 * kv_heads + 8)
    assert count(softmax) == 29 * 24 * (1 if tied else 2) + layers * (attention + 3 * 24 * 20 + 2 * 24) + 24
    shared = dict(softmax.named_parameters())
    assert all(diff.get_parameter(name).shape == parameter.shape for name, parameter in shared.items())


def test_causality_is_exact(kind: str) -> None:
    """A change at position t leaves every earlier logit bit-identical, in each implementation."""
    inputs = tokens()
    changed = inputs.clone()
    changed[:, 5] = (inputs[:, 5] + 3) % 28 + 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for implementation in IMPLEMENTATIONS:
            model = make(kind, dtype, attn_implementation=implementation)
            before, after = model(inputs).logits, model(changed).logits
            assert torch.equal(before[:, :5], after[:, :5]), implementation
            assert (before[:, 5:] != after[:, 5:]).any(-1).all(), implementation


def test_inputs_embeds(kind: str) -> None:
    model, inputs = make(kind), tokens()
    embeds = model.get_input_embeddings()(inputs)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(inputs).logits)
    for bad in ({}, {"input_ids": inputs, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="one of input_ids and inputs_embeds"):
            model(**bad)
    for shape, bad in (("9,", {"input_ids": inputs[0]}), ("2, 0", {"input_ids": inputs[:, :0]})):
        with pytest.raises(ValueError, match=rf"input_ids must be \(B, N\), .* with N of 1 or more, got \({shape}\)"):
            model(**bad)
    with pytest.raises(ValueError, match=r"inputs_embeds \(B, N, D\), with N of 1 or more, got \(9, 24\)"):
        model(inputs_embeds=embeds[0])


def test_logits_to_keep() -> None:
    model, inputs = make(), tokens()
    full = model(inputs).logits
    for keep, expected in ((0, full), (1, full[:, -1:]), (3, full[:, -3:]), (torch.tensor([2, 5]), full[:, [2, 5]])):
        check(model(inputs, logits_to_keep=keep).logits, expected)


@pytest.mark.parametrize("window", [None, 4])
def test_both_directions(window: int | None, kind: str) -> None:
    """``is_causal=False``, which transformers' models take: a token sees every other, or those up to a window away.

    None is what a caller passes on that has no opinion.
    """
    inputs, i = tokens(length=13), torch.arange(13)
    near = ((i[None, :] - i[:, None]).abs() <= (window or 13))[None, None]
    for implementation in ("diff_attention", "diff_attention_reference", "sdpa", "eager"):
        model = make(kind, sliding_window=window, attn_implementation=implementation)
        both, causal = model(inputs, is_causal=False, use_cache=False).logits, model(inputs).logits
        check(both, model(inputs, attention_mask=near, use_cache=False).logits, dtype=COMPUTES_IN.get(implementation))
        assert (both - causal).abs().max() > 0.1
        assert torch.equal(model(inputs, is_causal=None).logits, causal)


def test_outputs(kind: str) -> None:
    model, inputs = make(kind), tokens()
    out = model(inputs, output_hidden_states=True)
    assert [tuple(state.shape) for state in out.hidden_states] == [(2, 9, 24)] * 3
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(inputs))
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)  # the last one is normed, as Llama's
    assert out.past_key_values.get_seq_length() == 9
    assert out.loss is None
    assert out.attentions is None
    assert model(inputs, use_cache=False).past_key_values is None
    as_tuple = model(inputs, labels=inputs, return_dict=False)
    assert isinstance(as_tuple, tuple)
    assert as_tuple[0].dim() == 0
    assert torch.equal(as_tuple[1], out.logits)


def test_lambdas() -> None:
    """λ of each layer as it is now, in the order of the layers; None where a layer has no such number."""
    model = make(num_hidden_layers=3)
    expected = []
    for number, layer in enumerate(model.model.layers, start=1):
        vectors = [getattr(layer.self_attn.lam, name).detach().numpy() for name in ("q1", "k1", "q2", "k2")]
        expected.append(oracle.lambda_value(*vectors, oracle.lambda_init(number)))
    assert model.lambdas() == pytest.approx(expected, rel=1e-12)
    assert all(type(value) is float for value in model.lambdas())
    assert model.model.lambdas() == model.lambdas()
    assert max(expected) - min(expected) > 0.05
    for vector in model.model.layers[1].self_attn.lam.parameters():
        nn.init.zeros_(vector)
    assert model.lambdas()[1] == pytest.approx(oracle.lambda_init(2), rel=1e-12)
    assert make("softmax").lambdas() is None
    assert make("diff_v2").lambdas() is None


@pytest.mark.parametrize("std", [0.0, 0.01])
def test_what_is_added_to_the_residual_stream_has_a_start_of_its_own(std: float, kind: str) -> None:
    """W_O and W_down alone, by transformers' path and by that of training; all other weights are as without it."""
    sizes = {"sharp": False, "initializer_range": 0.1, "head_dim": 32, "hidden_size": 64, "vocab_size": 300}
    for draw in (lambda _: None, lambda model: draw_weights(model, seed=3)):
        torch.manual_seed(0)
        plain = make(kind, torch.float32, **sizes)
        torch.manual_seed(0)
        model = make(kind, torch.float32, **sizes, residual_initializer_range=std)
        draw(plain)
        draw(model)
        for (name, weight), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            factor = std / 0.1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.testing.assert_close(weight, other * factor, msg=name)


def test_padding_token_starts_at_zero() -> None:
    weight = make(sharp=False, pad_token_id=0).model.embed_tokens.weight
    assert not weight[0].any()
    assert weight[1:].any(-1).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool, kind: str) -> None:
    """The same loss and gradients to the last bit, from layers that ran twice."""
    model, inputs = make(kind).train(), tokens()
    runs: list[str] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append("mlp"))

    def solve() -> tuple[int, dict[str, Tensor]]:
        runs.clear()
        model.zero_grad()
        loss = model(inputs, labels=inputs, use_cache=False).loss
        loss.backward()
        return len(runs), {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}

    ordinary_runs, ordinary = solve()
    # transformers renamed this method and warns about the old name; the oldest version we take has only that.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    checkpointed_runs, checkpointed = solve()
    assert (ordinary_runs, checkpointed_runs) == (2, 4)
    assert model(inputs).past_key_values is None  # as Llama's: a layer that runs twice would fill a cache twice
    assert model.eval()(inputs).past_key_values is not None
    torch.testing.assert_close(checkpointed, ordinary, rtol=0, atol=0)


def test_dynamic_rotary_scaling(kind: str) -> None:
    """Beyond the trained length; tests/convert/test_logits.py compares transformers' other scalings with Llama's."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    long = tokens(length=70)
    scaled, plain = make(kind, rope_parameters=rope)(long).logits, make(kind)(long).logits
    assert scaled.isfinite().all()
    assert (scaled - plain).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, kind: str) -> None:
    """Logits come in the dtype, off from float64 with the same weights by its rounding alone.

    Two layers of peaked attention: 8 roundings of eps/2 each, in the root mean square of the logits.
    """
    model, inputs = make(kind, dtype), tokens()
    logits = model(inputs).logits
    assert logits.dtype == dtype
    truth = by_oracle(model, inputs)
    error = (logits.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert error < 8 * torch.finfo(dtype).eps / 2
    model(inputs, labels=inputs).loss.backward()
    assert all(p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_resizing_the_embeddings(kind: str, tied: bool) -> None:
    """Old tokens keep their logits, new ones get some and train; smaller again, the model is what it was."""
    model, inputs = make(kind, tie_word_embeddings=tied), tokens()
    before = model(inputs).logits.detach()
    model.resize_token_embeddings(40, mean_resizing=False)
    assert model.config.vocab_size == model.vocab_size == model.model.embed_tokens.num_embeddings == 40
    assert model.lm_head.weight.shape == (40, 24)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    check(model(inputs).logits[..., :29].detach(), before)
    new = torch.full((2, 9), 35)
    model(new, labels=new).loss.backward()
    assert model.lm_head.weight.grad[35].abs().sum() > 0
    assert model.model.embed_tokens.weight.grad[35].abs().sum() > 0
    model.resize_token_embeddings(29)
    check(model(inputs).logits, before)
    model.resize_token_embeddings(30, pad_to_multiple_of=16)
    assert model(inputs).logits.shape[-1] == 32


def test_a_cache_is_neither_moved_nor_gathered() -> None:
    """accelerate leaves it where it is, and the Trainer leaves it out of predictions, by the name that Llama's has."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    llama, model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), make()
    assert set(llama._skip_keys_device_placement) <= set(model._skip_keys_device_placement)
    assert CACHE_NAME in model.config.keys_to_ignore_at_inference
