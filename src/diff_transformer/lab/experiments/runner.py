"""Carries an experiment out: trains every variant with every seed, measures and compares, and writes the results."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diff_transformer.data import TextBatches
from diff_transformer.lab.coordinates import Coordinates
from diff_transformer.lab.experiments.experiment import (
    Counts,
    Preset,
    Variant,
    check_counts,
    check_recipes,
    count,
    heads_of,
    section,
)
from diff_transformer.lab.experiments.request import ExperimentRequest, as_defined, check_results, results_path
from diff_transformer.lab.experiments.run_store import Store, Stored, run_key
from diff_transformer.lab.measure.measurement import EvalInput, TrainingRecord
from diff_transformer.lab.measure.standard import LABEL_ACCURACY, VALIDATION_LOSS, curve_records
from diff_transformer.lab.record import Better, Result, ResultsFile
from diff_transformer.lab.results_files import capture_environment, capture_results, number_of, read_results, write_json
from diff_transformer.lab.statistics import remark_on_seeds
from diff_transformer.train import Data, Progress, Recipe, build_config, build_data, build_model
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
    if not measured:
        return []
    alike = (other for other in measured if other.coordinates == variant.coordinates)
    other = next(alike, next(iter(measured)))
    lost: dict[str, Any] = {"value": math.nan, "interval": None, "documents": (), "n": None}
    records = [replace(record, variant=variant.name, seed=seed, **lost) for record in measured[other]]
    if other.coordinates == variant.coordinates:
        return records
    return [replace(one, coordinates=variant.coordinates) for one in records if one.coordinates == other.coordinates]


def choose_rate(tried: Mapping[float, float], better: Better) -> tuple[float, list[str]]:
    """The best of learning rates by their validation (NaN where a run diverged), the lowest of equals; and a sentence
    each where it was at the edge of what was tried or not alone.
    """
    sign = 1 if better == "higher" else -1
    rates = sorted(tried)
    score = {rate: sign * tried[rate] if math.isfinite(tried[rate]) else -math.inf for rate in rates}
    best = [rate for rate in rates if score[rate] == max(score.values())]
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


class SweepProgress(Silent):
    """A `Progress` for many trainings, one after the other. Each is announced by `next` before it begins.

    `costs` is what each training is expected to cost, in any unit; those that turn out to be done are taken off.
    """

    def __init__(self, progress: Progress, costs: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self._progress, self._costs, self._clock = progress, costs, clock
        self._number, self._title = 0, ""
        self._began, self._done, self._cost = 0.0, 0.0, 0.0
        self._messages: set[str] = set()

    def next(self, title: str, *, is_finished: bool = False) -> None:
        """The next training is called `title`; an earlier command may have finished it.

        How long the rest takes is guessed by the trainings before, measurements between them included.
        """
        self._done += self._cost
        self._cost = 0.0 if is_finished else self._costs[self._number]
        self._number += 1
        if is_finished:
            return
        self._title = f"{title} · run {self._number} of {len(self._costs)}"
        if not self._done:
            self._began = self._clock()
            return
        remaining = self._cost + sum(self._costs[self._number :])
        minutes = (self._clock() - self._began) / self._done * remaining / 60
        self._title += f" · {minutes:.0f} min left" if minutes >= 1 else " · a minute left"

    def start(self, total: int, description: str) -> None:
        self._progress.start(total, self._title or description)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self._progress.update(step, loss, tokens_per_second)

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self._progress.evaluated(step, results)

    def stop(self) -> None:
        self._progress.stop()

    def tell(self, message: str) -> None:
        """Each message once: what all the runs use is the same."""
        if message not in self._messages:
            self._messages.add(message)
            self._progress.tell(message)


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
        results = as_defined(read_results(path), request.experiment)
        if progress is not None:
            existing = f"{request.experiment.name}: existing results of {results.created}, {_checkout(results.commit)}"
            progress.tell(f"{existing}; --overwrite measures and compares anew, and trains nothing twice.")
        return results
    began = time.monotonic()
    runner = ExperimentRunner(request, folder, resume, progress or Silent())
    if request.experiment.measure_once is not None:
        runner.records += request.experiment.measure_once(request.preset, runner.progress)
    else:
        runner.train_and_measure()
    # Nothing is compared where every run diverged.
    has_numbers = any(not record.name.startswith("training/") for record in runner.records)
    comparisons = request.experiment.compare(runner.records, request.preset) if has_numbers else []
    if (remark := remark_on_seeds(comparisons)) is not None:
        runner.notes.append(remark)
    seconds = round(time.monotonic() - began, 1)
    settings = {"request": request.settings(), "variants": runner.variants, "seconds": seconds}
    records = [replace(record, documents=()) for record in runner.records]
    notes = list(dict.fromkeys(runner.notes))
    results = capture_results(request.experiment.shows, settings, records, comparisons=comparisons, notes=notes)
    results = replace(results, commit=runner.commit, device=runner.device or results.device)
    folder.mkdir(parents=True, exist_ok=True)
    # What was written is what is shown: read back, it is as strict as a file.
    return read_results(write_json(path, as_defined(results, request.experiment)))


class ExperimentRunner:
    """One experiment while it is carried out."""

    def __init__(self, request: ExperimentRequest, folder: Path, resume: bool, progress: Progress) -> None:
        self.experiment, self.preset = request.experiment, request.preset
        self.resume, self.progress = resume, progress
        self.records: list[Result] = []
        self.notes = list(self.experiment.notes)
        self.variants: list[dict[str, Any]] = []
        # Of the code that runs: the checkout may change meanwhile.
        self.commit = capture_environment("cpu").commit
        self.device: str | None = None  # the name of the one where something was measured
        self._store = Store(folder / "runs")
        self._remarks: dict[str, list[str]] = {}  # on a choice of learning rates → variants
        self._data: dict[str, Data] = {}
        self._earlier: dict[str | None, set[str]] = {}  # commit → runs that it trained

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
        for variant in self.preset.variants:
            learning_rate, tried = self._choose_rate(variant, recipes[variant])
            self.variants.append(
                {
                    **vars(variant),
                    "parameters": counts[variant].total,
                    "shared_parameters": counts[variant].shared,
                    **heads_of(recipes[variant])._asdict(),
                    "learning_rate": learning_rate,
                    "tokens_per_step": recipes[variant].data.batch_size * recipes[variant].data.length,
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
                run, recipe = self._stages(variant, entry["learning_rate"], seed)
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
        for commit, keys in self._earlier.items():
            self.notes.append(f"Trained by an earlier command, {_checkout(commit)}: {len(keys)} of the runs.")

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

    def _choose_rate(self, variant: Variant, recipe: Recipe) -> tuple[float, dict[float, float]]:
        """A variant's learning rate, and the validation of a run with the first seed at each that was tried: NaN where
        it diverged, and where there was no choice."""
        preset = self.preset
        tried = dict.fromkeys(preset.learning_rates, math.nan)
        if len(tried) < 2:
            return next(iter(tried), recipe.train.learning_rate), tried
        name = self._validation_of(recipe)
        for rate in tried:
            trial = preset.variant_recipe(variant, *preset.sweep, *section("train", learning_rate=rate, seed=0))
            run = self._train(f"{variant.label} · trying the learning rate {rate:g}", trial)
            if run.diverged is None:
                tried[rate] = number_of(run.metrics()[-1][name])
            else:
                self.notes.append(f"{variant.label} diverged at the learning rate {rate:g} with seed 0.")
        best, remarks = choose_rate(tried, "lower" if name == VALIDATION_LOSS else "higher")
        for remark in remarks:
            self._remarks.setdefault(remark, []).append(variant.label)
        return best, tried

    def _validation_of(self, recipe: Recipe) -> str:
        """What a run logs that its learning rate is chosen by."""
        return VALIDATION_LOSS if isinstance(self._build_data(recipe).batches, TextBatches) else LABEL_ACCURACY

    def _stages(self, variant: Variant, rate: float, seed: int) -> tuple[Stored, Recipe]:
        """The run of one seed, and its recipe; where there is a second stage, those of the second."""
        title = f"{variant.label} · seed {seed} · learning rate {rate:g}"
        rate_and_seed = section("train", learning_rate=rate, seed=seed)
        recipe = self.preset.variant_recipe(variant, *rate_and_seed)
        run = self._train(title, recipe)
        # Of two stages the first one's: the second validates on other data.
        lines = run.metrics()
        if run.diverged is not None:
            lines.append({"step": recipe.train.steps, self._validation_of(recipe): None})
        self.records += curve_records(lines, variant=variant.name, seed=seed, coordinates=variant.coordinates)
        if self.preset.extension and run.diverged is not None:
            self._sweep.next(title, is_finished=True)
        elif self.preset.extension:
            start = f"model.init_from={json.dumps(str(run.model_folder.resolve()))}"
            recipe = self.preset.variant_recipe(variant, *rate_and_seed, *self.preset.extension, start)
            run = self._train(f"{title} · extension", recipe, before=run.key)
        return run, recipe

    def _train(self, title: str, recipe: Recipe, before: str | None = None) -> Stored:
        data = self._build_data(recipe)
        key = run_key(recipe, data.batches, before, self.experiment.logs)
        run = self._store.find(key)
        self._sweep.next(title, is_finished=run is not None)
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
                self.device = self.device or existing.device
                return existing.records
        model = run.load(recipe)
        self.progress.tell(f"{variant.label} · seed {seed}: measuring")
        data = self._build_data(recipe)
        measured = EvalInput(
            model=model,
            variant=variant.name,
            batches=data.batches,
            tokenizer=data.tokenizer,
            seed=seed,
            training=TrainingRecord(
                folder=run.folder.parent,
                metrics=run.metrics(),
                untrained=lambda: build_model(recipe, data).eval().to(model.device),
            ),
        )
        records = [
            # A variant's coordinates are those of all its numbers.
            replace(record, seed=seed, coordinates=Coordinates(variant.coordinates, **record.coordinates))
            for requested in self.experiment.requests(self.preset)
            for record in requested.run(measured)
        ]
        records.append(measured.record("training/seconds", run.seconds, coordinates=variant.coordinates, unit="s"))
        run.measured.mkdir(exist_ok=True)
        results = capture_results(self.experiment.shows, settings, records, str(model.device))
        self.device = results.device
        write_json(path, results)
        return records


def _checkout(commit: str | None) -> str:
    """Which code ran."""
    if commit is None:
        return "outside a git checkout"
    return f"at commit {commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}"
