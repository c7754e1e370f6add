"""Trains variants: trials of learning rates, then every seed at the best, in one stage or two. Runs that do not depend
on each other are trained at the same time, and none twice.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from diff_lab.experiments.experiment import Experiment, Preset, Variant, section
from diff_lab.experiments.run_store import FinishedRun, Store, run_key
from diff_lab.experiments.worker_pool import Job, WorkerPool
from diff_lab.record import Better
from diff_lab.results_files import number_of
from diff_lab.train import Data, Progress, Recipe
from diff_lab.train.recipe import override_of


@dataclass(frozen=True)
class Training:
    """A run to be trained, or found. If it begins with the model of another run, `before` is that run's key."""

    name: str  # as a user is told of it
    recipe: Recipe
    before: str | None = None


@dataclass(frozen=True)
class TrainedVariant:
    """The trained runs of a variant.

    Its learning rate; the validation at each that was tried, NaN if a run diverged or there was no choice; remarks on
    the choice. With each seed, the runs of its stages, each with its recipe: if the first one diverged there is no
    second.
    """

    learning_rate: float
    tried: dict[float, float]
    remarks: list[str]
    stages: list[list[tuple[FinishedRun, Recipe]]]


class TrainingOfVariant:
    """The trainings of a variant of a preset, whose learning rate is chosen by the logged number `validation`.

    `expected` is how many trainings that will be, as far as it is known.
    """

    def __init__(self, preset: Preset, variant: Variant, validation: str, better: Better) -> None:
        self._preset, self._variant, self._validation, self._better = preset, variant, validation, better
        self._seeds = preset.seeds_of(variant)
        trials = len(preset.learning_rates) * preset.trials_per_rate if preset.tries_rates else 0
        # The best of trials of full length are runs of the first seeds.
        seeds = self._seeds - (preset.trials_per_rate if trials and not preset.sweep else 0)
        self.expected = trials + seeds + (self._seeds if preset.extension else 0)

    def plan(self) -> Generator[Sequence[Training], Sequence[FinishedRun], TrainedVariant]:
        """Yield trainings that do not depend on each other, be sent their runs, and yield more."""
        tried = dict.fromkeys(self._preset.learning_rates if self._preset.tries_rates else (), math.nan)
        remarks: list[str] = []
        rate = next(iter(self._preset.learning_rates), self._preset.variant_recipe(self._variant).train.learning_rate)
        if self._preset.tries_rates:
            yield from self._try_rates(tried)
            rate, remarks = choose_rate(tried, self._better)
        first = [self._training(rate, seed) for seed in range(self._seeds)]
        stages = [[(run, one.recipe)] for run, one in zip((yield first), first, strict=True)]
        if self._preset.extension:
            second = {
                seed: self._second_training(rate, seed, run)
                for seed, ((run, _),) in enumerate(stages)
                if run.diverged is None
            }
            self.expected -= len(stages) - len(second)
            runs = yield list(second.values())
            for (seed, training), run in zip(second.items(), runs, strict=True):
                stages[seed].append((run, training.recipe))
        return TrainedVariant(rate, tried, remarks, stages)

    def _try_rates(self, tried: dict[float, float]) -> Generator[Sequence[Training], Sequence[FinishedRun], None]:
        """Fill in the validation at each rate, and at more rates while the best is the smallest or the largest."""
        untried = list(tried)
        most = len(tried) + self._preset.more_rates
        while untried:
            seeds = range(self._preset.trials_per_rate)
            runs = yield [self._trial(rate, seed) for rate in untried for seed in seeds]
            for number, rate in enumerate(untried):
                of_rate = runs[number * len(seeds) : (number + 1) * len(seeds)]
                tried[rate] = fmean(
                    math.nan if run.diverged is not None else number_of(run.metrics()[-1][self._validation])
                    for run in of_rate
                )
            further = next_rate(tried, self._better)
            untried = [further] if further is not None and len(tried) < most else []
            self.expected += len(untried) * len(seeds)

    def _trial(self, rate: float, seed: int) -> Training:
        which = f" with seed {seed}" if self._preset.trials_per_rate > 1 else ""
        name = f"{self._variant.label} · trying the learning rate {rate:g}{which}"
        return Training(name, self._recipe(rate, seed, self._preset.sweep))

    def _training(self, rate: float, seed: int) -> Training:
        return Training(f"{self._variant.label} · seed {seed} · learning rate {rate:g}", self._recipe(rate, seed))

    def _second_training(self, rate: float, seed: int, first: FinishedRun) -> Training:
        start = override_of("model.init_from", str(first.model_folder.resolve()))
        recipe = self._recipe(rate, seed, after=(*self._preset.extension, start))
        return Training(f"{self._training(rate, seed).name} · extension", recipe, before=first.key)

    def _recipe(self, rate: float, seed: int, before: Sequence[str] = (), after: Sequence[str] = ()) -> Recipe:
        own = section("train", learning_rate=rate, seed=seed)
        return self._preset.variant_recipe(self._variant, *before, *own, *after)


