"""Options of the attention modules: biases, norms of queries and keys, a gate, dropout, and keys of another sequence.

The truth is the oracle in float64 where it has the option, else the equations written out for one module.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from transformers import DynamicCache

from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.nn import Attention, DifferentialAttention, LatentDiffAttention
from diff_transformer.ops import apply_rotary, diff_attention
from sharp_layers import build, by_oracle, check, inputs, tables
from tiny_model import NOT_LATENT

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "qk_norm": {"qk_norm": True},
    "qk_clip": {"qk_clip": True},
    "output_gate": {"output_gate": True},
    "exclusive": {"exclusive": True},
    "no rotary": {"rotary": False},
    "all": {"bias": True, "qk_norm": True, "output_gate": True},
    "all, grouped": {"bias": True, "qk_norm": True, "output_gate": True, "num_key_value_heads": 4},
    "others, grouped": {"qk_clip": True, "exclusive": True, "num_key_value_heads": 4},
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped by 2": {"num_key_value_heads": 4},
    "grouped by 4": {"num_key_value_heads": 2},
    "the other way with the headwise norm": {"headwise_norm": None},  # the controls of Table 6
}


def written_out(
    module: Attention,
    x: Tensor,
    tables: tuple[Tensor, Tensor] | None = None,
    is_causal: bool = False,
    context: Tensor | None = None,
    mask: Tensor | None = None,
    sizes: list[float] | None = None,
) -> Tensor:
    """The layer by matrix products of its parameters, one head and one map at a time, (N, D) → (N, D).

    The smallest root mean square that the headwise norm divides by is added to `sizes`, for each head.
    """
    d, weight = module.head_dim, dict(module.named_parameters())
    source = x if context is None else context

    def projected(name: str, of: Tensor) -> Tensor:
        out = of @ weight[f"{name}_proj.weight"].T
        return out + weight[f"{name}_proj.bias"] if f"{name}_proj.bias" in weight else out

    def turned(each: list[Tensor]) -> list[Tensor]:
        if tables is None or not module.rotary:
            return each
        first = each[0].shape[1] - module.rotary_width
        return [torch.cat((h[:, :first], apply_rotary(h[:, first:], *tables)), 1) for h in each]

    def latent(name: str, part: Tensor) -> Tensor:
        return part / (part.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight[f"{name}_layernorm.weight"]

    def heads(name: str, of: Tensor) -> list[Tensor]:
        each = [projected(name, of)[:, i : i + d] for i in range(0, len(weight[f"{name}_proj.weight"]), d)]
        if f"{name}_norm.weight" in weight:
            each = [h / (h.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight[f"{name}_norm.weight"] for h in each]
        if module.q_norm is not None and "q_norm.weight" not in weight:
            each = [h * (3 / (h.square().mean(1, keepdim=True) + 1e-5).sqrt()).clamp(max=1) for h in each]
        return turned(each)

    if isinstance(module, LatentDiffAttention):
        both, rank = projected("kv_a", source), len(weight["kv_a_layernorm.weight"])
        c = latent("kv_a", both[:, :rank])
        q, v = heads("q", latent("q_a", projected("q_a", x))), projected("v", c)
        nopes = projected("k", c).split(d - module.rotary_width, 1)
        k = turned([torch.cat((nope, both[:, rank:]), 1) for nope in nopes])
    else:
        q, k, v = heads("q", x), heads("k", source), projected("v", source)
    hidden = torch.zeros(len(x), len(source), dtype=torch.bool)
    if is_causal:
        hidden = ~torch.ones_like(hidden).tril()
    if mask is not None:
        hidden = hidden | ~mask

    def attended(query: Tensor, key: Tensor) -> Tensor:
        scores = (query @ key.T / math.sqrt(d)).masked_fill(hidden, -math.inf)
        return scores.softmax(1)

    width = module.value_width
    values = [v[:, i : i + width] for i in range(0, v.shape[1], width)]
    outs = []
    if isinstance(module, DifferentialAttention):
        lam, weights, ratio = module.lambdas(x.unsqueeze(0)), module.signal_weights(x.unsqueeze(0)), module.ratio
        shared, groups = not module.pairs_kv_heads, len(q) // (ratio + 1)
        for h in range(groups * ratio):
            first = h // ratio * (ratio + 1)  # query of the head's group
            g = h // ratio // (groups // len(values))
            keys = (k[g], k[g]) if shared else (k[2 * g], k[2 * g + 1])
            per_row = lam if lam.dim() == 0 else lam[0, h].unsqueeze(1)
            noise = attended(q[first + ratio], keys[1])
            signal = attended(q[first + h % ratio], keys[0]) * (1 if weights is None else weights[0, h].unsqueeze(1))
            outs.append((signal - per_row * noise) @ values[g])
    else:
        outs = [attended(q[h], k[h // (len(q) // len(k))]) @ values[h // (len(q) // len(k))] for h in range(len(q))]
    if module.head_norm is not None:
        norm = module.head_norm
        if sizes is not None:
            sizes += [(o.square().mean(1) + norm.eps).min().sqrt().item() for o in outs]
        outs = [o / (o.square().mean(1, keepdim=True) + norm.eps).sqrt() * norm.weight * norm.factor for o in outs]
    if module.exclusive:
        own = [values[h // (len(outs) // len(values))] for h in range(len(outs))]
        outs = [
            o - (o * v).sum(1, keepdim=True) * v / v.square().sum(1, keepdim=True)
            for o, v in zip(outs, own, strict=True)
        ]
    flat = torch.cat(outs, dim=1)
    if "gate_proj.weight" in weight:
        flat = flat / (1 + (-x @ weight["gate_proj.weight"].T).exp())
    return projected("o", flat)


def compare(
    module: Attention, answer: Tensor, expected: Tensor, leaves: list[Tensor], check: Any, least: float = 1.0
) -> None:
    """Outputs, and the gradients of the leaves and of every parameter."""
    check(answer, expected)
    leaves = [*leaves, *module.parameters()]
    direction = torch.randn_like(expected)
    answers, truths = (torch.autograd.grad(out, leaves, direction) for out in (answer, expected))
    for one, truth in zip(answers, truths, strict=True):
        assert truth.abs().max() > 1e-4
        check(one, truth, least=least * max(1.0, truth.abs().max().item()))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("option", [*PLAIN, *OPTIONS])
def test_outputs_and_gradients(kind: str, option: str, is_causal: bool) -> None:
    arguments = dict({**PLAIN, **OPTIONS}[option])
    if "headwise_norm" in arguments:
        arguments["headwise_norm"] = not ATTENTION_TYPES[kind].headwise_norm
    module, x = build(kind, **arguments), inputs(1, 7).requires_grad_()
    rotary = tables(range(7))
    answer = module(x, rotary, is_causal=is_causal)[0]
    sizes = [1.0]
    expected = written_out(module, x[0], rotary, is_causal=is_causal, sizes=sizes)
    # A norm of few channels divides a head, whose terms are of order 1, by what may be much less.
    compare(module, answer, expected, [x], check, 1 / min(sizes))


def test_the_writing_out_is_the_oracles(kind: str) -> None:
    """Without options it says what the independent implementation says."""
    module, x = build(kind, num_key_value_heads=4), inputs(1, 7)
    expected = by_oracle(module, x, positions=range(7), is_causal=True)
    np.testing.assert_allclose(
        written_out(module, x[0], tables(range(7)), is_causal=True).detach().numpy(), expected[0], atol=1e-9
    )


@pytest.mark.parametrize("option", ["all, grouped", "others, grouped"])
def test_options_with_a_cache(kind: str, option: str) -> None:
    module, x = build(kind, **OPTIONS[option]), inputs(2, 7)
    cache = DynamicCache()
    parts = [
        module(x[:, begin:end], tables(range(begin, end)), is_causal=True, cache=cache)
        for begin, end in ((0, 4), (4, 5), (5, 7))
    ]
    check(torch.cat(parts, dim=1), module(x, tables(range(7)), is_causal=True))


@pytest.mark.parametrize("option", ["plain", "all, grouped"])
def test_cross_attention(kind: str, option: str) -> None:
    """Keys and values of another sequence, of another width and length, with a mask of its tokens; and its gradient."""
    module = build(kind, context_size=10, **OPTIONS.get(option, {}))
    x = inputs(1, 5).requires_grad_()
    context = torch.randn(1, 9, 10, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True] * 4 + [False] * 2 + [True] * 3)
    answer = module(x, context=context, attn_mask=mask.view(1, 1, 1, 9))[0]
    expected = written_out(module, x[0], context=context[0], mask=mask.expand(5, 9))
    (of_context,) = torch.autograd.grad(answer.sum(), context, retain_graph=True)
    assert not of_context[0, 4:6].any()
    compare(module, answer, expected, [x, context], check)
    # Projected once, the other sequence serves every token.
    memory = module.project_context(context)
    one_by_one = [module(x[:, i : i + 1], context=memory, attn_mask=mask.view(1, 1, 1, 9)) for i in range(5)]
    check(torch.cat(one_by_one, dim=1)[0], expected)


def test_what_does_not_go_with_another_sequence(kind: str) -> None:
    module, x = build(kind), inputs()
    for more in ({"is_causal": True}, {"cache": DynamicCache()}, {"position_embeddings": tables(range(7))}):
        with pytest.raises(ValueError, match=f"goes without .* got {next(iter(more))} as well"):
            module(x, context=x, **more)
    with pytest.raises(ValueError, match=r"context must be \(B, S, 24\), got \(2, 7, 10\)"):
        module(x, context=x[..., :10])
    message = r"of width 10 where hidden_size is 24: context must be given, got None\.$"
    with pytest.raises(ValueError, match=message):
        build(kind, context_size=10)(x)
    keys, values = module.project_context(x)
    for wrong in ((x, x), x[:1], (keys[:1], values[:1]), (keys, keys[..., :1]), (keys, values[:, :, 1:])):
        with pytest.raises(ValueError, match="context must be of the batch 2"):
            module(x, context=wrong)
    with pytest.raises(ValueError, match="context_size must be 1 or more, got 0"):
        build(kind, context_size=0)


@pytest.mark.parametrize("kind", sorted({*NOT_LATENT}))
def test_options_that_exclude_others(kind: str) -> None:
    with pytest.raises(ValueError, match="qk_norm and qk_clip exclude each other"):
        build(kind, qk_norm=True, qk_clip=True)
    with pytest.raises(ValueError, match=r"goes without .* and exclusive, got exclusive as well"):
        build(kind, exclusive=True)(inputs(), context=inputs())


def test_nothing_of_the_own_value_is_left() -> None:
    module, x = build("diff", exclusive=True), inputs(1, 5)
    own, heads = module.project(x, None)[2], []
    module.o_proj.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    module(x)
    assert (heads[0].unflatten(-1, (4, 8)).transpose(1, 2) * own).sum(-1).abs().max() < 1e-12
    alone = torch.zeros(1, 1, 24, dtype=torch.float64)  # whose value is 0
    assert torch.equal(module(alone), alone)


def test_gradcheck_of_all_options(kind: str) -> None:
    grouped = {"num_noise_heads": 1} if ATTENTION_TYPES[kind].grouped else {}
    module = build(kind, hidden_size=6, num_attention_heads=2, head_dim=2, context_size=4, **grouped, **OPTIONS["all"])
    x = torch.randn(1, 3, 6, dtype=torch.float64, requires_grad=True)
    context = torch.randn(1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x, context: module(x, context=context), (x, context))


class TestDropout:
    """Each map loses weights of its own, before the maps are subtracted; what stays is divided by 1 − p."""

    @pytest.mark.parametrize("backend", ["reference", "sdpa"])
    @pytest.mark.parametrize("causal", [True, False])
    def test_maps_of_the_operator(self, backend: str, causal: bool) -> None:
        """With values that are the identity, the output is the difference of the two maps as they were used."""
        n, p = 24, 0.3
        q, k = torch.randn(2, 8, 3, 2, n, 4, dtype=torch.float64)
        v = torch.eye(n, dtype=torch.float64).expand(8, 3, n, n)
        exact = [diff_attention(q, k, v, lam, is_causal=causal) for lam in (0.0, 1.0)]
        first, second = exact[0], exact[0] - exact[1]
        torch.manual_seed(1)
        used = diff_attention(q, k, v, 1.0, is_causal=causal, dropout_p=p, backend=backend)
        visible = first > 0
        # Every entry is one of four: either weight may be there, scaled, or not.
        cases = torch.stack([a * first - b * second for a in (0, 1 / (1 - p)) for b in (0, 1 / (1 - p))])
        distance, which = (cases - used).abs().min(0)
        assert distance.max() < 1e-9
        shares = torch.bincount(which[visible], minlength=4) / visible.sum()
        expected = torch.tensor([p * p, p * (1 - p), (1 - p) * p, (1 - p) ** 2])
        assert (shares - expected).abs().max() < 0.02
        # Heads and sequences lose weights of their own.
        dropped = (which == 0).flatten(0, 1).flatten(1)
        assert len({tuple(row.tolist()) for row in dropped}) == len(dropped)

    @pytest.mark.parametrize("backend", ["reference", "sdpa"])
    def test_gradients(self, backend: str) -> None:
        """With the random numbers of the forward pass, they are those of finite differences."""
        q, k = (torch.randn(1, 2, 2, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
        v = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
        lam = torch.rand(1, 2, 5, dtype=torch.float64, requires_grad=True)

        def attend(*tensors: Tensor) -> Tensor:
            torch.manual_seed(3)
            return diff_attention(*tensors, is_causal=True, dropout_p=0.4, backend=backend)

        assert gradcheck(attend, (q, k, v, lam))

    @pytest.mark.parametrize("backend", ["blockwise", "flex", "cpu", "triton", "fa2", "fa3", "fa4"])
    def test_other_backends_refuse_it_by_name(self, backend: str) -> None:
        q, v = torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 3, 8)
        with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this request: it drops no attention"):
            diff_attention(q, q, v, 0.5, dropout_p=0.1, backend=backend)

    def test_auto_takes_one_that_drops(self) -> None:
        q, v = torch.randn(1, 1, 2, 300, 4), torch.randn(1, 1, 300, 8)
        torch.manual_seed(0)
        chosen = diff_attention(q, q, v, 0.5, dropout_p=0.1)
        torch.manual_seed(0)
        assert torch.equal(chosen, diff_attention(q, q, v, 0.5, dropout_p=0.1, backend="reference"))
        assert not torch.equal(chosen, diff_attention(q, q, v, 0.5))

    @pytest.mark.parametrize("p", [-0.1, 1.0, math.nan, True, "0.1"])
    def test_a_share_out_of_range(self, p: Any) -> None:
        q, v = torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 3, 8)
        with pytest.raises(ValueError, match=r"dropout_p must be"):
            diff_attention(q, q, v, 0.5, dropout_p=p)

    def test_a_module_drops_in_training_alone(self, kind: str) -> None:
        """The mean over many draws is the output without dropout, but for the norm, which is not linear."""
        options = {} if kind == "softmax" else {"headwise_norm": False}
        module, plain = build(kind, dropout=0.2, **options), build(kind, **options)
        plain.load_state_dict(module.state_dict())
        x = inputs(1, 5)
        expected = plain(x)
        check(module.eval()(x), expected)
        module.train()
        with torch.no_grad():
            many = module(x.expand(20_000, -1, -1))
        assert many.std(0).min() > 0
        error = (many.mean(0) - expected[0]).abs() / (many.std(0) / math.sqrt(len(many)))
        assert error.max() < 6

    def test_a_modules_share_out_of_range(self, kind: str) -> None:
        with pytest.raises(ValueError, match=r"dropout must be at least 0 and below 1, got 1.0"):
            build(kind, dropout=1.0)
