"""Rotary position embedding for models built from these modules."""

import torch
from torch import Tensor, nn

from diff_transformer.ops import rotary_tables


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
