"""Carries an experiment out: trains every variant with every seed, measures and compares, and writes the results."""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diff_lab.coordinates import Coordinates
from diff_lab.data import MaskedTextBatches, TextBatches
from diff_lab.experiments.experiment import ParameterCounts, Variant, heads_of
from diff_lab.experiments.request import (
    DatasetCache,
    ExperimentRequest,
    as_defined,
    check_preset,
    check_results,
    results_path,
)
from diff_lab.experiments.run_store import FinishedRun, Store
from diff_lab.experiments.variant_training import TrainedVariant, TrainingOfVariant, sweep_notes, train_variants
from diff_lab.experiments.worker_pool import default_workers
from diff_lab.measure.measurement import EvalInput, TrainingRecord
from diff_lab.measure.standard import LABEL_ACCURACY, VALIDATION_LOSS, curve_records
from diff_lab.record import Better, Result, ResultsFile
from diff_lab.results_files import (
    capture_environment,
    capture_results,
    device_name,
    read_results,
    short_commit,
    write_json,
)
from diff_lab.statistics import remark_on_seeds
from diff_lab.train import Progress, Recipe, build_model


def size_records(variant: Variant, sizes: ParameterCounts) -> list[Result]:
    """Return how many parameters a variant has, with and without λ and norms."""
    names = {"training/parameters": sizes.total, "training/parameters_without_lambda_and_norms": sizes.shared}
    return [
        Result(name=name, variant=variant.name, coordinates=variant.coordinates, value=float(value))
        for name, value in names.items()
    ]


