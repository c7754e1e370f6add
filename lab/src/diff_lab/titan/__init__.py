"""Trains a recipe on many GPUs: our model, weights and batches on torchtitan's engine (lab/requirements-titan.txt)."""

from importlib.util import find_spec

from diff_lab.titan import compatibility

if find_spec("torchtitan") is None:
    raise ModuleNotFoundError("diff_lab.titan needs torchtitan: docs/cluster.md has the two commands that install it.")
compatibility.apply()  # before torchtitan is imported
