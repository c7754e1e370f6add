# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The operator in your model
#
# You have a model already, with its data, its training and its checkpoints. How much of it has to change before its
# attention is differential? About ten lines. This page patches a GPT in nanoGPT's style and a vision transformer of
# `timm`, trains each beside its original, and shows what else the operator takes: windows, packed documents, grouped
# queries, a cache, and queries that look at another sequence.
#
# *Ten minutes to read, two to run on two cores. You need `pip install . ./lab scikit-learn timm` in a checkout;
# without timm, leave out the two cells of the vision transformer.*

# %% tags=["parameters"]
GPT_STEPS = 100
VIT_EPOCHS = 10
SEEDS = 3

# %%
import copy
import itertools
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_lab.statistics import mean_interval
from diff_transformer import DiffAttention, diff_attention
from diff_transformer.nn import HeadwiseNorm, Lambda

# %% [markdown]
# ## A GPT
#
# This one is in the style of [nanoGPT](https://github.com/karpathy/nanoGPT), with the same names: `c_attn` makes
# queries, keys and values in one product, `c_proj` is the output projection.


# %%
class SelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_embd, self.n_head = n_embd, n_head
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = SelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, n_layer: int = 3, n_embd: int = 64, n_head: int = 8, block_size: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# %% [markdown]
# ### The patch
#
# `q`, `k` and `v` come from the same `c_attn`, at the same sizes. The heads are half as many, and each has two
# queries, two keys, and a value of twice the width: the channels are only cut another way. λ and the norm are new, one
# of each for a layer.


# %%
class Differential(nn.Module):
    def __init__(self, attn: nn.Module, layer: int) -> None:
        super().__init__()
        self.heads, self.c_attn, self.c_proj = attn.n_head // 2, attn.c_attn, attn.c_proj
        self.lam = Lambda(attn.n_embd // attn.n_head, layer)
        self.norm = HeadwiseNorm(2 * attn.n_embd // attn.n_head, self.lam.lambda_init)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).chunk(3, -1)
        q, k = (t.unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4) for t in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads = self.norm(diff_attention(q, k, v, self.lam(), is_causal=True))
        return self.c_proj(heads.transpose(1, 2).flatten(2))


def made_differential(gpt: GPT) -> GPT:
    gpt = copy.deepcopy(gpt)
    for layer, block in enumerate(gpt.h, start=1):
        block.attn = Differential(block.attn, layer)
    return gpt


# %% [markdown]
# nanoGPT's own model takes the same patch: its blocks are in `model.transformer.h`, and its attention has `n_head`,
# `n_embd`, `c_attn` and `c_proj`. The schedule of λ counts layers from 1.
#
# Do both learn? Half a megabyte of English that every Python has with it, the help on its language, a hundred steps,
# one seed. What this shows is that the patched model trains, not which one is better: one seed decides nothing.

# %%
text = torch.tensor(list("".join(topics.values()).encode()))


def train_gpt(gpt: GPT, steps: int) -> list[float]:
    optimizer, drawn = torch.optim.AdamW(gpt.parameters(), lr=3e-3), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 65, (16, 1), generator=drawn)
        batch = text[starts + torch.arange(65)]
        loss = F.cross_entropy(gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
original = GPT()
patched = made_differential(original)
for name, gpt in (("original", original), ("patched", patched)):
    losses = train_gpt(gpt, GPT_STEPS)
    size = sum(p.numel() for p in gpt.parameters())
    last = sum(losses[-10:]) / len(losses[-10:])
    print(f"{name:8}  {size:,} parameters, loss {losses[0]:.2f} → {last:.2f} nats per byte")
    assert last < losses[0] - 0.5
added = 1 - sum(p.numel() for p in original.parameters()) / sum(p.numel() for p in patched.parameters())
print(f"{added:.2%} of the parameters are new")
assert added < 0.01

# %% [markdown]
# ## A vision transformer
#
# With `DiffAttention` the patch is shorter still: it is a whole attention layer, projections included. `num_heads`
# goes in as it is, since the layer takes the count of the Transformer that it replaces. An image has no order, so
# nothing is causal. The data are scikit-learn's digits: 1,797 images of 8 × 8 pixels, which patches of 2 × 2 turn into
# 16 tokens and a class token.

# %% tags=["needs-timm"]
import timm
from sklearn.datasets import load_digits


class DifferentialViTAttention(nn.Module):
    def __init__(self, attn: nn.Module, layer: int) -> None:
        super().__init__()
        self.attention = DiffAttention(attn.qkv.in_features, attn.num_heads, layer)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.attention(x, attn_mask=attn_mask, is_causal=is_causal)


def new_vit(differential: bool) -> nn.Module:
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 64, "depth": 4, "num_heads": 8}
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    for layer, block in enumerate(vit.blocks, start=1):
        if differential:
            block.attn = DifferentialViTAttention(block.attn, layer)
    return vit


# %% tags=["needs-timm"]
digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)


