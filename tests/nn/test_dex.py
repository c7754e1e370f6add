"""DEX against its formula in float64: values, every gradient, the schedule of λ, the exact start, dtypes, folding."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diff_transformer.nn import (
    AnnealedLambda,
    DexAttention,
    DexCorrection,
    SoftmaxAttention,
    fold_output,
    set_dex_progress,
)

WIDTH, HEADS, HEAD = 24, 8, 4
SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "layer": 3, "head_dim": HEAD}
SOME = (1, 4, 6)
LAMBDA_INIT = 0.8 - 0.6 * math.exp(-0.6)  # of layer 3


def attention(dtype: torch.dtype = torch.float64, trained: bool = True, **arguments: Any) -> DexAttention:
    """A layer whose W_D and λ_learn are far from where they start, unless it is to be untrained."""
    module = DexAttention(**{**SIZES, **arguments}).to(dtype)
    with torch.no_grad():
        for name in ("q", "k", "v", "o"):
            module.get_parameter(f"{name}_proj.weight").normal_(std=WIDTH**-0.5 * (2 if name in "qk" else 1))
        if trained and module.dex is not None:
            module.dex.weight.normal_(std=0.7)
            module.dex.lam.learned.fill_(0.6)
    return module


def hidden(length: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, length, WIDTH, dtype=dtype)


def by_formula(module: DexAttention, x: Tensor, lam: Tensor, chosen: tuple[int, ...], kv_heads: int) -> Tensor:
    """Figure 9 of arXiv 2505.16333 a head at a time, from the module's parameters and λ."""
    weights = dict(module.named_parameters())

    def rows(name: str, head: int) -> Tensor:
        return weights[f"{name}_proj.weight"][HEAD * head : HEAD * (head + 1)]

    n, out = x.shape[1], torch.zeros_like(x)
    may = torch.ones(n, n, dtype=torch.bool).tril()
    for head in range(HEADS):
        kv = head // (HEADS // kv_heads)
        q, k, v = x @ rows("q", head).T, x @ rows("k", kv).T, x @ rows("v", kv).T
        scores = (q @ k.transpose(1, 2) / math.sqrt(HEAD)).masked_fill(~may, -math.inf)
        o = scores.softmax(-1) @ v
        if head in chosen:
            o = o - lam * (o @ weights["dex.weight"][chosen.index(head)])
        out = out + o @ weights["o_proj.weight"][:, HEAD * head : HEAD * (head + 1)].T
    return out


@pytest.mark.parametrize("progress", [1.0, 0.3])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("heads", [None, SOME], ids=["all heads", "some heads"])
def test_the_formula_and_every_gradient(heads: tuple[int, ...] | None, kv_heads: int, progress: float) -> None:
    module, x = attention(heads=heads, num_key_value_heads=kv_heads), hidden().requires_grad_()
    set_dex_progress(module, progress)
    learned = module.get_parameter("dex.lam.learned")
    lam = (1 - progress) * progress * LAMBDA_INIT + progress * learned[0]
    out = module(x, is_causal=True)
    expected = by_formula(module, x, lam, heads or tuple(range(HEADS)), kv_heads)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = {"x": x, **dict(module.named_parameters())}
    assert len(leaves) == 1 + 4 + 2
    direction = torch.randn_like(out)
    answers, expected_gradients = (torch.autograd.grad(o, list(leaves.values()), direction) for o in (out, expected))
    for name, answer, value in zip(leaves, answers, expected_gradients, strict=True):
        assert value.abs().max() > 1e-2, f"the gradient of {name} is too small to say anything"
        torch.testing.assert_close(answer, value, rtol=1e-11, atol=1e-11)


def test_lambda_of_each_step() -> None:
    """Equation 4 of arXiv 2505.16333, λ(t) = (1 − α)(t/T) λ_init + α λ_learn with α = t/T."""
    for start in (None, 0.0, 0.9):
        lam = AnnealedLambda(3, start=start)
        assert lam.lambda_init == pytest.approx(LAMBDA_INIT, abs=1e-15)
        learned = LAMBDA_INIT if start is None else start
        for step in range(11):
            set_dex_progress(lam, step / 10)
            alpha = step / 10
            assert lam().item() == pytest.approx((1 - alpha) * alpha * LAMBDA_INIT + alpha * learned, abs=1e-7)
    set_dex_progress(lam, 0)
    assert lam().item() == 0
    lam().backward()
    assert lam.learned.grad.item() == 0


def test_lambda_is_not_rounded_to_half_precision() -> None:
    """λ W_D is formed in float32: λ's nearest bfloat16, 1, would give 1 − 1.5."""
    lam, w_d = 1.0036621, 1.5
    correction = DexCorrection(1, 1, AnnealedLambda(1, start=lam))
    nn.init.constant_(correction.weight, w_d)
    out = correction.bfloat16()(torch.ones(1, 1, 1, 1, dtype=torch.bfloat16))
    assert torch.tensor(lam).bfloat16() == 1
    assert out.item() == 1 - torch.tensor(lam * w_d).bfloat16().item() == 1 - 1.5078125


@pytest.mark.parametrize("heads", [None, SOME, ()], ids=["all heads", "some heads", "no head"])
def test_folding(heads: tuple[int, ...] | None) -> None:
    module, x = attention(heads=heads), hidden()
    plain = SoftmaxAttention(**SIZES).double()
    state = {name: value for name, value in module.state_dict().items() if not name.startswith("dex")}
    if module.dex is not None:
        set_dex_progress(module, 0.8)
        before = module.o_proj.weight.detach().clone()
        lam = module.dex.lam().item()
        state["o_proj.weight"] = fold_output(module.o_proj.weight.detach(), module.dex.weight.detach(), lam, heads)
        assert torch.equal(module.o_proj.weight, before)  # the source is left as it was
        assert not torch.allclose(state["o_proj.weight"], before)
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x, is_causal=True), module(x, is_causal=True), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_bad_progress(fraction: float) -> None:
    module = attention()
    with pytest.raises(ValueError, match=rf"fraction must lie in 0 … 1, got {fraction}\.$"):
        set_dex_progress(module, fraction)
    assert module.dex.lam.progress == 1


@pytest.mark.parametrize("heads", [(8,), (-1,), (3, 1), (2, 2), (True,), (0.5,)])
def test_bad_heads(heads: Any) -> None:
    with pytest.raises(ValueError, match=r"chosen heads must be ascending numbers in 0 … 7, got "):
        attention(heads=heads)
    with pytest.raises(ValueError, match=r"^fold_output: chosen heads must be ascending numbers in 0 … 7, got "):
        fold_output(torch.ones(4, 16), torch.ones(len(heads), 2, 2), 0.5, heads)


def test_a_matrix_for_each_chosen_head() -> None:
    with pytest.raises(ValueError, match=r"^weight must be \(C, d, d\) of the 8 chosen heads, got \(1, 2, 2\)\.$"):
        fold_output(torch.ones(4, 16), torch.ones(1, 2, 2), 0.5)


def test_bad_lambda() -> None:
    with pytest.raises(ValueError, match=r"lambda_start must be a finite number, got inf\.$"):
        attention(lambda_start=float("inf"))
    with pytest.raises(ValueError, match=r"lambda_init .*'schedule'.* 'late'\.$"):
        attention(lambda_init="late")
    with pytest.raises(ValueError, match=r"heads must name one head or more, got none\.$"):
        DexCorrection(4, 2, AnnealedLambda(1), heads=())
