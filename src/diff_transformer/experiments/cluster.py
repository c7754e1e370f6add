"""What the paper's own size takes besides the arms: stages of training, and what is measured on each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diff_transformer.experiments.framework import Arm, Preset
from diff_transformer.train import Recipe, load_recipe


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One training of every arm. A later stage begins with the model of the arm's own stage before it.

    Attributes:
        recipe: the name of a shipped recipe.
        overrides: settings of it that are others here, for all arms.
        name: what its runs are called; the recipe's name unless given.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `diff-transformer eval` measures on a checkpoint: either a measure or tasks of the harness.

    Attributes:
        measure: a name of `diff_transformer.eval.measures`.
        options: its settings that are not its defaults.
        text: a file or a folder to measure on; what the run was trained on unless given.
        tasks: names of tasks, separated by commas.
        num_fewshot: examples before each question of a task.
    """

    measure: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    tasks: str = ""
    num_fewshot: int | None = None

    def __post_init__(self) -> None:
        if bool(self.measure) == bool(self.tasks):
            raise ValueError(f"an evaluation is of a measure or of tasks, got {self.measure!r} and {self.tasks!r}")


@dataclass(frozen=True, kw_only=True)
class PaperPreset(Preset):
    """An experiment at the paper's size, for a cluster.

    Attributes:
        stages: of training, in their order.
        recipes: group → the recipe of the first stage, where sizes have recipes of their own.
        evaluations: what is measured on every arm's last checkpoint.
        commands: what is run besides; each is one command line.
        remarks: what a reader must know of the commands: what the paper does not say, and what cannot be had.
    """

    stages: tuple[Stage, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)
    evaluations: tuple[Evaluation, ...] = ()
    commands: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def arm_recipe(self, arm: Arm, *more: str) -> Recipe:
        """The recipe of an arm's first stage. Raises as `load_recipe` does."""
        return load_recipe(self.recipe_name(arm, self.stages[0]), self.settings(arm, self.stages[0], *more))

    def recipe_name(self, arm: Arm, stage: Stage) -> str:
        """The shipped recipe of an arm's stage."""
        return self.recipes.get(arm.group or "", stage.recipe) if stage is self.stages[0] else stage.recipe

    def settings(self, arm: Arm, stage: Stage, *more: str) -> list[str]:
        """What replaces that recipe's own settings."""
        return [*self.overrides, *stage.overrides, *arm.overrides, *more]


# The 3B models of Section 3.1, and their contexts of 64K tokens (Section 3.3).
THREE_BILLION = Stage(recipe="paper-3b")
LONG_CONTEXTS = Stage(recipe="paper-3b-64k")
