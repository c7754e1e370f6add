"""Train vision Transformers on scikit-learn's digits, with and without differential attention, and draw what they see.

    python examples/images.py --output runs/images                   # a ViT in plain torch (pip install scikit-learn)
    python examples/images.py --model timm --output runs/timm        # timm's differential ViT, and timm's ordinary one

Both models, DIFF and the Transformer, see the same images in the same order. The figure `rollout.png` shows for some
test images how much each patch reaches what the classifier reads, through all layers (attention rollout, Abnar &
Zuidema, arXiv 2005.00928). Weights of A1 − λA2 may be negative, so DIFF's rollout takes their sizes. `heads.png` shows
the maps of each head in the last layer of DIFF. A minute on a CPU.
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
from diff_transformer.nn import Attention, DiffAttention, DifferentialAttention, SoftmaxAttention
from diff_transformer.ops import diff_attention_maps

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--model", default="plain", choices=("plain", "timm"), help="a ViT in plain torch, or timm's")
parser.add_argument("--output", default="runs/images", help="folder for rollout.png and the weights")
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


def maps_of(attention: Attention, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """A1, A2 and A1 − λA2 of an attention, or its one map, (B, H, N, N) each."""
    queries, keys, _ = attention.project(hidden_states, None)
    if isinstance(attention, DifferentialAttention):
        q, k = attention.split_queries(queries), attention.split_keys(keys)
        return diff_attention_maps(q, k, attention.lambdas(hidden_states))
    return ((queries.transpose(1, 2) @ keys.transpose(-1, -2) * attention.scaling).softmax(-1),)


@torch.no_grad()
def maps_of_layers(model: nn.Module, images: Tensor) -> list[tuple[Tensor, ...]]:
    layers: list[tuple[Tensor, ...]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, inputs: layers.append(maps_of(module, inputs[0])))
        for module in model.modules()
        if isinstance(module, Attention)
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return layers


def on_patches(maps: Tensor) -> Tensor:
    """Maps (…, N, N) of a class token or a register and the patches → what the classifier reads of each patch."""
    read = slice(1, None) if arguments.model == "timm" else slice(0, 1)  # the mean of the patches, or the class token
    return maps[..., read, 1:].mean(-2).unflatten(-1, (8 // PATCH, 8 // PATCH))


def rollout(layers: list[tuple[Tensor, ...]]) -> Tensor:
    """How much each patch reaches what the classifier reads, (B, 8 / PATCH, 8 / PATCH)."""
    itself = reached = torch.eye(layers[0][0].shape[-1])
    for maps in layers:
        sizes = maps[-1].abs()
        # Half of what a token becomes is itself, by the residual connection.
        reached = ((sizes / sizes.sum(-1, keepdim=True)).mean(1) + itself) / 2 @ reached
    return on_patches(reached)


def draw_heads(maps: tuple[Tensor, ...], file: Path) -> None:
    """Draw the maps of each head for the first image; blue is negative."""
    figure, rows = plt.subplots(len(maps), maps[0].shape[1], figsize=(1.2 * maps[0].shape[1], 3.6), squeeze=False)
    for name, row, heads in zip(("A1", "A2", "A1 − λA2"), rows, maps, strict=True):
        patches = on_patches(heads[0])
        largest = patches.abs().max().item()
        for column, of_head in zip(row, patches.numpy(), strict=True):
            column.imshow(of_head, cmap="RdBu_r", vmin=-largest, vmax=largest)
        row[0].set_ylabel(name)
    save(figure, rows, file)


def save(figure: Any, rows: Any, file: Path) -> None:
    for column in rows.flat:
        column.set_xticks([])
        column.set_yticks([])
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    print(f"figure: {file}")


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
for name, row in zip(KINDS, rows[1:], strict=True):
    torch.manual_seed(arguments.seed)
    model = timm_model(KINDS[name]) if arguments.model == "timm" else VisionTransformer(KINDS[name])
    train(model.train(), images[training], digits[training])
    model.eval()
    with torch.no_grad():
        right = (model(images[held_out]).argmax(1) == digits[held_out]).float().mean()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {right:.3f} of {len(held_out)} test images right, {parameters:,} parameters", flush=True)
    save_file(model.state_dict(), output / f"{name}.safetensors")
    layers = maps_of_layers(model, images[shown])
    if name == "DIFF":
        draw_heads(layers[-1], output / "heads.png")
    for column, image, reached in zip(row, images[shown], rollout(layers), strict=True):
        column.imshow(image[0].numpy(), cmap="gray_r", extent=(0, 8, 8, 0))
        column.imshow(reached.numpy(), cmap="inferno", alpha=0.6, extent=(0, 8, 8, 0))
    row[0].set_ylabel(name)
rows[0][0].set_ylabel("image")
save(figure, rows, output / "rollout.png")
