"""Subtracts from heads of a pretrained Transformer a learned projection of their output: DEX (arXiv 2505.16333).

Heads of ordinary attention, O = softmax(QKᵀ/√d) V, become on the chosen heads (Figure 9 there)

    O' = O − λ(t) · O W_D

W_D starts at 0, so the first heads are the source model's to the last bit, whatever λ is. Nothing else of the model
changes: not its attention call, not its cache. W_D and λ fold into W_O when training is over (:func:`fold_output`).

The paper itself could not be had when this was written: docs/dex.md names the sources, and the choices made here.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diff_transformer.nn.attention import SoftmaxAttention
from diff_transformer.nn.layers import KeepsFloat32, ReplicatedAcrossHeads, constant_lambda


class AnnealedLambda(KeepsFloat32, ReplicatedAcrossHeads):
    """λ(t) = (1 − α)·α·λ_init + α·λ_learn with α = t / T, up to 1 (Equation 4 of arXiv 2505.16333).

    α is a part of the state, ``progress``, saved with the weights; :func:`set_dex_progress` sets it during training.
    Otherwise α is 1 and λ = λ_learn: an ordinary learned number. At α = 0 the layer is the source model's layer.
    λ_learn and α stay in float32 when the model around them is cast to a half-precision type.

    λ_learn starts at λ_init by default, so that λ climbs from 0 to λ_init in α·(2 − α). Started at 0, as
    the authors are said to, λ = 0 at α = 1: neither W_D (its gradient is a multiple of λ) nor λ_learn (a multiple of
    W_D) would ever leave 0 in training that does not anneal.

    Args:
        layer: the layer's number l, counted from 1.
        lambda_init: "schedule" for 0.8 − 0.6·exp(−0.3·(l − 1)), or one constant.
        start: λ_learn at the start; λ_init unless given.

    Examples:
        >>> round(AnnealedLambda(layer=1).lambda_init, 3)
        0.2
    """

    def __init__(self, layer: int, lambda_init: float | str = "schedule", start: float | None = None) -> None:
        super().__init__()
        self.lambda_init = constant_lambda(layer, lambda_init)
        if start is not None and not math.isfinite(start):
            raise ValueError(f"lambda_start must be a finite number, got {start!r}.")
        self.start = self.lambda_init if start is None else float(start)
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        # One entry, not a scalar: FSDP2 shards no scalars.
        self.learned = nn.Parameter(torch.empty(1, dtype=dtype))
        self.progress: Tensor
        self.register_buffer("progress", torch.empty((), dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set λ_learn to its start, and α to 1."""
        nn.init.constant_(self.learned, self.start)
        nn.init.ones_(self.progress)

    def forward(self) -> Tensor:
        """Return λ as a scalar, float32."""
        return self.shared(annealed_lambda(self.lambda_init, self.learned.squeeze(0), self.progress))


