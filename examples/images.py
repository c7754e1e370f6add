"""Train vision Transformers on scikit-learn's digits, with and without differential attention, and draw what they see.

    python examples/images.py --output runs/images                   # a ViT in plain torch (pip install scikit-learn)
    python examples/images.py --model timm --output runs/timm        # timm's differential ViT, and timm's ordinary one

Both models, DIFF and the Transformer, see the same images in the same order. The figure `rollout.png` shows for some
test images how much each patch reaches what the classifier reads, through all layers (attention rollout, Abnar &
Zuidema, arXiv 2005.00928). Weights of A1 − λA2 may be negative, so DIFF's rollout takes their sizes. `explorer.html`
shows the maps of each head of both models for the first of these images, and what another λ does. A minute on a CPU.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from diff_transformer.convert import from_timm
from diff_transformer.explorer import image_explorer
from diff_transformer.explorer.page import recorded_page
from diff_transformer.nn import Attention, DiffAttention, SoftmaxAttention

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--model", default="plain", choices=("plain", "timm"), help="a ViT in plain torch, or timm's")
parser.add_argument("--output", default="runs/images", help="folder for the figure, the page and the weights")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--images", type=int, default=8, help="test images in the figure")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

WIDTH, HEADS, LAYERS, PATCH = 64, 8, 3, 2
KINDS: dict[str, type[Attention]] = {"DIFF": DiffAttention, "Transformer": SoftmaxAttention}


class Block(nn.Module):
    """A layer of a ViT around any attention; no causality, no rotary embedding."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = attention
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (B, 1, 8, 8) → logits (B, 10), by a class token and learned positions."""

    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (8 // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block(attention(WIDTH, HEADS, layer)) for layer in range(1, LAYERS + 1)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


def timm_model(attention: type[Attention]) -> nn.Module:
    """timm's `vit_dwee`, whose own differential attention becomes ours, or its Transformer; both small."""
    import timm

    sizes = {"img_size": 8, "patch_size": PATCH, "in_chans": 1, "num_classes": 10, "embed_dim": WIDTH, "depth": LAYERS}
    if attention is DiffAttention:  # of whose heads timm counts the pairs
        return from_timm(timm.create_model("vit_dwee_patch16_reg1_gap_256", num_heads=HEADS // 2, **sizes))
    model: Any = timm.create_model("vit_wee_patch16_reg1_gap_256", num_heads=HEADS, **sizes)
    for layer, block in enumerate(model.blocks, start=1):
        block.attn = attention(WIDTH, HEADS, layer, bias=True)
    return model


def train(model: nn.Module, images: Tensor, digits: Tensor) -> None:
    order = torch.Generator().manual_seed(arguments.seed)
    steps = arguments.epochs * -(-len(images) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(arguments.epochs):
        for chosen in torch.randperm(len(images), generator=order).split(64):
            loss = F.cross_entropy(model(images[chosen]), digits[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def on_patches(reached: Tensor) -> Tensor:
    """A rollout (N, N) of a class token or a register and the patches → what the classifier reads of each patch."""
    read = slice(1, None) if arguments.model == "timm" else slice(0, 1)  # the mean of the patches, or the class token
    return reached[read, 1:].mean(0).unflatten(0, (8 // PATCH, 8 // PATCH))


data = load_digits()
images, digits = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
held_out, training = shuffled[:360], shuffled[360:]
output = Path(arguments.output)
output.mkdir(parents=True, exist_ok=True)

shown = held_out[: arguments.images]
figure, rows = plt.subplots(1 + len(KINDS), len(shown), figsize=(1.1 * len(shown), 3.6), squeeze=False)
for column, image in zip(rows[0], images[shown], strict=True):
    column.imshow(image[0].numpy(), cmap="gray_r")
models: list[nn.Module] = []
for name in KINDS:
    torch.manual_seed(arguments.seed)
    model = timm_model(KINDS[name]) if arguments.model == "timm" else VisionTransformer(KINDS[name])
    train(model.train(), images[training], digits[training])
    model.eval()
    with torch.no_grad():
        right = (model(images[held_out]).argmax(1) == digits[held_out]).float().mean()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {right:.3f} of {len(held_out)} test images right, {parameters:,} parameters", flush=True)
    save_file(model.state_dict(), output / f"{name}.safetensors")
    models.append(model)
explorer = image_explorer(models[0], images[shown], list("0123456789"), compare=models[1])
for side, name, row in zip(("left", "right"), KINDS, rows[1:], strict=True):
    for number, (column, image) in enumerate(zip(row, images[shown], strict=True), start=1):
        heads = explorer.run({"side": side, "text": f"Image {number}", "picture": 1})["heads"]
        column.imshow(image[0].numpy(), cmap="gray_r", extent=(0, 8, 8, 0))
        reached = on_patches(torch.tensor(heads["rollout"]))
        column.imshow(reached.numpy(), cmap="inferno", alpha=0.6, extent=(0, 8, 8, 0))
    row[0].set_ylabel(name)
rows[0][0].set_ylabel("image")
for column in rows.flat:
    column.set_xticks([])
    column.set_yticks([])
figure.tight_layout()
figure.savefig(output / "rollout.png", dpi=150)
(output / "explorer.html").write_text(recorded_page(explorer), encoding="utf-8")
print(f"the figure rollout.png and the page explorer.html are in {output}")
