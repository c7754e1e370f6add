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
# # From a laptop to a cluster
#
# A recipe trains on your laptop. What has to change before it trains on sixteen GPUs of a cluster? In the recipe:
# nothing. Only what starts it changes: `torchrun`, on several machines the engine, and around it Slurm, Kubernetes or
# SkyPilot. This page runs the same recipe in one process and in two, sees that they learn the same, and then reads the
# files that start it elsewhere, with the parts that matter in each.
#
# *Ten minutes to read, two to run on two cores. You need a checkout, and in it `pip install . ./lab`. No
# cluster has run these files here: each is checked as far as its tool can check it without one, as the last section
# says.*

# %% tags=["parameters"]
STEPS = 30
CLUSTER = "../../examples/cluster"  # of the checkout

# %%
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from torch.distributed.run import get_args_parser


def shell(command: str) -> str:
    """Runs a command line as a terminal would, and shows what it prints."""
    program, *words = shlex.split(command)
    modules = {"diff-lab": "diff_lab.cli", "torchrun": "torch.distributed.run"}
    start = [sys.executable, "-m", modules[program], *words]
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    print(f"$ {command}\n{done.stdout}")
    assert done.returncode == 0, done.stderr
    return done.stdout


# %% [markdown]
# ## The recipe
#
# `data.batch_size` is the batch of a step over *all* processes, so a learning rate that was right for one is right for
# many. Nothing in the file says how many there are.

# %%
RECIPE = f"""
name: mine
model: {{attention_type: diff, hidden_size: 64, intermediate_size: 172, num_hidden_layers: 2, head_dim: 16}}
data: {{kind: retrieval, num_pairs: 4, length: 64, batch_size: 16}}
train: {{steps: {STEPS}, learning_rate: 3e-3, warmup_steps: 5, log_every: 1, checkpoint_every: 10}}
"""
Path("mine.yaml").write_text(RECIPE, encoding="utf-8")
said = shell("diff-lab train mine.yaml --output runs/one --overwrite")

# %% [markdown]
# ## Two processes
#
# `torchrun` starts as many processes as it is told, and each finds the others. Without GPUs they talk over gloo; with
# GPUs each takes one of its own. Everything after the module is as before.

# %%
said = shell("torchrun --nproc-per-node 2 -m diff_lab.train mine.yaml --output runs/two --overwrite")


def losses(run: str) -> list[float]:
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [metrics["loss"] for metrics in map(json.loads, lines) if "loss" in metrics]


one, two = losses("runs/one"), losses("runs/two")
largest = max(abs(a - b) for a, b in zip(one, two, strict=True))
print(f"loss after {len(one)} steps: {one[-1]:.4f} in one process, {two[-1]:.4f} in two")
print(f"largest difference on the way: {largest:.1e}")
assert largest < 1e-2

# %% [markdown]
# Each process computes half of every batch, and the gradients are averaged: the same sums in another order. The
# difference is rounding, which training amplifies slowly.
#
# ## One command for every start
#
# Machines of a cluster fail, and jobs are put back into the queue. So the command that starts a run has to be the
# command that goes on with it: `--resume auto` begins where the folder holds no run, and resumes where it holds one.
# We begin a run, end it by the signal that schedulers send, and give the same command again.

# %%
command = [sys.executable, "-m", "diff_lab.cli", "train", "mine.yaml", "--output", "runs/three"]
command += ["--resume", "auto"]
shutil.rmtree("runs/three", ignore_errors=True)  # of an earlier run of this page
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
metrics = Path("runs/three/metrics.jsonl")
while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
    time.sleep(0.05)  # until it has logged its first step
process.terminate()
print("exit code", process.wait(), "after", len(losses("runs/three")), "steps")
said = shell("diff-lab train mine.yaml --output runs/three --resume auto")
print(f"loss after {STEPS} steps: {losses('runs/three')[-1]:.4f}, without the interruption {one[-1]:.4f}")
assert losses("runs/three")[-1] == one[-1]

