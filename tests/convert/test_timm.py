"""A model of timm's computes the same with our attention, and so do the gradients; its weights go back in timm's names.

timm does not load everywhere. Without it the models are small ones whose attention is written down here, head by head,
after what was published of timm's: one matrix with a bias for queries, keys and values, heads of a pair side by side,
λ_init from a layer's number that counts from 0, or a block whose matrices hold the feed-forward network as well.
"""

import copy
import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diff_transformer.convert import from_timm, timm_state_dict
from diff_transformer.nn import DiffAttention
from layers_by_hand import lambda_of, one_map

WIDTH, HEADS, HIDDEN, LAYERS = 24, 3, 20, 2
D = WIDTH // HEADS // 2


class WithLambdas(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.attn_drop_p = HEADS, D, 0.0
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.sub_norm = nn.RMSNorm(2 * D, eps=1e-5)
        for name in ("q1", "k1", "q2", "k2"):
            self.register_parameter(f"lambda_{name}", nn.Parameter(torch.empty(D)))

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lam, everything, out = lambda_of(vars(self)["_parameters"], self.lambda_init), torch.tensor(True), []
        for head in range(HEADS):
            pair = [slice(number * D, (number + 1) * D) for number in (2 * head, 2 * head + 1)]
            first, second = (one_map(q[..., rows], k[..., rows], everything) for rows in pair)
            out.append(self.sub_norm((first - lam * second) @ v[..., 2 * head * D : 2 * (head + 1) * D]))
        return torch.cat(out, -1) * (1 - self.lambda_init)


class Sequential(WithLambdas):
    def __init__(self, depth: int, qk_norm: bool = False, proj_drop: float = 0.0) -> None:
        super().__init__(depth)
        self.qkv, self.proj, self.proj_drop = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Dropout(proj_drop),
        )
        self.q_norm = nn.LayerNorm(D) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.proj(self.heads(*self.qkv(x).chunk(3, -1)))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Parallel(WithLambdas):
    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.in_split = [HIDDEN, WIDTH, WIDTH, WIDTH]
        self.in_norm, self.in_proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, sum(self.in_split))
        self.mlp_act, self.mlp_drop, self.drop_path, self.ls = nn.GELU(), nn.Dropout(0.0), nn.Identity(), Scale()
        self.out_proj = nn.Linear(WIDTH + HIDDEN, WIDTH)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        mlp, q, k, v = self.in_proj(self.in_norm(x)).split(self.in_split, -1)
        return x + self.ls(self.out_proj(torch.cat((self.heads(q, k, v), self.mlp_act(mlp)), -1)))


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Sequential(depth)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x), attn_mask=None, is_causal=False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two classes of timm, by the names under which they are imported."""
    for name in ("timm", "timm.layers", "timm.models", "timm.models.vision_transformer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["timm.layers"], "DiffAttention", Sequential, raising=False)
    monkeypatch.setattr(
        sys.modules["timm.models.vision_transformer"], "DiffParallelScalingBlock", Parallel, raising=False
    )


def drawn(model: nn.Module) -> nn.Module:
    """The model with weights that are far from where they start."""
    for name, parameter in model.named_parameters():
        scale = 2 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.5
        nn.init.normal_(parameter, 1.0 if "norm" in name and parameter.dim() == 1 else 0.0, scale)
    return model


def check_equal(theirs: nn.Module, x: Tensor, attentions: int) -> None:
    """Outputs and gradients to rounding, and all that is in the state dict, by timm's names."""
    rounding = 16 * torch.finfo(x.dtype).eps
    ours = from_timm(copy.deepcopy(theirs))
    assert sum(type(module) is DiffAttention for module in ours.modules()) == attentions
    state, back = theirs.state_dict(), timm_state_dict(ours)
    assert state.keys() == back.keys()
    assert all(torch.equal(state[key], back[key]) and state[key].dtype == back[key].dtype for key in state)
    expected, answer = theirs(x), ours(x)
    assert (answer - expected).abs().max() <= rounding * expected.abs().max()
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    answer.backward(upstream)
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    grads = timm_state_dict(ours)
    largest = max(parameter.grad.abs().max() for parameter in theirs.parameters())
    for name, parameter in theirs.named_parameters():
        assert (grads[name] - parameter.grad).abs().max() <= rounding * largest, name


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [Block, Parallel])
def test_what_is_written_here(block: Callable[[int], nn.Module], dtype: torch.dtype) -> None:
    model = drawn(nn.Sequential(*(block(depth) for depth in range(LAYERS)))).to(dtype)
    check_equal(model, torch.randn(2, 7, WIDTH, dtype=dtype), LAYERS)


@pytest.mark.all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["vit_dwee", "vit_dpwee", "vit_dlittle"])
def test_models_of_timm(name: str, dtype: torch.dtype) -> None:
    try:
        import timm
    except Exception as error:  # torchvision's, beside a torch that it was not built for, is any
        pytest.skip(f"timm does not load here: {error}")
    sizes = {"img_size": 64, "depth": LAYERS, "num_classes": 10, "init_values": 0.5}
    model = drawn(timm.create_model(f"{name}_patch16_reg1_gap_256", **sizes)).to(dtype)
    if dtype == torch.float64:  # timm rounds λ to float32 even then
        for module in model.modules():
            if hasattr(module, "_compute_lambda"):
                module._compute_lambda = partial(lambda_of, vars(module)["_parameters"], module.lambda_init)
    check_equal(model, torch.randn(2, 3, 64, 64, dtype=dtype), LAYERS)


@pytest.mark.usefixtures("stand_in")
def test_half_precision_dropout_and_modes() -> None:
    """λ stays in float32; what is frozen, in evaluation or in training stays so."""
    model = nn.Sequential(Block(0), Parallel(1)).bfloat16().eval()
    model[0].attn.proj.weight.requires_grad_(False)
    model[0].attn.attn_drop_p = 0.25
    model[1].train()
    ours = from_timm(model)
    assert ours is model
    assert [name for name, parameter in ours[0].named_parameters() if not parameter.requires_grad] == [
        "attn.o_proj.weight"
    ]
    dtypes = {name: parameter.dtype for name, parameter in ours.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if ".lam." in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if ".lam." not in name} == {torch.bfloat16}
    assert (ours[0].attn.dropout, ours[0].attn.training, ours[1].attn.training) == (0.25, False, True)
    assert [ours[0].attn.lam.lambda_init, ours[1].attn.lam.lambda_init] == [
        0.8 - 0.6 * math.exp(-0.3 * i) for i in (0, 1)
    ]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"qk_norm": True}, r"^1\.attn must be as in timm's models, which differ in q_norm\.bias, q_norm\.weight\.$"),
        ({"proj_drop": 0.1}, r"^1\.attn must be as in timm's models, which differ in proj_drop\.$"),
        (None, r"^model must have timm's differential attention in its blocks, got Linear\.$"),
    ],
)
def test_others_are_refused_before_anything_is_replaced(options: dict[str, Any] | None, pattern: str) -> None:
    model: nn.Module = nn.Linear(2, 2)
    if options is not None:
        model = nn.Sequential(Block(0), Block(1))
        model[1].attn = Sequential(1, **options)
    before = list(model.modules())
    with pytest.raises(ValueError, match=pattern):
        from_timm(model)
    assert list(model.modules()) == before
