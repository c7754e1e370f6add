"""Says what is trained of a variant: trials of learning rates, then every seed at the best, in one stage or two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from diff_lab.experiments.experiment import ParameterCounts, Preset, Variant, section
from diff_lab.experiments.learning_rates import choose_rate, next_rate
from diff_lab.experiments.run_store import Stored
from diff_lab.experiments.time_left import Cost, ManyTrainings
from diff_lab.experiments.training_queue import Plan, Training
from diff_lab.record import Better
from diff_lab.results_files import number_of
from diff_lab.train import Recipe
from diff_lab.train.recipe import override_of


@dataclass(frozen=True)
class TrainedVariant:
    """What came of a variant.

    Its learning rate; the validation at each that was tried, NaN where a run diverged or there was no choice; what is
    to be told of the choice. With each seed, the runs of its stages, each with its recipe: where the first one diverged
    there is no second.
    """

    learning_rate: float
    tried: dict[float, float]
    remarks: list[str]
    stages: list[list[tuple[Stored, Recipe]]]


class TrainingOfVariant:
    """A variant of a preset, whose parameters have been counted."""

    def __init__(self, preset: Preset, variant: Variant, sizes: ParameterCounts) -> None:
        self._preset, self._variant, self._sizes = preset, variant, sizes
        self.recipe = preset.variant_recipe(variant)

    def costs(self) -> list[Cost]:
        """What its trainings cost, as far as they are known beforehand: more rates may have to be tried."""
        preset = self._preset
        trials = len(preset.learning_rates) * preset.trials_per_rate if preset.tries_rates else 0
        # The best of trials of full length are runs of the first seeds.
        seeds = preset.seeds - (preset.trials_per_rate if trials and not preset.sweep else 0)
        stages = [self._cost(*preset.extension)] * preset.seeds if preset.extension else []
        return [self._cost(*preset.sweep)] * trials + [self._cost()] * seeds + stages

    def plan(self, validation: str, better: Better, progress: ManyTrainings) -> Plan[TrainedVariant]:
        """Ask for its trainings. Learning rates are chosen by what the log calls `validation`."""
        tried = dict.fromkeys(self._preset.learning_rates, math.nan)
        remarks: list[str] = []
        rate = next(iter(tried), self.recipe.train.learning_rate)
        if self._preset.tries_rates:
            yield from self._try_rates(tried, validation, better, progress)
            rate, remarks = choose_rate(tried, better)
        first = [self._training(rate, seed) for seed in range(self._preset.seeds)]
        stages = [[(run, one.recipe)] for run, one in zip((yield first), first, strict=True)]
        if self._preset.extension:
            second = {}
            for seed, ((run, _),) in enumerate(stages):
                if run.diverged is None:
                    second[seed] = self._second_training(rate, seed, run)
                else:
                    progress.drop(self._cost(*self._preset.extension))
            runs = yield list(second.values())
            for (seed, training), run in zip(second.items(), runs, strict=True):
                stages[seed].append((run, training.recipe))
        return TrainedVariant(rate, tried, remarks, stages)

    def _try_rates(
        self, tried: dict[float, float], validation: str, better: Better, progress: ManyTrainings
    ) -> Plan[None]:
        """Fill in the validation at each rate, and at more rates while the best is the smallest or the largest."""
        untried = list(tried)
        most = len(tried) + self._preset.more_rates
        while untried:
            seeds = range(self._preset.trials_per_rate)
            runs: Sequence[Stored] = yield [self._trial(rate, seed) for rate in untried for seed in seeds]
            for number, rate in enumerate(untried):
                of_rate = runs[number * len(seeds) : (number + 1) * len(seeds)]
                tried[rate] = fmean(
                    math.nan if run.diverged is not None else number_of(run.metrics()[-1][validation])
                    for run in of_rate
                )
            further = next_rate(tried, better)
            untried = [further] if further is not None and len(tried) < most else []
            if untried:
                progress.expect(self._cost(*self._preset.sweep), len(seeds))

    def _trial(self, rate: float, seed: int) -> Training:
        sweep = self._preset.sweep
        recipe = self._recipe(*sweep, *section("train", learning_rate=rate, seed=seed))
        which = f" with seed {seed}" if self._preset.trials_per_rate > 1 else ""
        name = f"{self._variant.label} · trying the learning rate {rate:g}{which}"
        return Training(name, recipe, self._cost(*sweep))

    def _training(self, rate: float, seed: int) -> Training:
        recipe = self._recipe(*section("train", learning_rate=rate, seed=seed))
        return Training(f"{self._variant.label} · seed {seed} · learning rate {rate:g}", recipe, self._cost())

    def _second_training(self, rate: float, seed: int, first: Stored) -> Training:
        extension = self._preset.extension
        start = override_of("model.init_from", str(first.model_folder.resolve()))
        recipe = self._recipe(*section("train", learning_rate=rate, seed=seed), *extension, start)
        name = f"{self._training(rate, seed).name} · extension"
        return Training(name, recipe, self._cost(*extension), before=first.key)

    def _cost(self, *more: str) -> Cost:
        recipe = self._recipe(*more)
        rows, length = recipe.data.batch_size, recipe.data.length
        kind = f"{self._variant.label}, {rows} × {length}"
        return Cost(kind, float(self._sizes.total * rows * length), recipe.train.steps)

    def _recipe(self, *more: str) -> Recipe:
        return self._preset.variant_recipe(self._variant, *more)