# %% [markdown]
# Not similar: equal. On SIGTERM the step is finished and a checkpoint written, and a batch is a function of the
# recipe, the seed and the step.
#
# ## Before you book sixteen GPUs
#
# `plan` counts what a run will take, without weights and without GPUs: memory on each, bytes between them, days; and
# names the layout that fits, with its command. This is the recipe in `examples/cluster`, on two machines of eight H200:

# %%
plan = shell(f"diff-lab plan {CLUSTER}/recipe.yaml model.vocab_size=32000 --gpus 16 --gpu h200")

# %% [markdown]
# ## Slurm
#
# One `torchrun` on each machine, started by `srun`. The first machine's name is where they meet. What matters in the
# lines for Slurm: it puts the job back into the queue after a failure (`--requeue`), and sends SIGTERM ten minutes
# before the time is up, so that a checkpoint is written.

# %%
print(Path(CLUSTER, "train.sbatch").read_text(encoding="utf-8"))

# %% [markdown]
# ## Kubernetes
#
# A JobSet keeps a group of pods together: if one fails, all start again, which is what a training on several machines
# needs. The pods have names that do not change, so the address of the first one is known beforehand.

# %%
jobset = yaml.safe_load(Path(CLUSTER, "jobset.yaml").read_text(encoding="utf-8"))
pods = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
container = pods["template"]["spec"]["containers"][0]
print(pods["parallelism"], "pods with", container["resources"]["limits"])
print(" ".join(container["command"]))

# %% [markdown]
# Two settings are easily forgotten. A container has 64 MB of shared memory, and NCCL wants more: `/dev/shm` is a
# volume in memory. And Kubernetes waits 30 seconds from SIGTERM to SIGKILL unless `terminationGracePeriodSeconds` says
# otherwise, which is short for a step and a checkpoint.
#
# ## SkyPilot
#
# SkyPilot looks for a machine, in a cluster or a cloud, and `sky jobs launch` looks for another when that one is taken
# away. The run's folder is on a volume that outlives the machine.

# %%
print(Path(CLUSTER, "skypilot.yaml").read_text(encoding="utf-8"))

# %% [markdown]
# ## The same command in all of them
#
# Taken apart by torchrun's own parser: two machines start `diff_lab.titan`, which trains the same recipe on torchtitan,
# with the layout that `plan` named; one machine starts `diff_lab.train`. Given again, each resumes.

# %%
sbatch, sky = (Path(CLUSTER, name).read_text(encoding="utf-8") for name in ("train.sbatch", "skypilot.yaml"))
commands = {
    "Slurm": re.search(r"srun torchrun(.+)", sbatch.replace("\\\n", " "))[1],
    "Kubernetes": " ".join(container["command"][1:]),
    "SkyPilot": re.search(r"torchrun(.+)", yaml.safe_load(sky)["run"].replace("\\\n", " "))[1],
}
for name, text in commands.items():
    numbers = text.replace('"$SLURM_JOB_NUM_NODES"', "2").replace('"$SLURM_GPUS_ON_NODE"', "8")
    parsed = get_args_parser().parse_args(shlex.split(numbers))
    print(f"{name:10} {parsed.training_script} {' '.join(parsed.training_script_args)}")
    assert parsed.module
    assert parsed.training_script == ("diff_lab.train" if name == "SkyPilot" else "diff_lab.titan")

# %% [markdown]
# ## What we have found
#
# - One recipe in one process and in two: the same losses but for rounding.
# - A run that was ended by SIGTERM went on by the same command, to exactly the loss of a run that was not.
# - The files for Slurm, Kubernetes and SkyPilot hold one command each, and differ in who starts it and where its
#   folder lies.
#
# How far they are checked: the batch script by shellcheck, by sbatch itself up to the point where it asks for a
# cluster, and by running it with stand-ins for Slurm's commands; the manifest by the schema of JobSet; the SkyPilot
# task by SkyPilot's own reader, where it is installed; the recipe by loading it. None has been on a cluster.
# docs/training.md says what happens in each kind of failure.
