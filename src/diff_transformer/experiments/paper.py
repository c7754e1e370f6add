"""The paper's own configuration of an experiment: checked without numbers, and told how a cluster would run it."""

import re
import shlex
from dataclasses import dataclass

from diff_transformer.experiments.asked import preset_of
from diff_transformer.experiments.fairness import Counts, check_counts, check_recipes, count
from diff_transformer.experiments.framework import PAPER, Arm, Experiment
from diff_transformer.train import Recipe, build_config
from diff_transformer.train.plan import vocabulary


@dataclass(frozen=True)
class PaperArm:
    """An arm at the paper's size.

    Attributes:
        arm: which.
        recipe: the whole of it, checked.
        counts: parameters of its model, built on the meta device.
        command: what trains it.
    """

    arm: Arm
    recipe: Recipe
    counts: Counts
    command: str


def check_paper(experiment: Experiment) -> list[PaperArm]:
    """Read the recipes of an experiment's paper preset, build its models without numbers, and compare their sizes.

    Returns:
        What was found for each arm; empty for an experiment that trains nothing.

    Raises:
        ValueError: it has no such preset, a recipe is not valid, or the arms are not alike.
    """
    preset = preset_of(experiment, PAPER)
    recipes = {arm: preset.arm_recipe(arm) for arm in preset.arms}
    check_recipes(recipes)
    counts = {arm: count(build_config(recipe, vocabulary(recipe))) for arm, recipe in recipes.items()}
    check_counts(counts, preset)
    found = []
    for arm, recipe in recipes.items():
        launcher = ["torchrun", "--nproc-per-node", str(preset.gpus), "-m", "diff_transformer.train"]
        folder = re.sub(r"[^a-zA-Z0-9._]+", "-", f"{experiment.name}-{arm.label}".replace("λ", "lambda"))
        settings = [preset.recipe, *preset.overrides, *arm.overrides, "--output", f"runs/{folder}"]
        found.append(PaperArm(arm, recipe, counts[arm], shlex.join([*launcher, *settings])))
    return found
