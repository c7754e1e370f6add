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
# # Your text, both models
#
# On *your* text, at *your* size: is a Differential Transformer better than a Transformer? This page goes from a folder
# of text to a verdict with an interval, by one command, and reads with you what the command says.
#
# *Ten minutes to read, three to run on two cores. You need `pip install . ./lab` in a checkout.*

# %% tags=["parameters"]
TEXT = None  # a folder of yours with .txt, .jsonl or .parquet files
STEPS = 200
VALIDATION_TOKENS = 20000
SEEDS = 3
LEARNING_RATES = "5e-3,1e-2,2e-2"
OUTPUT = "runs/your-text"

# %%
# %config InlineBackend.figure_formats = ["svg"]
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from diff_lab.learning import curves_of
from diff_lab.results_files import read_results

# Grey on a transparent ground can be read on a light page and on a dark one.
GREY, COLOURS = "#8b949e", {"diff": "#2f7fd1", "softmax": "#e0533d"}
plt.rcParams.update({f"{part}.color": GREY for part in ("text", "xtick", "ytick")})
plt.rcParams.update({f"axes.{part}": GREY for part in ("edgecolor", "labelcolor", "titlecolor")})
plt.rcParams.update({f"{part}.facecolor": "none" for part in ("figure", "axes", "savefig", "legend")})


