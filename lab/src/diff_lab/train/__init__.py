"""Trains the models of recipes, in one loop."""

from diff_lab.files import read_metrics
from diff_lab.train.loop import TrainedRun, TrainingInterrupted, TrainingRun, open_run, train
from diff_lab.train.progress import Progress
from diff_lab.train.recipe import Recipe, build_config, load_recipe, parse_recipe, shipped_recipes
from diff_lab.train.run_setup import Data, build_data, build_model
from diff_lab.train.step import DivergenceError

__all__ = [
    "Data",
    "DivergenceError",
    "Progress",
    "Recipe",
    "TrainedRun",
    "TrainingInterrupted",
    "TrainingRun",
    "build_config",
    "build_data",
    "build_model",
    "load_recipe",
    "open_run",
    "parse_recipe",
    "read_metrics",
    "shipped_recipes",
    "train",
]
