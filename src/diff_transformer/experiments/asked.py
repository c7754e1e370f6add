"""What is asked of an experiment: its preset, with the user's own settings in it, checked before anything begins."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diff_transformer.eval.options import chosen_options
from diff_transformer.experiments.framework import PAPER, Experiment, Preset


@dataclass(frozen=True)
class Asked:
    """An experiment as it is to be run.

    Attributes:
        experiment: which.
        preset_name: "cpu" or "gpu".
        preset: with the user's seeds, text and options.
        text: files or folders that the user names; none for the standard library's source.
    """

    experiment: Experiment
    preset_name: str
    preset: Preset
    text: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Everything that decides the numbers, as JSON has it."""
        told = {"experiment": self.experiment.name, "preset": self.preset_name, "text": self.text}
        found: dict[str, Any] = json.loads(json.dumps({**told, **asdict(self.preset)}, default=str))
        del found["minutes"]  # what it is thought to take decides nothing
        return found


def ask(
    experiment: Experiment,
    preset: str = "cpu",
    *,
    seeds: int | None = None,
    text: Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> Asked:
    """Check what is asked, and put it into the preset.

    Args:
        experiment: which.
        preset: "cpu" or "gpu"; "paper" is only checked, see `diff_transformer.experiments.paper`.
        seeds: how many; the preset's own number unless given.
        text: files or folders in place of the standard library's source.
        options: settings of the measurement in place of the preset's.

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: no such preset, one that this machine cannot run, settings that mean nothing to the experiment, or
            an option of another kind than the preset's.
    """
    found = preset_of(experiment, preset)
    name = experiment.name
    if preset == PAPER:
        raise ValueError(f"The paper preset of {name!r} is for a cluster; it is checked, and not run.")
    if preset == "gpu" and not torch.accelerator.is_available():
        took = f"; --preset cpu takes about {experiment.presets['cpu'].minutes:g} min" if _has_time(experiment) else ""
        raise ValueError(f"The gpu preset of {name!r} is planned for one H200, and this machine has no GPU{took}.")
    if seeds is not None and seeds < 1:
        raise ValueError(f"The number of seeds must be 1 or more, got {seeds}.")
    if text and not found.trains_on_text:
        raise ValueError(f"--text does not go with {name!r} at --preset {preset}, which uses no text.")
    for place in text:
        if not Path(place).exists():
            raise FileNotFoundError(f"The text {str(place)!r} does not exist.")
    chosen = chosen_options(options or {}, found.options, repr(name))
    paths = tuple(str(Path(place).resolve()) for place in text)
    own = (f"data.paths={json.dumps(paths)}",) if paths else ()
    resolved = replace(
        found,
        overrides=(*found.overrides, *own),
        seeds=found.seeds if seeds is None else seeds,
        options=chosen,
    )
    return Asked(experiment, preset, resolved, paths)


def preset_of(experiment: Experiment, preset: str) -> Preset:
    """A preset by name. Raises ValueError where the experiment has none of it."""
    if preset not in experiment.presets:
        has = ", ".join(experiment.presets)
        raise ValueError(f"The experiment {experiment.name!r} has no preset {preset!r}; it has {has}.")
    return experiment.presets[preset]


def _has_time(experiment: Experiment) -> bool:
    return "cpu" in experiment.presets and experiment.presets["cpu"].minutes is not None
