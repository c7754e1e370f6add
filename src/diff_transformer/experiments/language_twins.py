"""The twins as language models, looked into by several experiments: the runs of Figure 4's first stage, found again."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diff_transformer.experiments.cluster import THREE_BILLION, Evaluation, PaperPreset
from diff_transformer.experiments.fig4 import FIG_4
from diff_transformer.experiments.framework import TWINS, Preset

# About how long that stage takes alone: on two processor cores, and on one H200 (which nobody has timed yet).
CPU_MINUTES, GPU_MINUTES = 6.5, 15


def language_twins(
    *,
    cpu: Mapping[str, Any],
    gpu: Mapping[str, Any],
    paper: tuple[Evaluation, ...],
    remarks: tuple[str, ...] = (),
    cpu_minutes: float,
    gpu_minutes: float,
) -> dict[str, Preset]:
    """The presets of an experiment that measures them.

    Args:
        cpu, gpu: the options of the measurement.
        paper, remarks: what is measured on the paper's models, and what a reader must know of it.
        cpu_minutes, gpu_minutes: how long it takes, all models together.
    """
    found: dict[str, Preset] = {
        "paper": PaperPreset(stages=(THREE_BILLION,), arms=TWINS, evaluations=paper, remarks=remarks)
    }
    for name, options, minutes in (("cpu", cpu, CPU_MINUTES + cpu_minutes), ("gpu", gpu, GPU_MINUTES + gpu_minutes)):
        found[name] = replace(FIG_4.presets[name], extension=(), options=options, minutes=minutes)
    return found
