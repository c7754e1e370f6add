"""What an experiment's definition says of its results: new ones, and those of an earlier version, which lack it."""

from dataclasses import replace

from diff_transformer.experiments.framework import Experiment
from diff_transformer.experiments.registry import EXPERIMENTS, find_experiment
from diff_transformer.results import Baseline, ResultsFile, judge
from diff_transformer.train import load_recipe


def as_defined(file: ResultsFile) -> ResultsFile:
    """The results with what the definition of their experiment says of them, see `with_definition`.

    Results of an experiment that is not known, or that record no settings, stay as they are.
    """
    asked = file.settings.get("asked", {})
    if asked.get("experiment") not in EXPERIMENTS or not {"recipe", "overrides", "options"} <= asked.keys():
        return file
    return with_definition(file, find_experiment(asked["experiment"]))


def with_definition(file: ResultsFile, experiment: Experiment) -> ResultsFile:
    """The results of an experiment with its headline and baselines, and verdicts by the whole rule.

    Both follow from the settings that the file records: the recipe, its overrides, and the measurement's options.
    """
    asked = file.settings["asked"]
    headline = None if experiment.headline is None else experiment.headline(asked["options"])
    baselines: tuple[Baseline, ...] = ()
    if experiment.baselines is not None:
        recipe = load_recipe(asked["recipe"], asked["overrides"])
        baselines = tuple(experiment.baselines(recipe, asked["options"]))
    return judge(replace(file, headline=headline, baselines=baselines))
