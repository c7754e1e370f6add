"""Trains a recipe on many GPUs with torchtitan (extra `titan`): our model, weights and batches, torchtitan's engine."""

from diff_lab.titan import compatibility

compatibility.apply()  # before torchtitan is imported
