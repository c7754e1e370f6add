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
# # Read a differential attention map
#
# Two maps and their difference, in every head of every layer: which of them should one look at, and what do they say?
# We take the small model that comes with the package, which finds needles among tokens of noise, follow one question
# from the map to the answer, and then turn λ by hand to see what depends on it.
#
# The pictures here are drawn by a few lines of matplotlib. `diff-transformer explore` shows the same in the browser,
# of every head at once and with λ under a slider; the last section says how.
#
# *Ten minutes to read, half a minute to run. You need a checkout, and in it `pip install ".[explore]" ./lab`.*

# %%
# %config InlineBackend.figure_formats = ["svg"]
import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import FuncNorm, LinearSegmentedColormap
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import diff_transformer
from diff_lab.data import RetrievalBatches
from diff_lab.train import load_recipe
from diff_transformer import attention_maps
from diff_transformer.explorer import ExploredModel, LambdaSettings

disable_progress_bar()  # of loading weights
# Grey on a transparent ground can be read on a light page and on a dark one.
GREY, BLUE, ORANGE = "#8b949e", "#2f7fd1", "#e0533d"
plt.rcParams.update({f"{part}.color": GREY for part in ("text", "xtick", "ytick")})
plt.rcParams.update({f"axes.{part}": GREY for part in ("edgecolor", "labelcolor", "titlecolor")})
plt.rcParams.update({f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig", "legend")})

# %% [markdown]
# ## The task and the model
#
# A text of this task has four *needles*, each a key and right after it its value, hidden among tokens of noise. Then
# come questions: a mark, a key, and the value to be predicted. Let the first question be ours.

# %%
folder = Path(diff_transformer.pretrained("needles-diff"))
model = AutoModelForCausalLM.from_pretrained(folder).eval()
drawn = load_recipe(folder / "recipe.yaml").data
task = RetrievalBatches(
    num_pairs=drawn.num_pairs,
    length=drawn.length,
    batch_size=1,
    num_queries=drawn.num_queries,
    repeats=True,
    num_keys=drawn.num_keys,
    num_values=drawn.num_values,
    num_noise=drawn.num_noise,
)
texts = task.sample(256, seed=1)
asked_at = int(texts.query_positions[0, 0])  # the same place in every text
tokens = texts.input_ids[:1, : asked_at + 1]
answer_at = int(texts.answer_spans[0, 0])
words = task.names(tokens[0])
print(" ".join(words))
with torch.no_grad():
    predicted = model(tokens).logits[0, -1].argmax().item()
print(f"the answer is {words[answer_at]}; the model says {task.words()[predicted]}")
assert task.words()[predicted] == words[answer_at]

# %% [markdown]
# ## Which head?
#
# Two layers, and in each two heads of two maps. For each head we ask: of all the weight in the row of the question,
# which share lies on the answer? A weight may be negative, so sizes are taken; one text may be an exception, so the
# mean of 256 is.


# %%
def share(row: Tensor, answers: Tensor) -> Tensor:
    """row (B, H, N): the share of its size that lies on each text's answer, (B, H)."""
    sizes = row.abs()
    return sizes.gather(-1, answers.view(-1, 1, 1).expand(-1, row.shape[1], 1)).squeeze(-1) / sizes.sum(-1)


many, answers = texts.input_ids[:, : asked_at + 1], texts.answer_spans[:, 0]
shares = {}
for layer, maps in enumerate(attention_maps(model, many), start=1):
    for name, weights in zip(("A1", "A2", "A1 − λA2"), maps, strict=True):
        shares[layer, name] = share(weights[:, :, -1], answers).mean(0)
        by_head = "   ".join(f"head {h}: {s:.2f}" for h, s in enumerate(shares[layer, name], start=1))
        print(f"layer {layer}, {name:9}", by_head)
left = torch.stack([shares[layer, "A1 − λA2"] for layer in (1, 2)])  # layers, heads
LAYER, HEAD = left.argmax().item() // left.shape[1] + 1, left.argmax().item() % left.shape[1]
print(f"\nthe head that looks most at answers: head {HEAD + 1} of layer {LAYER}")

# %% [markdown]
# ## One head in full
#
# Rows are the tokens that look, columns those that are looked at. Blue is positive, orange negative, and the colour
# goes by the square root of the weight, as most weights are small. The arrow is the answer, and the last row is the
# question.

# %%
a1, a2, difference = (maps[0, HEAD] for maps in attention_maps(model, tokens)[LAYER - 1])
lam = model.model.layers[LAYER - 1].self_attn.lam().item()
root = (lambda x: np.sign(x) * np.abs(x) ** 0.5, lambda x: np.sign(x) * x**2)
ends = [(0, ORANGE), (0.5, f"{ORANGE}00"), (0.5, f"{BLUE}00"), (1, BLUE)]
colours = LinearSegmentedColormap.from_list("signed", ends)  # nothing is drawn where a weight is 0
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained", sharey=True)
for ax, weights, title in zip(axes, (a1, lam * a2, difference), ("A1", f"λA2, λ = {lam:.2f}", "A1 − λA2"), strict=True):
    scale = FuncNorm(root, vmin=-1, vmax=1)
    ax.imshow(weights.tolist(), cmap=colours, norm=scale, interpolation="nearest")
    ax.annotate("", (answer_at, -0.5), (answer_at, -4), arrowprops={"arrowstyle": "->", "color": GREY})
    ax.set(title=title, xlabel="looked at", xlim=(-0.5, len(words) - 0.5))
    ax.title.set_y(1.12)
_ = axes[0].set_ylabel("looks")

# %% [markdown]
# ## The row of the question
#
# The picture shows where a head looks. What it does with one question is a row, drawn as curves: both maps, and what
# is left.

# %%
figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
ax.plot(a1[-1].tolist(), color=GREY, linewidth=1, label="A1")
ax.plot((lam * a2[-1]).tolist(), color=GREY, linewidth=1, linestyle=":", label="λA2")
ax.plot(difference[-1].tolist(), color=BLUE, linewidth=1.8, label="A1 − λA2")
ax.axvline(answer_at, color=ORANGE, linewidth=1)
named = [at for at, word in enumerate(words) if word != "·"]
ax.set_xticks(named, [words[at] for at in named], rotation=90, fontsize=8)
ax.legend(frameon=False, ncols=3)
removed = torch.minimum(a1[-1], (lam * a2[-1]).clamp(min=0)).sum().item()
print(f"of A1's weight, {removed:.0%} is also in λA2, and cancels")
for name, row in (("A1", a1[-1]), ("A2", a2[-1]), ("A1 − λA2", difference[-1])):
    print(f"{name:9} {row[answer_at].abs() / row.abs().sum():.2f} of its size on the answer, sum {row.sum():+.2f}")

# %% [markdown]
# This is not the picture of the paper's Figure 1, in which the Transformer's attention is spread over the text and the
# difference is sharp. Here A1 has found the answer by itself. A2 looks elsewhere, so that hardly anything cancels, and
# what it subtracts comes out below zero. That holds for many texts as well:

# %%
first_alone, both = (shares[LAYER, name][HEAD].item() for name in ("A1", "A1 − λA2"))
print(f"share on the answer over {len(many)} texts: A1 alone {first_alone:.2f}, A1 − λA2 {both:.2f}")
assert first_alone > both

# %% [markdown]
# Three things to keep in mind when reading such a row:
#
# - It adds up to $1 - \lambda$, not to 1: the head's norm sets the size of its result afterwards, so compare *shares*,
#   and not heights, between heads and with a Transformer.
# - A weight below zero is not noise. The value of that token is subtracted, and the token counts.
# - A low share of one map is no fault: only the difference reaches the values.
#
# ## And the Transformer?
#
# `needles-softmax` has the same sizes and was trained on the same texts. It has four single maps to a layer.

# %%
other = AutoModelForCausalLM.from_pretrained(diff_transformer.pretrained("needles-softmax")).eval()
for layer, maps in enumerate(attention_maps(other, many), start=1):
    of_heads = share(maps.difference[:, :, -1], answers).mean(0)  # nothing is subtracted: the one map
    print(f"layer {layer}", "   ".join(f"head {h + 1}: {s:.2f}" for h, s in enumerate(of_heads)))
right = {}
for name, which in (("DIFF", model), ("Transformer", other)):
    with torch.no_grad():
        right[name] = (which(many).logits[:, -1].argmax(-1) == many.gather(1, answers[:, None])[:, 0]).float().mean()
    print(f"{name}: {right[name]:.3f} of {len(many)} questions answered")
assert min(right.values()) > 0.9

# %% [markdown]
# Both answer nearly everything, however their attention looks. A map says where a model looks, and not how good it is;
# these two, trained once each, do not say which kind of attention is better.
#
# ## Turn λ by hand
#
# What would the model do with another λ? `ExploredModel` runs it with λ replaced, in all layers, in one, or in one
# head. We follow the probability of the right answer.

# %%
explored = ExploredModel(model, "needles-diff")
values = [step / 10 for step in range(-5, 16)]
figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
answer = tokens[0, answer_at].item()
at_zero = {}
for layer, colour in ((1, BLUE), (2, ORANGE)):
    settings = [LambdaSettings(layers={layer: value}) for value in values]
    chances = [explored.trace(tokens[0].tolist(), one).next_log_probabilities[answer].exp().item() for one in settings]
    learned = model.model.layers[layer - 1].self_attn.lam().item()
    at_zero[layer] = chances[values.index(0.0)]
    ax.plot(values, chances, color=colour, label=f"λ of layer {layer}")
    ax.axvline(learned, color=colour, linestyle=":", linewidth=1)
ax.set(xlabel="λ (dotted: the learned one)", ylabel="probability of the answer", ylim=(-0.03, 1.03))
ax.legend(frameon=False)
untouched = explored.trace(tokens[0].tolist()).next_log_probabilities[answer].exp().item()
print(f"probability with the learned λ: {untouched:.2f}")
print(f"without subtraction in layer 1: {at_zero[1]:.2f}, in layer 2: {at_zero[2]:.2f}")
assert at_zero[1] < 0.5 < at_zero[2]

# %% [markdown]
# This answer needs the subtraction of the *first* layer, whose heads hardly look at answers, and does without that of
# the layer whose head finds it. So a head's share on the answer does not say what its subtraction is for. The curves
# also show how much room λ has around its learned value. They are about one text; the slider of the explorer makes
# such a curve for any other.
#
# ## In the browser
#
# The explorer shows the same for all heads, with the Transformer beside it. `diff-transformer explore` opens it with
# the models of the package; with `--output` it writes one page that needs no server and no network, to be sent to
# somebody. In a notebook, `diff_transformer.explore(model, tokenizer, text)` is the same as a widget, for models that
# have a tokenizer.


# %%
def shell(command: str) -> None:
    """Runs a command line of diff-transformer as a terminal would, and shows what it prints."""
    module = [sys.executable, "-m", "diff_transformer.cli"]
    done = subprocess.run([*module, *shlex.split(command)[1:]], capture_output=True, text=True, check=False)
    print(f"$ {command}\n{done.stdout}")
    assert done.returncode == 0, done.stderr


shell("diff-transformer explore needles-diff --compare needles-softmax --output map.html --overwrite")
page = Path("map.html").read_text(encoding="utf-8")
print(f"{len(page) / 1e6:.1f} MB, {len(re.findall('<script', page))} scripts, all in the page")

# %% [markdown]
# ## What we have found
#
# - Most heads look elsewhere: begin with the share of each head on what matters, and look at one head then.
# - A row of the difference adds up to $1 - \lambda$ and has negative weights that count; shares are what can be
#   compared.
# - λ can be replaced in a trained model, layer by layer. The answer depended on the first layer's subtraction, which
#   the shares had not told.
# - In this small model the subtraction is no filter that makes a spread map sharp: A1 is sharp alone, and A2 adds
#   weights below zero.
# - The two models answer alike and spread their attention differently.