def missing_records(variant: Variant, seed: int, measured: Mapping[Variant, Sequence[Result]]) -> list[Result]:
    """Put NaN in place of every number that another variant has: a run that diverged is seen everywhere.

    The other is a variant that it is compared with; if all of those diverged, one at other coordinates, of whose
    numbers those at its own are taken.
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


def run_experiment(
    request: ExperimentRequest,
    output: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    workers: int | None = 1,
) -> ResultsFile:
    """Carry an experiment out, and write its results to `output`/NAME.json.

    Trained runs lie in `output`/runs, each in a folder named by a hash of its origin. One that is finished is used
    again, one that was interrupted is resumed, whatever else is asked for.

    So many `workers` train at a time, each in a process of its own with an equal share of the processor cores; 1 trains
    in this process, and None is one for each core, or 1 on a GPU. The numbers depend on how many threads a training
    has, in their last digits, and on nothing else of it. A script that asks for more than 1 has to be importable: its
    work stands under `if __name__ == "__main__"`.

    `resume` keeps existing results, which must be of the same request, and measurements of runs that the same code has
    made; `overwrite` replaces results that are there. Of a run that was kept without its model the measurements are
    kept in any case, whichever code made them.

    Raises:
        FileNotFoundError: a run was kept without its model, and these options were not measured of it.
        FileExistsError: there are results already, with neither `resume` nor `overwrite`; or with `resume`, and they
            are of another request.
        ValueError: the variants are not alike; `resume` and `overwrite` together; an error of a measurement's `check`.
        TrainingInterrupted: as `train`; the same call resumes.
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
    runner = ExperimentRunner(request, folder, resume, progress or Progress(), workers)
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

    def __init__(
        self,
        request: ExperimentRequest,
        folder: Path,
        resume: bool,
        progress: Progress,
        workers: int | None,
    ) -> None:
        self.experiment, self.preset = request.experiment, request.preset
        self.resume, self.progress = resume, progress
        self.records: list[Result] = []
        self.notes = list(self.experiment.notes)
        self.variants: list[dict[str, Any]] = []
        # Of the code that runs: the checkout may change meanwhile.
        self.commit = capture_environment("cpu").commit
        self.device: str | None = None  # the name of the one where something was measured
        self._workers = workers
        self._store = Store(folder / "runs")
        self._request, self._data = request, DatasetCache()
        # By run: the names of devices; the commits of measurements that an earlier command has taken.
        self._trained_on: Counter[str] = Counter()
        self._measured_at: Counter[str | None] = Counter()

    def train_and_measure(self) -> None:
        """Train every variant with every seed, after choosing its learning rate, and take the numbers of each."""
        checked = check_preset(self._request, self._data)
        for note in checked.notes:
            self.progress.tell(note)
            self.notes.append(note)
        for variant, sizes in checked.counts.items():
            self.progress.tell(f"{variant.label}: {sizes.total:,} parameters, {sizes.shared:,} without λ and norms")
            self.records += size_records(variant, sizes)
        trained = self._train()
        remarks: dict[str, list[str]] = {}
        for variant, outcome in trained.items():
            for rate, value in outcome.tried.items():
                if self.preset.tries_rates and math.isnan(value):
                    last = self.preset.trials_per_rate - 1
                    seeds = f"one of the seeds 0 to {last}" if last else "seed 0"
                    self.notes.append(f"{variant.label} diverged at the learning rate {rate:g} with {seeds}.")
            for remark in outcome.remarks:
                remarks.setdefault(remark, []).append(variant.label)
            runs = [stages[-1][0] for stages in outcome.stages]
            data = checked.recipes[variant].data
            self.variants.append(
                {
                    **vars(variant),
                    "parameters": checked.counts[variant].total,
                    "shared_parameters": checked.counts[variant].shared,
                    **heads_of(checked.recipes[variant])._asdict(),
                    "learning_rate": outcome.learning_rate,
                    "tokens_per_step": data.batch_size * data.length,
                    "tried": {f"{rate:g}": outcome.tried[rate] for rate in sorted(outcome.tried)},
                    "runs": {str(seed): run.key for seed, run in enumerate(runs)},
                    "diverged": [seed for seed, run in enumerate(runs) if run.diverged is not None],
                }
            )
        self.notes += sweep_notes(self.preset, remarks)
        measured: dict[Variant, Sequence[Result]] = {}
        diverged: list[tuple[Variant, int]] = []
        for seed in range(self.preset.seeds):
            for variant, outcome in trained.items():
                if seed >= self.preset.seeds_of(variant):
                    continue
                self.records += self._curve(variant, seed, *outcome.stages[seed][0])
                run, recipe = outcome.stages[seed][-1]
                if run.diverged is None:
                    measured[variant] = self._measure(variant, seed, run, recipe)
                    self.records += measured[variant]
                else:
                    diverged.append((variant, seed))
                    self.notes.append(f"{variant.label} diverged with seed {seed}: {run.diverged}")
        for variant, seed in diverged:
            self.records += missing_records(variant, seed, measured)
        for commit, number in sorted(self._measured_at.items(), key=str):
            if commit != self.commit:
                self.notes.append(f"Measured by an earlier command, {_checkout(commit)}: {number} of the runs.")
        own = _without_threads(self.device or device_name())
        for device, number in sorted(self._trained_on.items()):
            if _without_threads(device) != own:
                self.notes.append(f"Trained on another device, {device}: {number} of the runs.")

    def _train(self) -> dict[Variant, TrainedVariant]:
        """Train all that is in no store yet."""
        preset = self.preset
        recipes = {variant: preset.variant_recipe(variant) for variant in preset.variants}
        trainings = {
            variant: TrainingOfVariant(preset, variant, *self._validation_of(recipe))
            for variant, recipe in recipes.items()
        }
        workers = self._workers
        if workers is None:
            devices = {recipe.train.device for recipe in recipes.values()}
            on_cpu = devices == {"cpu"} or not torch.accelerator.is_available()
            # Of all of them, finished or not: a resumed command gives each as many threads as it had before.
            workers = default_workers(sum(one.expected for one in trainings.values()), on_cpu=on_cpu)
        settings: dict[str, Any] = {"workers": workers, "build_data": self._data.of, "commit": self.commit}
        trained, runs = train_variants(trainings, self._store, self.experiment, self.progress, **settings)
        self._trained_on.update(run.device for run in runs)
        earlier = Counter(run.commit for run in runs if run.commit != self.commit)
        for commit, number in sorted(earlier.items(), key=str):
            self.notes.append(f"Trained by an earlier command, {_checkout(commit)}: {number} of the runs.")
        resumed = Counter((run.begun_at, run.commit) for run in runs if run.begun_at != run.commit)
        for (begun, finished), number in sorted(resumed.items(), key=str):
            self.notes.append(f"Begun {_checkout(begun)}, finished {_checkout(finished)}: {number} of the runs.")
        return trained

    def _validation_of(self, recipe: Recipe) -> tuple[str, Better]:
        """Return the logged number that learning rates are chosen by, and which is the better one."""
        is_text = isinstance(self._data.of(recipe).batches, TextBatches | MaskedTextBatches)
        return (VALIDATION_LOSS, "lower") if is_text else (LABEL_ACCURACY, "higher")

    def _curve(self, variant: Variant, seed: int, run: FinishedRun, recipe: Recipe) -> list[Result]:
        """Return a run's validation over its training; of two stages the first one's, as the second has other data."""
        lines = run.metrics()
        if run.diverged is not None:
            lines.append({"step": recipe.train.steps, self._validation_of(recipe)[0]: None})
        return curve_records(lines, variant=variant.name, seed=seed, coordinates=variant.coordinates)

    def _measure(self, variant: Variant, seed: int, run: FinishedRun, recipe: Recipe) -> Sequence[Result]:
        """Return the numbers of a run: taken, or read if an interrupted command has taken them with the same code.

        Of a run that was kept without its model they are read in any case, whichever code took them: they are the only
        ones. Raises FileNotFoundError if there are none, or of other options.
        """
        options = json.dumps(dict(self.preset.options), sort_keys=True, default=str)
        settings = {"options": options, "commit": self.commit}
        path = run.measured / f"{self.experiment.name}.json"
        is_kept = not run.model_folder.is_dir()
        existing = read_results(path) if (self.resume or is_kept) and path.is_file() else None
        if existing is not None:
            commit = existing.settings["commit"]
            # A checkout with changes, or no checkout at all, may hold any code.
            is_known = commit is not None and not commit.endswith("-dirty")
            is_taken = (is_known and commit == self.commit) or is_kept
            if existing.settings["options"] == options and is_taken:
                self.device = self.device or existing.device
                self._measured_at[commit] += 1
                return existing.records
        if is_kept:
            name = self.experiment.name
            lacks = f"nor what {name} measured of it, {str(path)!r}; without"
            if existing is not None:
                lacks = (
                    f"and {str(path)!r} holds what {name} measured of it with the options "
                    f"{existing.settings['options']}, not {options}; ask for those options, or without"
                )
            raise FileNotFoundError(
                f"{variant.label} with seed {seed} was trained, but its model {str(run.model_folder)!r} is not there, "
                f"{lacks} {str(run.folder.parent)!r} the command trains it again."
            )
        model = run.load(recipe)
        self.progress.tell(f"{variant.label} · seed {seed}: measuring")
        data = self._data.of(recipe)
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


def _without_threads(device: str) -> str:
    """Return a processor's name, or a GPU's, which has none."""
    return device.partition(", ")[0]


def _checkout(commit: str | None) -> str:
    """Name the code that ran."""
    if commit is None:
        return "outside a git checkout"
    return f"at commit {short_commit(commit)}"
