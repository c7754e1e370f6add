"""What Figures 6 and 7 share: the training, whose runs they have in common."""

from typing import Any

from diff_transformer.experiments.framework import TWINS, Preset
from diff_transformer.experiments.tokens import FINDING
from diff_transformer.results import Baseline
from diff_transformer.train import Recipe
from diff_transformer.train.recipe import ManyShotData

# Two cores.
CPU = Preset(
    recipe="retrieval",
    overrides=(
        *FINDING,
        "train.steps=1500",
        "data={kind: many_shot, shots: 32, classes: 6, labels: 16, words: 12, item_length: 1, vary: true}",
    ),
    arms=TWINS,
    learning_rates=(7.5e-4, 1.5e-3, 3e-3, 6e-3),
    seeds=3,
)
# One H200: more classes, items of two words, longer sequences.
ON_GPU = Preset(
    recipe="retrieval",
    overrides=(
        "model.hidden_size=256",
        "model.intermediate_size=688",
        "model.num_hidden_layers=4",
        "model.head_dim=32",
        "model.rope_theta=1000",
        "data={kind: many_shot, shots: 256, classes: 50, labels: 256, words: 200, item_length: 2, vary: true}",
        "data.batch_size=64",
        "train.steps=6000",
        "train.precision=bf16",
        "train.inspect_every=null",
        "train.evaluate_every=2000",
        "train.checkpoint_every=2000",
    ),
    arms=TWINS,
    learning_rates=(1e-3, 3e-3),
    sweep=("train.steps=2000",),
    seeds=4,
)
NOTES = (
    "The task is synthetic: words that belong to classes, drawn anew for each sequence, a share of the labels wrong. "
    "`diff-transformer eval CHECKPOINT --measure many_shot --option folder=FOLDER` asks a language model about TREC, "
    "Banking-77 or CLINC-150.",
)


def guessing(recipe: Recipe, name: str, group: str, **more: Any) -> Baseline:
    """What guessing among a sequence's labels gives: an item's class does not depend on how often others are shown, so
    knowing which labels occur gives no more.

    Args:
        recipe: of the runs.
        name, group: the measure and its part.
        more: other fields of the baseline.
    """
    assert isinstance(recipe.data, ManyShotData)  # the presets' recipes
    chance = 1 / recipe.data.classes
    return Baseline(name=name, group=group, chance=chance, floor=chance, steps=recipe.train.steps, **more)
