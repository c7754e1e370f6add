"""Trains a recipe on many GPUs: our model, weights and batches on torchtitan's engine (lab/requirements-titan.txt)."""

from diff_lab.titan import compatibility

compatibility.apply()  # before torchtitan is imported
