"""Carries an experiment out: trains every variant with every seed, measures and compares, and writes the results."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import (
    Counts,
    Experiment,
    Preset,
    Validation,
    Variant,
    check_counts,
    check_recipes,
    count,
    heads_of,
    section,
)
from diff_transformer.lab.experiments.request import ExperimentRequest, check_results, results_path, with_definition
from diff_transformer.lab.experiments.run_store import Store, Stored, run_key
from diff_transformer.lab.measure.measurement import EvalInput
from diff_transformer.lab.record import Result, ResultsFile
from diff_transformer.lab.results_files import capture_environment, capture_results, number_of, read_results, write_json
from diff_transformer.lab.statistics import remark_on_seeds
from diff_transformer.train import Data, Progress, Recipe, build_config, build_data
from diff_transformer.train.training_progress import Silent


def size_records(variant: Variant, sizes: Counts) -> list[Result]:
    """How many parameters a variant has, with and without λ and norms."""
    names = {"training/parameters": sizes.total, "training/parameters_without_lambda_and_norms": sizes.shared}
    return [
        Result(name=name, variant=variant.name, coordinates=variant.coordinates, value=float(value))
        for name, value in names.items()
    ]


def missing_records(variant: Variant, seed: int, measured: Mapping[Variant, Sequence[Result]]) -> list[Result]:
    """NaN in place of every number that another variant has: a run that diverged is seen everywhere.

    Another variant that it is compared with; where all of those diverged, one at other coordinates, of whose numbers
    those are taken that are at its own.
    """
    like = next((other for other in measured if other.coordinates == variant.coordinates), None)
    template = list(measured[like]) if like is not None else []
    if like is None and measured:
        other, records = next(iter(measured.items()))
        template = [
            replace(one, coordinates=variant.coordinates) for one in records if one.coordinates == other.coordinates
        ]
    lost: dict[str, Any] = {"value": math.nan, "interval": None, "documents": (), "n": None}
    return [replace(record, variant=variant.name, seed=seed, **lost) for record in template]


def choose_rate(tried: Mapping[float, float], validation: Validation) -> tuple[float, list[str]]:
    """The best of learning rates by their validation (NaN where a run diverged), the lowest of equals; and a sentence
    each where it was at the edge of what was tried or not alone.
    """
    sign = 1 if validation.better == "higher" else -1
    rates = sorted(tried)
    score = {rate: sign * tried[rate] if math.isfinite(tried[rate]) else -math.inf for rate in rates}
    best = [rate for rate in rates if score[rate] == max(score.values())]
    if len(rates) == 1:
        return rates[0], []
    if score[best[0]] == -math.inf:
        return best[0], ["it diverged at every learning rate tried."]
    remarks, all_rates = [], ", ".join(f"{rate:g}" for rate in rates)
    if len(best) > 1:
        equal = ", ".join(f"{rate:g}" for rate in best)
        remarks.append(f"the learning rates {equal} validated equally well; the lowest was taken.")
    for edge, word in ((rates[0], "smallest"), (rates[-1], "largest")):
        if best[0] == edge:
            remarks.append(f"the best learning rate, {edge:g}, was the {word} tried ({all_rates}).")
    return best[0], remarks


def sweep_notes(preset: Preset, remarks: Mapping[str, Sequence[str]]) -> list[str]:
    """What a reader must know of how learning rates were chosen: each remark of `choose_rate` once, with the variants
    that it is about, and whether rates were tried in shorter runs than those that are compared.
    """
    notes = [f"{'; '.join(variants)}: {remark}" for remark, variants in remarks.items()]
    if len(preset.learning_rates) > 1 and preset.variants:
        tried, trained = (preset.variant_recipe(preset.variants[0], *more).train.steps for more in (preset.sweep, ()))
        if tried < trained:
            notes.append(
                f"Learning rates were chosen by runs of {tried:,} steps for runs of {trained:,}, whose best may differ."
            )
    return notes


class SweepProgress:
    """A `Progress` for many trainings, one after the other. Each is announced by `next` before it begins.

    `costs` is what each training is expected to cost, in any unit; those that turn out to be done are taken off.
    """

    def __init__(self, progress: Progress, costs: list[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._left, self._clock = progress, list(costs), clock
        self._number, self._of = 0, len(costs)
        self._began: float | None = None
        self._done, self._cost = 0.0, 0.0
        self._title = ""
        self._told: set[str] = set()

    def next(self, title: str, *, found: bool = False) -> None:
        """The next training is called `title`; `found` where an earlier command has finished it."""
        self._number += 1
        self._done += self._cost
        cost = self._left.pop(0)
        self._cost = 0.0 if found else cost
        if found:
            return
        if self._began is None:
            self._began = self._clock()
        self._title = f"{title} · run {self._number} of {self._of}{self._time_left()}"

    def _time_left(self) -> str:
        """A guess by what the trainings before have taken, measurements between them included."""
        if self._began is None or not self._done:
            return ""
        minutes = (self._clock() - self._began) / self._done * (self._cost + sum(self._left)) / 60
        return f" · {minutes:.0f} min left" if minutes >= 1 else " · a minute left"

    def start(self, total: int, description: str) -> None:
        self._progress.start(total, self._title or description)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(step, loss, tokens_per_second)

    def tell(self, message: str) -> None:
        """Each message once: what all the runs use is the same."""
        if message not in self._told:
            self._told.add(message)
            self._progress.tell(message)

    def stop(self) -> None:
        self._progress.stop()


def run_experiment(
    request: ExperimentRequest,
    output: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ResultsFile:
    """Carry an experiment out, and write its results to `output`/NAME.json.

    Trained runs lie in `output`/runs, each in a folder named by a hash of what made it. One that is finished is used
    again, one that was interrupted goes on, whatever else is asked for.

    `resume` keeps existing results, which must be of the same request, and measurements of runs that the same code has
    made; `overwrite` replaces results that are there.

    Raises:
        FileExistsError: there are results already, with neither `resume` nor `overwrite`; or with `resume`, and they
            are of another request.
        ValueError: the variants are not alike; `resume` and `overwrite` together; what a measurement's `check` says.
        TrainingInterrupted: as `train`; the same call goes on.
    """
    folder = Path(output)
    path = results_path(folder, request.experiment.name)
    check_results(path, request, resume=resume, overwrite=overwrite)
    if resume and path.exists():
        results = with_definition(read_results(path), request.experiment)
        if progress is not None:
            existing = f"{request.experiment.name}: existing results of {results.created}, {_place(results.commit)}"
            progress.tell(f"{existing}; --overwrite measures and compares anew, and trains nothing twice.")
        return results
    began = time.monotonic()
    runner = ExperimentRunner(request.experiment, request.preset, folder, resume, progress or Silent())
    if request.experiment.measure_once is not None:
        runner.records += request.experiment.measure_once(request.preset, runner.progress)
    else:
        runner.train_and_measure()
    comparisons = request.experiment.compare(runner.records, request.preset) if runner.has_numbers else []
    if (remark := remark_on_seeds(comparisons)) is not None:
        runner.notes.append(remark)
    seconds = round(time.monotonic() - began, 1)
    settings = {"request": request.settings(), "variants": runner.variants, "seconds": seconds}
    records = [replace(record, documents=()) for record in runner.records]
    notes = list(dict.fromkeys(runner.notes))
    results = capture_results(
        request.experiment.shows, settings, records, runner.device, comparisons=comparisons, notes=notes
    )
    results = replace(results, commit=runner.commit)
    if runner.device is None and runner.existing_device is not None:
        results = replace(results, device=runner.existing_device)
    folder.mkdir(parents=True, exist_ok=True)
    # What was written is what is shown: read back, it is as strict as a file.
    return read_results(write_json(path, with_definition(results, request.experiment)))


@dataclass
class ExperimentRunner:
    """One experiment while it is carried out."""

    experiment: Experiment
    preset: Preset
    folder: Path
    resume: bool
    progress: Progress
    records: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variants: list[dict[str, Any]] = field(default_factory=list)
    device: str | None = None  # where something was measured, as torch calls it
    existing_device: str | None = None  # the name of the one where all existing numbers were measured
    _remarks: dict[str, list[str]] = field(default_factory=dict)  # on a choice of learning rates → variants
    _data: dict[str, Data] = field(default_factory=dict)
    _earlier: dict[str | None, set[str]] = field(default_factory=dict)  # commit → runs that it trained

    def __post_init__(self) -> None:
        self.notes += self.experiment.notes
        self._store = Store(self.folder / "runs")
        # Of the code that runs: the checkout may change meanwhile.
        self.commit = capture_environment("cpu").commit

    @property
    def has_numbers(self) -> bool:
        """Whether anything was measured: not where every run diverged."""
        return any(not record.name.startswith("training/") for record in self.records)

    def train_and_measure(self) -> None:
        """Train every variant with every seed, after choosing its learning rate, and take the numbers of each."""
        recipes = {variant: self.preset.variant_recipe(variant) for variant in self.preset.variants}
        check_recipes(recipes)
        counts = {}
        for variant, recipe in recipes.items():
            data = self._build_data(recipe)
            counts[variant] = count(build_config(recipe, data.batches.vocab_size, data.tokenizer))
        check_counts(counts, self.preset)
        self._check_measurement()
        for variant, sizes in counts.items():
            self.progress.tell(f"{variant.label}: {sizes.total:,} parameters, {sizes.shared:,} without λ and norms")
            self.records += size_records(variant, sizes)
        self._sweep = SweepProgress(self.progress, self._costs(counts))
        rates: dict[Variant, float] = {}
        for variant in self.preset.variants:
            tried = self._try_rates(variant)
            rates[variant] = self._choose_rate(variant, tried, recipes[variant])
            self.variants.append(
                {
                    **vars(variant),
                    "parameters": counts[variant].total,
                    "shared_parameters": counts[variant].shared,
                    **heads_of(recipes[variant])._asdict(),
                    "learning_rate": rates[variant],
                    "tried": {f"{rate:g}": value for rate, value in tried.items()},
                    "runs": {},
                    "diverged": [],
                }
            )
        self.notes += sweep_notes(self.preset, self._remarks)
        measured: dict[Variant, Sequence[Result]] = {}
        diverged: list[tuple[Variant, int]] = []
        for seed in range(self.preset.seeds):
            for variant, entry in zip(self.preset.variants, self.variants, strict=True):
                run, recipe = self._stages(variant, rates[variant], seed)
                entry["runs"][str(seed)] = run.key
                if run.diverged is None:
                    measured[variant] = self._measure(variant, seed, run, recipe)
                    self.records += measured[variant]
                else:
                    diverged.append((variant, seed))
                    entry["diverged"].append(seed)
                    self.notes.append(f"{variant.label} diverged with seed {seed}: {run.diverged}")
        for variant, seed in diverged:
            self.records += missing_records(variant, seed, measured)
        for commit, found in self._earlier.items():
            self.notes.append(f"Trained by an earlier command, {_place(commit)}: {len(found)} of the runs.")

    def _check_measurement(self) -> None:
        """What can be known to fail after hours of training fails before it."""
        last = ("train.seed=0", *self.preset.extension)
        recipes = [self.preset.variant_recipe(variant, *last) for variant in self.preset.variants]
        for data in {id(data): data for data in map(self._build_data, recipes)}.values():
            for requested in self.experiment.requests(self.preset):
                requested.check(data.batches, data.tokenizer)

    def _build_data(self, recipe: Recipe) -> Data:
        """The data of a recipe: one object for all recipes with the same data and seed."""
        name = json.dumps([recipe.data.model_dump(mode="json"), recipe.train.seed])
        if name not in self._data:
            self._data[name] = build_data(recipe)
        return self._data[name]

    def _costs(self, counts: Mapping[Variant, Counts]) -> list[float]:
        """What every training to come will cost in operations, in the order in which they come."""

        def cost(variant: Variant, *more: str) -> float:
            recipe = self.preset.variant_recipe(variant, *more)
            return float(counts[variant].total * recipe.train.steps * recipe.data.batch_size * recipe.data.length)

        preset = self.preset
        trials = len(preset.learning_rates) if len(preset.learning_rates) > 1 else 0
        costs = [cost(variant, *preset.sweep) for variant in preset.variants for _ in range(trials)]
        for seed in range(preset.seeds):
            for variant in preset.variants:
                is_trial = seed == 0 and trials and not preset.sweep
                costs.append(0.0 if is_trial else cost(variant))
                if preset.extension:
                    costs.append(cost(variant, *preset.extension))
        return costs

    def _try_rates(self, variant: Variant) -> dict[float, float]:
        """Learning rate → validation of a run with the first seed, NaN where it diverged; empty where none is tried."""
        preset, name = self.preset, self.experiment.validation.name
        if len(preset.learning_rates) < 2:
            return dict.fromkeys(preset.learning_rates, math.nan)
        tried = {}
        for rate in preset.learning_rates:
            recipe = preset.variant_recipe(variant, *preset.sweep, *section("train", learning_rate=rate, seed=0))
            run = self._train(f"{variant.label} · trying the learning rate {rate:g}", recipe)
            tried[rate] = math.nan if run.diverged is not None else number_of(run.metrics()[-1][name])
            if run.diverged is not None:
                self.notes.append(f"{variant.label} diverged at the learning rate {rate:g} with seed 0.")
        return tried

    def _choose_rate(self, variant: Variant, tried: Mapping[float, float], recipe: Recipe) -> float:
        if not tried:
            return next(iter(self.preset.learning_rates), recipe.train.learning_rate)
        rate, remarks = choose_rate(tried, self.experiment.validation)
        for remark in remarks:
            self._remarks.setdefault(remark, []).append(variant.label)
        return rate

    def _stages(self, variant: Variant, rate: float, seed: int) -> tuple[Stored, Recipe]:
        """The run of one seed, and its recipe; where there is a second stage, those of the second."""
        title = f"{variant.label} · seed {seed} · learning rate {rate:g}"
        rate_and_seed = section("train", learning_rate=rate, seed=seed)
        recipe = self.preset.variant_recipe(variant, *rate_and_seed)
        run = self._train(title, recipe)
        if self.preset.extension and run.diverged is not None:
            self._sweep.next(title, found=True)
        elif self.preset.extension:
            start = f"model.init_from={json.dumps(str(run.model_folder.resolve()))}"
            recipe = self.preset.variant_recipe(variant, *rate_and_seed, *self.preset.extension, start)
            run = self._train(f"{title} · extension", recipe, before=run.key)
        return run, recipe

    def _train(self, title: str, recipe: Recipe, before: str | None = None) -> Stored:
        data = self._build_data(recipe)
        key = run_key(recipe, data.batches, before, self.experiment.logs)
        run = self._store.find(key)
        self._sweep.next(title, found=run is not None)
        if run is None:
            on_evaluate = self.experiment.on_evaluate(data.batches)
            run = self._store.train(key, recipe, data, on_evaluate, self._sweep, self.commit)
        if run.commit != self.commit:
            self._earlier.setdefault(run.commit, set()).add(run.key)
        return run

    def _measure(self, variant: Variant, seed: int, run: Stored, recipe: Recipe) -> Sequence[Result]:
        """The numbers of a run: taken, or read where an interrupted command has taken them with the same code."""
        options = json.dumps(dict(self.preset.options), sort_keys=True, default=str)
        settings = {"options": options, "commit": self.commit}
        path = run.measured / f"{self.experiment.name}.json"
        # A checkout with changes, or no checkout at all, may hold any code.
        is_known = self.commit is not None and not self.commit.endswith("-dirty")
        if self.resume and is_known and path.is_file():
            existing = read_results(path)
            if existing.settings == settings:
                self.existing_device = existing.device
                return existing.records
        model = run.load(recipe)
        self.device = str(model.device)
        self.progress.tell(f"{variant.label} · seed {seed}: measuring")
        data = self._build_data(recipe)
        measured = EvalInput(
            model=model,
            variant=variant.name,
            batches=data.batches,
            tokenizer=data.tokenizer,
            seed=seed,
            training=run.training_record(recipe, data, model.device),
        )
        of_run: dict[str, Any] = {"variant": variant.name, "coordinates": variant.coordinates, "seed": seed}
        records = [
            # Where a variant stands, all of its numbers do.
            replace(record, seed=seed, coordinates=Coordinates(variant.coordinates, **record.coordinates))
            for requested in self.experiment.requests(self.preset)
            for record in requested.run(measured)
        ]
        records.append(Result(name="training/seconds", value=run.seconds, unit="s", **of_run))
        run.measured.mkdir(exist_ok=True)
        write_json(path, capture_results(self.experiment.shows, settings, records, self.device))
        return records


def _place(commit: str | None) -> str:
    """Where the code was."""
    if commit is None:
        return "outside a git checkout"
    return f"at commit {commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}"
