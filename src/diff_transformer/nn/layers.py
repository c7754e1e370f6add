"""The decoder layer of Section 2.2 and its feed-forward network."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.nn.parameters import ReplicatedAcrossHeads
from diff_transformer.ops import rms_norm, rotary_tables


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis, (…, n) → (…, n)."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"


class HeadwiseNorm(RMSNorm, ReplicatedAcrossHeads):
    """(1 − λ_init) · RMSNorm over each head's own channels (Equation 3), (…, H, 2d) → (…, H, 2d).

    The weight is shared by the heads of a layer. The factor takes the *constant* λ_init, not the learned λ: it aligns
    the gradients with the Transformer's at the start of training (Appendix G).

    No "RMSNorm" at the end of the name: servers replace what is called so by a norm of theirs, which has no factor.
    """

    def __init__(self, size: int, lambda_init: float, eps: float = 1e-5) -> None:
        super().__init__(size, eps)
        self.factor = 1.0 - lambda_init

    def forward(self, x: Tensor | None) -> Tensor:
        """The norm of heads (…, H, 2d); of None, the weight (2d,) as the heads use it, for who applies the norm itself.

        Ask for the weight by this call: whoever keeps weights elsewhere (accelerate, offloaded to the CPU or to disk)
        brings those of a module that is called.
        """
        weight = self.shared(self.weight)
        return weight if x is None else rms_norm(x, weight, self.eps) * self.factor

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, factor={self.factor:.4f}"


class RotaryEmbedding(nn.Module):
    """Cosines and sines for :func:`diff_transformer.ops.apply_rotary`; owns no parameters.

    Args:
        head_dim: width d of a query or key; even.
        theta: base of the frequencies.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for a rotary embedding, got {head_dim}.")
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (B, N) or (N,) → cos and sin, each (B, N, d) or (N, d), float32."""
        return rotary_tables(positions, self.head_dim, self.theta)

    def positions(self, x: Tensor, past: int = 0) -> tuple[Tensor, Tensor]:
        """The tables for x (B, N, D) whose first token stands at position ``past``."""
        return self(torch.arange(past, past + x.shape[1], device=x.device))

    def extra_repr(self) -> str:
        return f"{self.head_dim}, theta={self.theta}"


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x), no biases, (…, D) → (…, D)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Y = Attention(RMSNorm(X)) + X;  X' = SwiGLU(RMSNorm(Y)) + Y  (Section 2.2).

    Args:
        self_attn: any module that maps (B, N, D) to (B, N, D); keyword arguments of ``forward`` go to it.
        hidden_size: D.
        intermediate_size: width of the feed-forward network.
        norm_eps: eps of both norms.
    """

    def __init__(self, self_attn: nn.Module, hidden_size: int, intermediate_size: int, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = SwiGLU(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.attend(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        return self.self_attn(normed, **kwargs)
