"""What the tutorial on one's own model asks of timm, for where timm cannot be imported: a small vision transformer.

timm needs torchvision, and torchvision's wheel on PyPI does not load beside a torch without CUDA.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """With the names and arguments of timm's."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(dim), Attention(dim, num_heads), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x), attn_mask=None, is_causal=False)
        return x + F.gelu(self.mlp(x))


class VisionTransformer(nn.Module):
    def __init__(
        self,
        num_classes: int,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn((img_size // patch_size) ** 2, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads) for _ in range(depth))
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def create_model(name: str, **sizes: int) -> VisionTransformer:
    assert name.startswith("vit_")
    return VisionTransformer(**sizes)