class DexCorrection(nn.Module):
    """O − λ·O W_D on the chosen heads, (…, A, d) → (…, A, d).

    Args:
        num_heads: A, all heads of the layer.
        head_dim: d.
        lam: makes λ, a scalar.
        heads: the chosen ones, ascending from 0; all unless given.

    Raises:
        ValueError: heads that are none of the layer's, not ascending, or no heads at all.

    Examples:
        >>> correction = DexCorrection(num_heads=4, head_dim=16, lam=AnnealedLambda(layer=1))
        >>> heads = torch.randn(2, 10, 4, 16)
        >>> torch.equal(correction(heads), heads)  # W_D starts at 0
        True
    """

    def __init__(self, num_heads: int, head_dim: int, lam: AnnealedLambda, heads: Sequence[int] | None = None) -> None:
        super().__init__()
        chosen = tuple(range(num_heads)) if heads is None else tuple(heads)
        check_chosen_heads("DexCorrection", chosen, num_heads)
        if not chosen:
            raise ValueError("DexCorrection: heads must name one head or more, got none.")
        self.heads = chosen
        self.corrects_all = len(chosen) == num_heads
        self.lam = lam
        self.weight = nn.Parameter(torch.empty(len(chosen), head_dim, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W_D to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, heads: Tensor) -> Tensor:
        # By the numbers themselves: a tensor of them would be state, which is not in a checkpoint.
        each = [] if self.corrects_all else list(heads.unbind(-2))
        chosen = heads if self.corrects_all else torch.stack([each[head] for head in self.heads], dim=-2)
        lam = self.lam()
        # O − O (λ W_D): λ meets W_D in float32, and no output of the size of O is saved for λ's gradient.
        scaled = (lam * self.weight.to(lam.dtype)).to(heads.dtype)
        flat = chosen.reshape(-1, *chosen.shape[-2:]).transpose(0, 1)
        corrected = torch.baddbmm(flat, flat, scaled, alpha=-1).transpose(0, 1).reshape(chosen.shape)
        if self.corrects_all:
            return corrected
        for place, head in enumerate(self.heads):
            each[head] = corrected.select(-2, place)
        return torch.stack(each, dim=-2)


class DexAttention(SoftmaxAttention):
    """:class:`SoftmaxAttention` with the DEX correction before the output projection.

    W_D is d × d for each chosen head; the authors' is said to be one for all heads of a layer, which is the special
    case of equal matrices.

    Sizes and ``layer`` are as in :class:`DiffAttention`, but A may be odd.

    Args:
        heads: the chosen heads, ascending from 0; all unless given. A layer with none chosen has no ``dex`` (None).
        lambda_init, lambda_start: as :class:`AnnealedLambda`'s ``lambda_init`` and ``start``.

    Examples:
        >>> attention = DexAttention(64, num_attention_heads=4, layer=1, heads=[0, 2])
        >>> attention(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        layer: int,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        heads: Sequence[int] | None = None,
        lambda_init: float | str = "schedule",
        lambda_start: float | None = None,
    ) -> None:
        super().__init__(hidden_size, num_attention_heads, layer, num_key_value_heads, head_dim)
        self.dex: DexCorrection | None = None
        if heads is None or len(heads):
            lam = AnnealedLambda(layer, lambda_init, lambda_start)
            self.dex = DexCorrection(num_attention_heads, self.head_dim, lam, heads)

    def transform_heads(self, heads: Tensor) -> Tensor:
        """Apply the layer's correction, if it has one, to heads (…, A, d)."""
        return heads if self.dex is None else self.dex(heads)


def annealed_lambda(lambda_init: float, learned: Tensor, progress: Tensor) -> Tensor:
    """Compute λ(t) = (1 − α)·α·λ_init + α·λ_learn, of scalars: λ_learn ``learned`` and α ``progress``.

    Examples:
        >>> annealed_lambda(0.2, learned=torch.tensor(0.4), progress=torch.tensor(0.5))
        tensor(0.2500)
    """
    return (1 - progress) * progress * lambda_init + progress * learned


def set_dex_progress(model: nn.Module, fraction: float) -> None:
    """Set how far the annealing of λ is, in every layer of a model that may be wrapped by anything.

    Call it *before* each optimizer step t = 1 … T with t / T: the first step then has λ > 0, without which W_D has no
    gradient. The value is saved and loaded with the weights.

    Args:
        model: any module that holds :class:`AnnealedLambda`; nothing happens if there is none.
        fraction: α = t / T, 0 … 1. At 0 the model is the one it was made from; at 1 λ is λ_learn.

    Raises:
        ValueError: a fraction that is not in 0 … 1.

    Examples:
        >>> attention = DexAttention(64, num_attention_heads=4, layer=1)
        >>> set_dex_progress(attention, 0.5)
        >>> round(attention.dex.lam().item(), 3)
        0.15
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must lie in 0 … 1, got {fraction}.")
    for module in model.modules():
        if isinstance(module, AnnealedLambda):
            module.progress.fill_(fraction)


def fold_output(
    output_weight: Tensor, weight: Tensor, lam: Tensor | float, heads: Sequence[int] | None = None
) -> Tensor:
    """Fold DEX into W_O of an ordinary Transformer: (I − λ W_D) W_O on the chosen heads.

    Args:
        output_weight: W_O as ``nn.Linear`` holds it, (D, A·d).
        weight: W_D of the chosen heads, (C, d, d).
        lam: λ as it is at the end of training.
        heads: the chosen heads; all unless given.

    Returns:
        (D, A·d), computed in float64 and rounded to the dtype of ``output_weight``.

    Examples:
        >>> fold_output(torch.ones(1, 1), torch.ones(1, 1, 1), lam=0.5)
        tensor([[0.5000]])
    """
    width = weight.shape[-1]
    folded = output_weight.to(torch.float64, copy=True).unflatten(1, (-1, width))  # (D, A, d)
    chosen = list(range(folded.shape[1])) if heads is None else list(heads)
    check_chosen_heads("fold_output", chosen, folded.shape[1])
    if len(weight) != len(chosen):
        raise ValueError(f"weight must be (C, d, d) of the {len(chosen)} chosen heads, got {tuple(weight.shape)}.")
    # nn.Linear holds W_O transposed, and with it the product: W_Oᵀ − λ W_Oᵀ W_Dᵀ.
    correction = torch.einsum("nhe,hde->nhd", folded[:, chosen], weight.double())
    folded[:, chosen] -= lam * correction
    return folded.flatten(1).to(output_weight.dtype)


def check_chosen_heads(owner: str, heads: Sequence[int], num_heads: int) -> None:
    """Refuse anything but ascending numbers of a layer's heads."""
    are_numbers = all(isinstance(head, int) and not isinstance(head, bool) for head in heads)
    if not are_numbers or list(heads) != sorted(set(heads)) or (heads and not 0 <= heads[0] <= heads[-1] < num_heads):
        raise ValueError(
            f"{owner}: chosen heads must be ascending numbers in 0 … {num_heads - 1}, got {', '.join(map(str, heads))}."
        )
