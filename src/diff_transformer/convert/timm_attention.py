"""Puts our attention into timm's differential ViTs, and gives its weights timm's names again."""

from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.nn import DiffAttention
from diff_transformer.utils.suggestions import some


class DiffParallelBlock(nn.Module):
    """timm's ``DiffParallelScalingBlock``, attention beside the feed-forward network, with our attention."""

    def __init__(self, block: Any, layer: int) -> None:
        super().__init__()
        self.in_norm, self.ls, self.drop_path = block.in_norm, block.ls, block.drop_path
        self.mlp_act, self.mlp_drop = block.mlp_act, block.mlp_drop
        self.attn = _attention(block, layer)
        hidden, width, *_ = block.in_split
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        normed = self.in_norm(x)
        mlp = self.fc2(self.mlp_drop(self.mlp_act(self.fc1(normed))))
        return x + self.drop_path(self.ls(self.attn(normed, None, attn_mask, is_causal) + mlp))


_KINDS, _QKV, _LAMBDAS = ("weight", "bias"), ("q_proj", "k_proj", "v_proj"), ("q1", "k1", "q2", "k2")
# Of a module of ours: timm's parameter → ours, which lie one below the other in it.
TABLES: dict[Any, dict[str, tuple[str, ...]]] = {
    DiffAttention: {
        **{f"qkv.{kind}": tuple(f"{name}.{kind}" for name in _QKV) for kind in _KINDS},
        **{f"proj.{kind}": (f"o_proj.{kind}",) for kind in _KINDS},
        "sub_norm.weight": ("head_norm.weight",),
        **{f"lambda_{name}": (f"lam.{name}",) for name in _LAMBDAS},
    },
    DiffParallelBlock: {
        **{f"in_proj.{kind}": (f"fc1.{kind}", *(f"attn.{name}.{kind}" for name in _QKV)) for kind in _KINDS},
        "out_proj.weight": ("attn.o_proj.weight", "fc2.weight"),
        "out_proj.bias": ("attn.o_proj.bias",),
        "sub_norm.weight": ("attn.head_norm.weight",),
        **{f"lambda_{name}": (f"attn.lam.{name}",) for name in _LAMBDAS},
    },
}
_COLUMNS = "out_proj.weight"  # ours lie side by side in it


def from_timm(model: nn.Module) -> nn.Module:
    """Replace differential attention in a model of timm's by ours, with the same weights.

    An ``attn`` becomes a :class:`diff_transformer.nn.DiffAttention`, a ``DiffParallelScalingBlock`` a block with one.

    Args:
        model: ``vit_dwee_patch16_reg1_gap_256`` or its like, which is changed in place.

    Returns:
        The model. Its state dict has our names; :func:`timm_state_dict` has timm's.

    Raises:
        ValueError: no such attention, or options that timm's models lack. Nothing is replaced then.
        ModuleNotFoundError: timm is not installed.

    Examples:
        >>> model = from_timm(timm.create_model("vit_dwee_patch16_reg1_gap_256"))  # doctest: +SKIP
    """
    from timm.layers import DiffAttention as TimmAttention
    from timm.models.vision_transformer import DiffParallelScalingBlock

    makers = {TimmAttention: _attention, DiffParallelScalingBlock: DiffParallelBlock}
    theirs = {name: module for name, module in model.named_modules() if name and type(module) in makers}
    if not theirs:
        raise ValueError(f"model must have timm's differential attention in its blocks, got {type(model).__name__}.")
    ours = {name: _converted(makers[type(theirs[name])], theirs[name], name, i) for i, name in enumerate(theirs, 1)}
    for name, module in ours.items():
        model.set_submodule(name, module)
    return model


def timm_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model from :func:`from_timm` in timm's names, for timm to load.

    Examples:
        >>> timms_own.load_state_dict(timm_state_dict(from_timm(model)))  # doctest: +SKIP
    """
    state: dict[str, Tensor] = model.state_dict()
    for name, module in model.named_modules():
        for key, parts in TABLES.get(type(module), {}).items():
            ours = [f"{name}.{part}" for part in parts]
            if ours[0] in state:  # not the attention in a DiffParallelBlock, whose turn was before
                state[f"{name}.{key}"] = torch.cat([state.pop(part) for part in ours], int(key == _COLUMNS))
    return state


def _attention(theirs: Any, layer: int) -> DiffAttention:
    sizes = {"num_attention_heads": 2 * theirs.num_heads, "hidden_size": 2 * theirs.num_heads * theirs.head_dim}
    settings = {"lambda_init": theirs.lambda_init, "norm_eps": theirs.sub_norm.eps, "dropout": theirs.attn_drop_p}
    return DiffAttention(layer=layer, bias=True, **sizes, **settings)


def _converted(make: Any, theirs: nn.Module, name: str, layer: int) -> nn.Module:
    """Return our module with the weights of timm's; λ keeps float32 at least."""
    with torch.device("meta"):
        ours: nn.Module = make(theirs, layer)
    table, weights = TABLES[type(ours)], dict(theirs.named_parameters())
    state: dict[str, Tensor] = {key: weight for key, weight in ours.named_parameters() if not weight.is_meta}
    others = sorted(weights.keys() ^ {*table, *state})
    if others or getattr(theirs, "proj_drop", nn.Dropout(0.0)).p:
        raise ValueError(f"{name} must be as in timm's models, which differ in {some(others) or 'proj_drop'}.")
    for key, parts in table.items():
        axis = int(key == _COLUMNS)
        sizes = [ours.get_parameter(part).shape[axis] for part in parts]
        for part, weight in zip(parts, weights[key].detach().split(sizes, axis), strict=True):
            state[part] = weight.clone()
            ours.get_parameter(part).requires_grad_(weights[key].requires_grad)  # which loading keeps
    ours.load_state_dict(state, assign=True)
    return ours.train(theirs.training)
