"""All experiments by name. Each is imported when it is asked for."""

import difflib
import importlib

from diff_transformer.experiments.framework import Experiment

# Name → "module:object" in this room. One line for each, in the order of the paper.
EXPERIMENTS = {
    "recall": "recall:RECALL",
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError naming the nearest where there is none."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(EXPERIMENTS)}."
        raise ValueError(f"There is no experiment {name!r}; {hint}")
    module, attribute = EXPERIMENTS[name].split(":")
    found = getattr(importlib.import_module(f"diff_transformer.experiments.{module}"), attribute)
    assert isinstance(found, Experiment)
    return found
