"""A tiny vision Transformer around any attention, and images for it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.nn import Attention

IMAGES = torch.rand(3, 1, 6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
GRID = (3, 2)


class VisionTransformer(nn.Module):
    """(B, 1, 6, 4) → (B, 5), by 3 × 2 patches behind two other tokens; residual layers of attention alone."""

    def __init__(self, make: Callable[..., Attention], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patches, self.others = nn.Conv2d(1, 16, 2, 2), nn.Parameter(torch.randn(1, 2, 16))
        self.layers = nn.ModuleList(make(16, 4, layer, **options) for layer in (1, 2))
        self.head, self.called_with = nn.Linear(16, 5), dict[str, Any]()
        self.double()
        for weights in self.parameters():
            nn.init.normal_(weights, std=0.5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.others.expand(len(x), -1, -1), x), 1)
        for layer in self.layers:
            x = x + layer(x, **self.called_with)
        return self.head(x[:, 0])