def train_variants(
    trainings: Mapping[Variant, TrainingOfVariant],
    store: Store,
    experiment: Experiment,
    progress: Progress,
    *,
    workers: int,
    build_data: Callable[[Recipe], Data],
    commit: str | None,
) -> tuple[dict[Variant, TrainedVariant], list[FinishedRun]]:
    """Train variants, so many `workers` at a time.

    Returns the trained variants, and all runs, of which some may have been there before. Nothing of it depends on the
    number of workers, nor on which run finishes first. Raises as `WorkerPool` and `Store.train`.
    """
    runs: dict[str, FinishedRun | None] = {}  # by key; None of one that is asked for
    plans = {variant: training.plan() for variant, training in trainings.items()}
    waiting: dict[Variant, list[str]] = {}  # the keys of the runs that a plan waits for
    trained: dict[Variant, TrainedVariant] = {}

    def count() -> tuple[int, int]:
        """Count all trainings: how many are done, and how many there are."""
        return sum(run is not None for run in runs.values()), sum(one.expected for one in trainings.values())

    with WorkerPool[FinishedRun](workers, progress) as pool:

        def ask(training: Training) -> str:
            """Find or queue a training. Returns its key."""
            data = build_data(training.recipe)
            key = run_key(training.recipe, data.batches, training.before, experiment.logs)
            if key not in runs:
                runs[key] = store.find(key)
                if runs[key] is None:
                    given = data if workers == 1 else None  # a worker makes them for itself
                    arguments = (key, training.recipe, experiment.on_evaluate, commit, given)
                    pool.add(Job(training.name, partial(store.train, *arguments)))
            return key

        def advance(variant: Variant) -> None:
            """Let a plan ask for trainings until it waits for one."""
            keys = waiting[variant]
            try:
                while len(found := [run for key in keys if (run := runs[key]) is not None]) == len(keys):
                    keys = waiting[variant] = [ask(training) for training in plans[variant].send(found)]
            except StopIteration as end:
                trained[variant] = end.value
                del waiting[variant]

        for variant, plan in plans.items():
            waiting[variant] = [ask(training) for training in next(plan)]
            advance(variant)
        done, total = count()
        if done < total:
            finished = f", of which {done} {'is' if done == 1 else 'are'} finished" if done else ""
            at_a_time = f", {workers} at a time" if workers > 1 else ""
            progress.tell(f"{total} training{'s' * (total > 1)}{finished}{at_a_time}.")
        for _, run in pool.results():
            runs[run.key] = run
            for variant in list(waiting):
                advance(variant)
            progress.tell("{} of {} trainings are done.".format(*count()))
    return {variant: trained[variant] for variant in trainings}, [run for run in runs.values() if run is not None]


def choose_rate(tried: Mapping[float, float], better: Better) -> tuple[float, list[str]]:
    """Choose the best of learning rates by their validation (NaN if a run diverged), the lowest of equals; and say if
    it was at the edge of those tried or not alone.
    """
    best = _ranked(tried, better)[0]
    if not math.isfinite(tried[best]):
        return best, ["it diverged at every learning rate tried."]
    remarks, all_rates = [], ", ".join(f"{rate:g}" for rate in sorted(tried))
    equal = [f"{rate:g}" for rate in sorted(tried) if tried[rate] == tried[best]]
    if len(equal) > 1:
        remarks.append(f"the learning rates {', '.join(equal)} validated equally well; the lowest was taken.")
    for edge, word in ((min(tried), "smallest"), (max(tried), "largest")):
        if best == edge:
            remarks.append(f"the best learning rate, {edge:g}, was the {word} tried ({all_rates}).")
    return best, remarks


def _ranked(tried: Mapping[float, float], better: Better) -> list[float]:
    """Return the rates, the best first and of equals the lowest; those at which a run diverged are last."""
    sign = -1 if better == "higher" else 1
    return sorted(sorted(tried), key=lambda rate: sign * tried[rate] if math.isfinite(tried[rate]) else math.inf)


def next_rate(tried: Mapping[float, float], better: Better) -> float | None:
    """Return the rate to try next if the best of two or more is the smallest or the largest and no other is as good.

    Its ratio to the best is that of the best to its neighbour, rounded to two digits. None if the best lies inside, or
    rates are so close that rounding leaves none beyond it.
    """
    if len(tried) < 2:
        return None
    best, second, *_ = _ranked(tried, better)
    rates = sorted(tried)
    if best not in (rates[0], rates[-1]) or not math.isfinite(tried[best]) or tried[best] == tried[second]:
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    further = float(f"{best * best / neighbour:.1e}")
    return further if further < best < neighbour or neighbour < best < further else None


def sweep_notes(preset: Preset, trained: Mapping[Variant, TrainedVariant]) -> list[str]:
    """Return notes on the choice of learning rates.

    These are the rates that diverged, each remark of `choose_rate` once, with its variants, the number of seeds of each
    rate, and whether runs were shorter than those that are compared.
    """
    notes: list[str] = []
    remarks: dict[str, list[str]] = {}
    seeds = preset.trials_per_rate
    for variant, outcome in trained.items():
        for rate in (rate for rate, value in outcome.tried.items() if math.isnan(value)):
            which = f"one of the seeds 0 to {seeds - 1}" if seeds > 1 else "seed 0"
            notes.append(f"{variant.label} diverged at the learning rate {rate:g} with {which}.")
        for remark in outcome.remarks:
            remarks.setdefault(remark, []).append(variant.label)
    notes += [f"{'; '.join(variants)}: {remark}" for remark, variants in remarks.items()]
    if preset.tries_rates and seeds > 1:
        notes.append(f"Learning rates were chosen by the mean validation of {seeds} seeds.")
    if preset.tries_rates and preset.variants:
        tried, full = (preset.variant_recipe(preset.variants[0], *more).train.steps for more in (preset.sweep, ()))
        if tried < full:
            notes.append(
                f"Learning rates were chosen by runs of {tried:,} steps for runs of {full:,}, whose best may differ."
            )
    return notes
