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
# # A pretrained Llama becomes differential
#
# Training a model from nothing to try another attention is expensive. Can a Llama that is trained already become
# differential, without losing what it knows? There are two ways, and both begin at the Llama's outputs, up to
# rounding: DIFF V2, whose second map starts as a copy of the first, and DEX, whose heads get a correction that starts
# at 0. A DEX can be folded back into a plain Llama in the end.
#
# We take a small Llama that we train here for a moment, so that nothing has to be downloaded. With your own
# checkpoint, replace the folder `llama`; the commands are the same.
#
# *Ten minutes to read, two to run on two cores. You need `pip install ".[serve]" ./lab` in a checkout.*

# %% tags=["parameters"]
LLAMA_STEPS = 120  # of the training that stands for the Llama's past
STEPS = 60  # of the training that goes on

# %%
import json
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from diff_lab.data import byte_tokenizer
from diff_transformer import attention_maps

disable_progress_bar()  # of loading weights
torch.manual_seed(0)
for made in ("llama-v2", "llama-dex", "llama-folded"):  # by an earlier run of this page
    shutil.rmtree(made, ignore_errors=True)


def shell(command: str) -> str:
    """Runs a command line of diff-transformer as a terminal would, and shows what it prints."""
    words = shlex.split(command)
    assert words[0] == "diff-transformer"
    module = [sys.executable, "-m", "diff_transformer.cli"]
    done = subprocess.run([*module, *words[1:]], capture_output=True, text=True, check=False)
    print(f"$ {command}\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    return done.stdout


# %% [markdown]
# ## The Llama
#
# It reads bytes, and learns from the help on Python's language, which every Python has with it.

# %%
tokenizer = byte_tokenizer()
text = torch.tensor(tokenizer("".join(topics.values()))["input_ids"])
trained_on, held_out = text[: int(0.9 * len(text))], text[int(0.9 * len(text)) :]


def train(model: nn.Module, steps: int, rate: float, annealed: bool = False) -> nn.Module:
    """The same batches for every model; a DEX tells its λ how far training is."""
    drawn = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for step in range(1, steps + 1):
        if annealed:
            model.set_dex_progress(step / steps)
        starts = torch.randint(len(trained_on) - 128, (8, 1), generator=drawn)
        batch = trained_on[starts + torch.arange(128)]
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    return model


def loss_on_held_out(model: nn.Module) -> float:
    batch = held_out[: 32 * 128].view(32, 128)
    with torch.no_grad():
        return model.eval()(batch, labels=batch).loss.item()


# %%
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=172,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.eos_token_id,
)
llama = train(LlamaForCausalLM(config), LLAMA_STEPS, 5e-3)
llama.save_pretrained("llama")
tokenizer.save_pretrained("llama")
first_loss = loss_on_held_out(llama)
print(f"the Llama's loss on held-out text: {first_loss:.3f} nats per byte")

# %% [markdown]
# ## DIFF V2: every query head twice
#
# The conversion gives every query head a copy of itself, and λ = sigmoid(0) = ½ for every token. Both maps are the
# same, so half of each head's output is left, and doubled rows of the output projection make up for it. Doubling a
# floating-point number is exact: the outputs are the Llama's, up to the rounding of another order of operations.

# %%
said = shell("diff-transformer convert llama llama-v2 --from llama --as diff_v2")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(held_out[:128][None]).logits


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    return ((logits(model) - logits(other)).abs().max() / logits(other).abs().max()).item()


v2 = AutoModelForCausalLM.from_pretrained("llama-v2")
print(f"largest difference of the logits: {largest_difference(v2, llama):.1e} of the largest logit")
assert largest_difference(v2, llama) < 1e-5

# %% [markdown]
# The copies do not stay copies: the loss pulls the two maps of a head in opposite directions, and λ learns from the
# first step. We let it go on, beside the Llama itself on the same batches.


# %%
def distance_of_maps(model: nn.Module) -> float:
    """How much of its weight a row of A2 has elsewhere than A1, from 0 to 1, averaged over rows, heads and layers."""
    maps = attention_maps(model.eval(), held_out[:128][None])
    return sum((0.5 * (a1 - a2).abs().sum(-1)).mean().item() for a1, a2, _ in maps) / len(maps)


