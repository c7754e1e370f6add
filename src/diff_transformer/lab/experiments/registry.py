"""Finds an experiment by its name; each is imported when it is asked for."""

import importlib

from diff_transformer.lab.experiments.experiment import Experiment
from diff_transformer.suggestions import did_you_mean

# Name → "module:object" in this package. One line for each, in the order of the paper.
EXPERIMENTS = {
    "table1": "harness_experiments:TABLE_1",
    "fig3": "scaling_experiment:FIG_3",
    "fig4": "language_experiments:FIG_4",
    "table2": "needle_experiments:TABLE_2",
    "fig5": "needle_experiments:FIG_5",
    "table3": "needle_experiments:TABLE_3",
    "fig6": "in_context_experiments:FIG_6",
    "fig7": "in_context_experiments:FIG_7",
    "table4": "answer_experiments:TABLE_4",
    "table5": "inside_experiments:TABLE_5",
    "fig8": "inside_experiments:FIG_8",
    "table6": "language_experiments:TABLE_6",
    "table7": "throughput_experiment:TABLE_7",
    "table8": "harness_experiments:TABLE_8",
    "appendix_c": "answer_experiments:APPENDIX_C",
    "appendix_g": "inside_experiments:APPENDIX_G",
    "recall": "recall_experiments:RECALL",
    "v2": "recall_experiments:V2",
    "lr_sensitivity": "recall_experiments:LR_SENSITIVITY",
    "length_generalisation": "recall_experiments:LENGTH_GENERALISATION",
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the nearest name and all names where there is none."""
    if name not in EXPERIMENTS:
        names = ", ".join(EXPERIMENTS)
        raise ValueError(f"There is no experiment {name!r}{did_you_mean(name, EXPERIMENTS)} There are {names}.")
    module, attribute = EXPERIMENTS[name].split(":")
    found = getattr(importlib.import_module(f"diff_transformer.lab.experiments.{module}"), attribute)
    assert isinstance(found, Experiment)
    return found
