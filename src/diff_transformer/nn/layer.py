"""The decoder layer of Section 2.2 and its feed-forward network."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.nn.norm import RMSNorm


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