before = distance_of_maps(v2)
train(v2, STEPS, 2e-3)
llama_further = train(LlamaForCausalLM.from_pretrained("llama"), STEPS, 2e-3)
print(f"distance of the two maps: {before:.3f} → {distance_of_maps(v2):.3f}")
for name, model in (("Llama", llama_further), ("DIFF V2", v2)):
    print(f"{name:8} trained on: loss {first_loss:.3f} → {loss_on_held_out(model):.3f}")
assert before < 1e-6 < distance_of_maps(v2)
assert loss_on_held_out(v2) < first_loss

# %% [markdown]
# DIFF V2 has a larger W_Q now, twice the queries; its keys, values and cache are the Llama's.
#
# ## DEX: a correction that can be folded away
#
# DEX leaves the attention alone and corrects what comes out of a head: $O' = O - \lambda\, O W_D$, with $W_D = 0$ at
# first. That is cheaper still: a $d \times d$ matrix for each head. λ is annealed from $\lambda_{\text{init}}$ to a
# learned value while it trains; `set_dex_progress` in the loop above tells it how far it is, and under transformers'
# Trainer the callback `DexAnnealing` does.

# %%
said = shell("diff-transformer convert llama llama-dex --from llama --as dex")
dex = AutoModelForCausalLM.from_pretrained("llama-dex")
print(f"largest difference of the logits: {largest_difference(dex, llama):.1e}")
added = sum(p.numel() for p in dex.parameters()) / sum(p.numel() for p in llama.parameters()) - 1
print(f"{added:.1%} more parameters")
assert largest_difference(dex, llama) < 1e-5

train(dex, STEPS, 2e-3, annealed=True)
print(f"DEX trained on: loss {first_loss:.3f} → {loss_on_held_out(dex):.3f}")
assert loss_on_held_out(dex) < first_loss

# %% [markdown]
# ### Folded back
#
# The correction is linear, so it goes into the output projection: $W_O$ becomes $(I - \lambda W_D) W_O$, head by head.
# What comes out is a Llama with a Llama's files, for every program that runs Llamas. (llama.cpp and
# Ollama are such programs; here they have not been run.)

# %%
dex.save_pretrained("llama-dex-trained")
tokenizer.save_pretrained("llama-dex-trained")
said = shell("diff-transformer convert llama-dex-trained llama-folded --to llama")
folded = LlamaForCausalLM.from_pretrained("llama-folded")
print(f"{type(folded).__name__} with {sum(p.numel() for p in folded.parameters()):,} parameters, as at the beginning")
print(f"largest difference from the trained DEX: {largest_difference(folded, dex):.1e}")
assert sum(p.numel() for p in folded.parameters()) == sum(p.numel() for p in llama.parameters())
assert largest_difference(folded, dex) < 1e-4

# %% [markdown]
# A DIFF V2 cannot be folded: the difference of two softmaxes is no softmax. It is served as it is.
#
# ## Serving
#
# `diff-transformer serve FOLDER` answers any client of OpenAI's API; here it serves the DIFF V2, on a port that is
# free, and the client is Python's own `urllib`.

# %%
v2.save_pretrained("llama-v2-trained")
tokenizer.save_pretrained("llama-v2-trained")
command = [sys.executable, "-m", "diff_transformer.cli", "serve", "llama-v2-trained", "--port", "0"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
ready = next(line for line in server.stderr if "Serving" in line)
print(ready)


def complete(prompt: str, **settings: Any) -> str:
    address = re.search(r"http://[\d.:]+", ready)[0] + "/v1/completions"
    content = json.dumps({"model": "llama-v2-trained", "prompt": prompt, **settings}).encode()
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["text"]


answer = complete("The statement", max_tokens=24, temperature=0)
print(repr(answer))

# %% [markdown]
# Greedy text from the server is what `generate` writes. SIGTERM or Ctrl-C ends the server.

# %%
prompt = tokenizer("The statement", return_tensors="pt")
written = v2.generate(**prompt, max_new_tokens=24, do_sample=False)
server.terminate()
server.wait()
server.stderr.close()
assert tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True) == answer

# %% [markdown]
# ## What we have found
#
# - Both conversions begin at the Llama's outputs, and both models went on learning from there.
# - In DIFF V2 the two maps of a head, equal at first, parted in training.
# - A trained DEX was folded into a Llama of the old size, with the same outputs up to rounding.
# - The server's text is that of `generate`.
#
# Whether the differential model is *better* than the Llama that was trained on as long is another question, and a
# minute of training on a small model cannot answer it: *Your text, both models* shows how to ask. docs/converting.md
# and docs/dex.md have the details of both conversions.