def shell(command: str) -> str:
    """Runs a command line as a terminal would, and shows what it prints."""
    words = shlex.split(command)
    modules = {"diff-transformer": "diff_transformer.cli", "diff-lab": "diff_lab.cli"}
    module = [sys.executable, "-m", modules[words[0]]]
    width = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([*module, *words[1:]], capture_output=True, text=True, check=False, env=width)
    print(f"$ {command}\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    return done.stdout


# %% [markdown]
# ## A folder of text
#
# A `.txt` file is a document, and so is a line of a `.jsonl` file or a row of a `.parquet` file. If you have no folder
# at hand, every Python has the help on its own language with it, half a megabyte of English in some eighty topics; the
# cell below makes a folder of these.

# %%
folder = Path(TEXT or "python-topics")
if TEXT is None:
    from pydoc_data.topics import topics

    folder.mkdir(exist_ok=True)
    for name, topic in topics.items():
        (folder / f"{name}.txt").write_text(topic, encoding="utf-8")
sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
print(f"{len(sizes)} files, {sum(sizes):,} bytes")

# %% [markdown]
# ## A recipe
#
# A recipe says everything that both models share: sizes, data, training. Nobody halves anything for DIFF: `head_dim:
# 8` at a width of 64 makes 8 heads of a Transformer, and the DIFF Transformer of the same recipe has 4 pairs of them.
# The two have the same parameters, but for λ and the norms of the heads.
#
# `initializer_range` and `residual_initializer_range` are the initial weights that suit so narrow a model; *Initial
# weights* in the guide to training says why.

# %%
RECIPE = f"""
name: your-text
model:
  attention_type: diff
  hidden_size: 64
  intermediate_size: 172
  num_hidden_layers: 3
  head_dim: 8
  tie_word_embeddings: true
  initializer_range: 0.1
  residual_initializer_range: 0.01
data:
  kind: text
  paths: [{folder}]
  tokenizer: bpe
  vocab_size: 1024
  length: 128
  batch_size: 8
  validation_fraction: 0.2
  validation_tokens: {VALIDATION_TOKENS}
train:
  steps: {STEPS}
  learning_rate: 1e-2
  schedule: cosine
  warmup_steps: {STEPS // 10}
"""
Path("your-text.yaml").write_text(RECIPE, encoding="utf-8")
plan = shell("diff-lab plan your-text.yaml")

# %% [markdown]
# `plan` reads no data and makes no weights: it is the command to look at before any long run.
#
# ## One command
#
# `compare` trains every learning rate once for each model, takes for each model its own best rate, trains that with
# every seed on the same batches in the same order, measures all of them on documents that none has seen, and judges
# the difference. If you interrupt it, the same command with `--resume` resumes.

# %%
rates = f"--learning-rates {LEARNING_RATES} --seeds {SEEDS}"
said = shell(f"diff-lab compare your-text.yaml {rates} --output {OUTPUT} --overwrite")

# %% [markdown]
# ## What it says
#
# All of it is in one JSON file, with a report beside it (`RESULTS.md` and its figures). The row that the comparison is
# about is its headline: the loss on whole documents of the held-out text.

# %%
results = read_results(Path(OUTPUT) / "recipe_your-text.json")
row = next(row for row in results.comparisons if results.headline.names(row))
print(f"DIFF {row.ours[0]:.3f}, Transformer {row.ours[1]:.3f} {row.unit}")
print(f"difference, seed by seed: {', '.join(f'{d:+.3f}' for d in row.differences)}")
print(f"mean {row.difference:+.3f}")
if row.interval is not None:  # one seed and no documents tell of no others
    print(f"95 % interval [{row.interval[0]:+.3f}, {row.interval[1]:+.3f}]: {row.method}")
print("verdict:", row.verdict)

# %% [markdown]
# Read it in this order:
#
# 1. **The interval.** It allows for other seeds and for other documents. If it holds 0, this run has not found a
#    difference, however large the difference of the means looks.
# 2. **The verdict.** Of a question that you ask, "reproduced" means yes, DIFF is better; "contrary" means no, the
#    Transformer is. Where the table says "still training", one of the two was still improving when training ended:
#    the difference is one of that moment, and a longer training may turn it round.
# 3. **The curves.** They show the moment.

# %%
figure, ax = plt.subplots(figsize=(5.5, 3), layout="constrained")
for variant in curves_of(results.records):
    for number, curve in enumerate(variant.by_seed.values()):
        label = {"diff": "DIFF", "softmax": "Transformer"}[variant.variant] if number == 0 else None
        ax.plot(curve.steps, curve.values, color=COLOURS[variant.variant], label=label, linewidth=1.3)
ax.set(xlabel="training step", ylabel="validation loss (nats per token)", title="a line for each seed")
_ = ax.legend(frameon=False)

# %% [markdown]
# And the rest of the table: `ar_hit` is the loss on tokens that end a pair which stood earlier in the same document,
# so that a model with a good memory knows them; `other` is all other tokens. The notes say what a reader of the
# numbers must know.

# %%
for other in results.comparisons:
    if other is not row and other.verdict is not None:
        print(f"{other.name:15} {other.ours[0]:.3f} against {other.ours[1]:.3f}: {other.verdict}")
for note in results.notes:
    print("note:", note)

# %% [markdown]
# ## The models are still there
#
# Each run is a folder that `generate`, `eval` and `explore` take, and the `model` in it one for `from_pretrained`.
# What does one of them write?

# %%
runs = sorted(path.parent for path in Path(OUTPUT).glob("runs/*/run/model"))
described = {run: json.loads((run / "model" / "config.json").read_text())["attention_type"] for run in runs}
one = next(run for run, kind in described.items() if kind == "diff")
print(len(runs), "trained models")
text = shell(f'diff-transformer generate {one} --prompt "The statement" --max-new-tokens 40')

# %% [markdown]
# ## The answer in a sentence

# %%
answer = {
    "reproduced": "DIFF is better",
    "contrary": "the Transformer is better",
    "inconclusive": "no difference was found",
}[row.verdict]
moment = ", while training went on to improve them" if row.still_learning else ""
print(f"On this text, at this size, after {STEPS} steps: {answer}{moment}.")

# %% [markdown]
# ## What we have found
#
# That sentence, with the interval above: about one text and one size. To move on from it:
#
# - **"Inconclusive"**: the table at the end of the command says how many seeds a difference of that size would need.
# - **"Still training"**: more `train.steps`, until the curves are flat. Who is ahead after a minute of training need
#   not be ahead after an hour.
# - **Other kinds of differential attention**: `--variants diff,softmax,diff_v2`, or with a setting,
#   `diff:model.lambda_init=0.8`.
# - **A larger model**: change the recipe; on several GPUs, see *From a laptop to a cluster*.
#
# The rules behind a verdict are in *Reproduce the paper*.