def accuracy_of_vit(differential: bool, seed: int) -> float:
    torch.manual_seed(seed)
    vit, order = new_vit(differential), torch.randperm(len(images))
    held_out, trained_on = order[:360], order[360:]
    optimizer = torch.optim.AdamW(vit.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(VIT_EPOCHS):
        for batch in trained_on[torch.randperm(len(trained_on))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(vit(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return (vit.eval()(images[held_out]).argmax(-1) == labels[held_out]).float().mean().item()


for name, differential in (("original", False), ("patched", True)):
    accuracies = [accuracy_of_vit(differential, seed) for seed in range(SEEDS)]
    low, high = mean_interval(accuracies)
    print(f"{name:8}  accuracies {', '.join(f'{a:.3f}' for a in accuracies)}, 95 % of the mean [{low:.3f}, {high:.3f}]")
    assert min(accuracies) > 0.2  # of ten digits, a guess is right in a tenth

# %% [markdown]
# Where the intervals of the two overlap, this run has not found a difference. Ten digits of 64 pixels leave little for
# any attention to win.
#
# ## What else the operator takes
#
# **Windows.** With `window=8`, a token looks back at eight keys, itself included. The gradient says how far back a
# result reaches:

# %%
torch.manual_seed(0)
q, k = torch.randn(2, 1, 4, 2, 32, 16)
v = torch.randn(1, 4, 32, 32, requires_grad=True)
diff_attention(q, k, v, 0.5, is_causal=True, window=8)[:, :, -1].sum().backward()
reached = v.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
print("the last of 32 tokens depends on the values at", reached)
assert reached == list(range(24, 32))

# %% [markdown]
# **Packed documents.** Texts of different lengths are laid end to end in one sequence without padding, and
# `cu_seqlens` says where each begins. A token sees its own document alone, so each result is that of the document by
# itself.

# %%
v = v.detach()
ends = torch.tensor([0, 10, 15, 32])
packed = diff_attention(q, k, v, 0.5, is_causal=True, cu_seqlens=ends)
for begin, end in itertools.pairwise(ends.tolist()):
    alone = diff_attention(q[..., begin:end, :], k[..., begin:end, :], v[:, :, begin:end], 0.5, is_causal=True)
    torch.testing.assert_close(packed[:, :, begin:end], alone)
print("three documents in one sequence: each as if it were alone")

# %% [markdown]
# **A cache.** The newest tokens are the queries, all tokens so far the keys. Causality is aligned to the end of the
# keys, so nothing has to be said about positions.

# %%
whole = diff_attention(q, k, v, 0.5, is_causal=True)
newest = diff_attention(q[..., -3:, :], k, v, 0.5, is_causal=True)
torch.testing.assert_close(newest, whole[:, :, -3:])
print("three new queries over 32 keys: the last three rows of the whole")

# %% [markdown]
# **Grouped queries.** Fewer key heads than query heads, as long as one number is a multiple of the other: the cache
# shrinks by that factor. Here two query heads share each key head.

# %%
shared = diff_attention(q, k[:, :2], v[:, :2], 0.5, is_causal=True)
repeated = (t[:, :2].repeat_interleave(2, dim=1) for t in (k, v))
torch.testing.assert_close(shared, diff_attention(q, *repeated, 0.5, is_causal=True))
print(f"queries {tuple(q.shape)}, keys {tuple(k[:, :2].shape)}")

# %% [markdown]
# **Cross-attention.** The queries come from one sequence, keys and values from another, of any length; `attn_mask`
# hides what is padding. The operator takes that as it is. The package's `DiffAttention` does it with
# `context=`; here is the module written by hand:


# %%
class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.lam = heads, Lambda(width // heads // 2, layer)
        self.norm = HeadwiseNorm(width // heads, self.lam.lambda_init)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor, is_source: Tensor) -> Tensor:
        """x (B, N, width), source (B, S, width), is_source (B, S) → (B, N, width)."""
        q, k = (t.unflatten(-1, (self.heads, 2, -1)).permute(0, 2, 3, 1, 4) for t in (self.q(x), self.k(source)))
        v = self.v(source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads = diff_attention(q, k, v, self.lam(), attn_mask=is_source[:, None, None])
        return self.o(self.norm(heads).transpose(1, 2).flatten(2))


cross = CrossAttention(width=64, heads=4, layer=1)
x, source = torch.randn(2, 5, 64), torch.randn(2, 9, 64)
is_source = torch.arange(9) < torch.tensor([[9], [6]])  # the second source is shorter
out = cross(x, source, is_source)
torch.testing.assert_close(out[1:], cross(x[1:], source[1:, :6], torch.ones(1, 6, dtype=torch.bool)))
print("cross-attention", tuple(x.shape), "to", tuple(source.shape), "→", tuple(out.shape))

# %% [markdown]
# **Any λ.** A number, one for each head, or one for each head and token, as in the authors' second version; whatever
# broadcasts to (batch, heads, queries). Gradients go through it. With λ = 0 the operator is ordinary attention with
# the first map:

# %%
plain = F.scaled_dot_product_attention(q[:, :, 0], k[:, :, 0], v, is_causal=True, scale=1 / math.sqrt(16))
torch.testing.assert_close(diff_attention(q, k, v, 0.0, is_causal=True), plain)
by_token = torch.rand(1, 4, 32, requires_grad=True)
diff_attention(q, k, v, by_token, is_causal=True).sum().backward()
print("gradient of λ:", tuple(by_token.grad.shape))

# %% [markdown]
# ## What we have found
#
# - A GPT and a vision transformer became differential by a module of about ten lines and a loop that puts it in; both
#   train.
# - The projections keep their shapes. New are λ and the norm's weight: less than a hundredth of the parameters here.
# - Windows, packed documents, a cache, grouped queries and cross-attention are arguments or shapes of the same call.
#
# A patched model starts anew: its λ and its pairs of maps have to be trained. For weights that you want to keep, see
# *A pretrained Llama becomes differential*. timm has differential vision transformers of its own, trained on ImageNet:
# [how to load them](../converting.md#timms-vision-transformers).
