"""All experiments by name. Each is imported when it is asked for."""

import difflib
import importlib

from diff_transformer.experiments.framework import Experiment

# Name → "module:object" in this room. One line for each, in the order of the paper.
EXPERIMENTS = {
    "table1": "table1:TABLE_1",
    "fig3": "fig3:FIG_3",
    "fig4": "fig4:FIG_4",
    "table2": "table2:TABLE_2",
    "fig5": "fig5:FIG_5",
    "table3": "table3:TABLE_3",
    "fig6": "fig6:FIG_6",
    "fig7": "fig7:FIG_7",
    "table4": "table4:TABLE_4",
    "table5": "table5:TABLE_5",
    "fig8": "fig8:FIG_8",
    "table6": "table6:TABLE_6",
    "table7": "table7:TABLE_7",
    "table8": "table8:TABLE_8",
    "appendix_c": "appendix_c:APPENDIX_C",
    "appendix_g": "appendix_g:APPENDIX_G",
    "recall": "recall:RECALL",
    "v2": "v2:V2",
    "lr_sensitivity": "lr_sensitivity:LR_SENSITIVITY",
    "length_generalisation": "length_generalisation:LENGTH_GENERALISATION",
}


def find_experiment(name: str) -> Experiment:
    """The experiment of that name. Raises ValueError with the nearest name and all names where there is none."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]!r}? There" if near else "there"
        raise ValueError(f"There is no experiment {name!r}; {hint} are {', '.join(EXPERIMENTS)}.")
    module, attribute = EXPERIMENTS[name].split(":")
    found = getattr(importlib.import_module(f"diff_transformer.experiments.{module}"), attribute)
    assert isinstance(found, Experiment)
    return found
