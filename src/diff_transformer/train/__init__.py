"""Training: a recipe says what, one loop says how."""

from diff_transformer.train.loop import TrainedRun, train
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.progress import DivergenceError, Progress, TrainingInterrupted
from diff_transformer.train.recipe import Recipe, build_config, load_recipe, parse_recipe, shipped_recipes
from diff_transformer.train.setup import Data, build_data, build_model

__all__ = [
    "Data",
    "DivergenceError",
    "Progress",
    "Recipe",
    "TrainedRun",
    "TrainingInterrupted",
    "build_config",
    "build_data",
    "build_model",
    "load_recipe",
    "parse_recipe",
    "read_metrics",
    "shipped_recipes",
    "train",
]
