"""The twins as language models, which several experiments measure: trained alike, their runs are found again."""

from collections.abc import Mapping
from typing import Any

from diff_transformer.experiments.framework import TWINS, Preset

# About how long the trainings take alone: on two processor cores, and on one H200 (which nobody has timed yet).
CPU_MINUTES, GPU_MINUTES = 5.5, 12


def language_twins(
    *, cpu: Mapping[str, Any], gpu: Mapping[str, Any], paper: Mapping[str, Any], cpu_minutes: float, gpu_minutes: float
) -> dict[str, Preset]:
    """The presets of an experiment that measures them.

    Args:
        cpu, gpu, paper: the options of the measurement.
        cpu_minutes, gpu_minutes: how long it takes, all models together.
    """
    return {
        "cpu": Preset(
            recipe="language",
            overrides=(
                "data.batch_size=8",
                "data.validation_tokens=65536",
                "train.steps=300",
                "train.warmup_steps=30",
                "train.evaluate_every=null",
                "train.checkpoint_every=150",
            ),
            arms=TWINS,
            learning_rates=(1e-3, 4e-3),
            sweep=("train.steps=80",),
            seeds=3,
            options=cpu,
            minutes=CPU_MINUTES + cpu_minutes,
        ),
        "gpu": Preset(
            recipe="small",
            overrides=(
                "data.paths=null",
                "data.validation_tokens=400000",
                "train.steps=1200",
                "train.accumulation=1",
                "train.evaluate_every=null",
                "train.checkpoint_every=600",
            ),
            arms=TWINS,
            learning_rates=(5e-4, 1e-3, 2e-3),
            sweep=("train.steps=300",),
            seeds=5,
            options=gpu,
            minutes=GPU_MINUTES + gpu_minutes,
        ),
        "paper": Preset(recipe="paper-3b", arms=TWINS, options=paper),
    }
