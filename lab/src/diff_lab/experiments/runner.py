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
from diff_lab.experiments.experiment import ParameterCounts, Variant
from diff_lab.experiments.request import (
    DatasetCache,
    ExperimentRequest,
    as_defined,
    check_preset,
    check_results,
    results_path,
)
from diff_lab.experiments.run_store import FinishedRun, Store, load_trained
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
from diff_lab.train import Progress, Recipe, build_config, build_model
from diff_transformer.attention_types import head_dim


def missing_records(variant: Variant, seed: int, measured: Mapping[Variant, Sequence[Result]]) -> list[Result]:
    """Put NaN in place of every number that another variant has: a run that diverged is seen everywhere.

    The other is a variant that it is compared with; if all of those diverged, one at other coordinates.
    """
    if not measured:
        return []
    other = next((one for one in measured if one.coordinates == variant.coordinates), next(iter(measured)))
    lost: dict[str, Any] = {"variant": variant.name, "seed": seed, "value": math.nan}
    lost |= {"interval": None, "documents": (), "n": None}
    return [
        replace(record, coordinates=Coordinates(record.coordinates, **variant.coordinates), **lost)
        for record in measured[other]
    ]


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

    Args:
        resume: whether to keep existing results, which must be of the same request, and measurements that the same code
            has made. Those of a run that was kept without its model are kept in any case.
        overwrite: whether to replace results that are there.
        workers: how many train at a time, each in a process with an equal share of the processor cores; 1 trains in
            this process, and None is one for each core, or 1 on a GPU. The last digits of the numbers depend on how
            many threads a training has. A script that asks for more than 1 has its work under
            `if __name__ == "__main__"`.

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
    run = ExperimentRun(request, folder / "runs", resume, progress or Progress(), workers)
    if request.experiment.measure_once is not None:
        run.records += request.experiment.measure_once(request.preset, run.progress)
    else:
        run.carry_out()
    # Nothing is compared where every run diverged.
    has_numbers = any(not record.name.startswith("training/") for record in run.records)
    comparisons = request.experiment.compare(run.records, request.preset) if has_numbers else []
    notes = [*run.notes, *run.sources()]
    if (remark := remark_on_seeds(comparisons)) is not None:
        notes.append(remark)
    seconds = round(time.monotonic() - began, 1)
    settings = {"request": request.settings(), "variants": run.variants, "seconds": seconds}
    records = [replace(record, documents=()) for record in run.records]
    results = capture_results(
        request.experiment.shows, settings, records, comparisons=comparisons, notes=list(dict.fromkeys(notes))
    )
    results = replace(results, commit=run.commit, device=run.device or results.device)
    folder.mkdir(parents=True, exist_ok=True)
    # What was written is what is shown: read back, it is as strict as a file.
    return read_results(write_json(path, as_defined(results, request.experiment)))


class ExperimentRun:
    """One experiment while its variants are trained and measured."""

    def __init__(
        self, request: ExperimentRequest, runs: Path, resume: bool, progress: Progress, workers: int | None
    ) -> None:
        self.request, self.experiment, self.preset = request, request.experiment, request.preset
        self.resume, self.progress, self.workers = resume, progress, workers
        self.records: list[Result] = []
        self.notes = list(self.experiment.notes)
        self.variants: list[dict[str, Any]] = []
        # Of the code that runs: the checkout may change meanwhile.
        self.commit = capture_environment("cpu").commit
        self.device: str | None = None  # the name of the one where something was measured
        self._store, self._data = Store(runs), DatasetCache()
        self._sources: Counter[str] = Counter()  # how many runs are of other code
        self._trained_on: Counter[str] = Counter()  # how many runs a device has trained

    def carry_out(self) -> None:
        """Train every variant with every seed, after choosing its learning rate, and take the numbers of each."""
        counts, notes = check_preset(self.request, self._data)
        for note in notes:
            self.progress.tell(note)
        self.notes += notes
        for variant, sizes in counts.items():
            self.progress.tell(f"{variant.label}: {sizes.total:,} parameters, {sizes.shared:,} without λ and norms")
            for name, value in (("", sizes.total), ("_without_lambda_and_norms", sizes.shared)):
                fields: dict[str, Any] = {"coordinates": variant.coordinates, "value": float(value)}
                self.records.append(Result(name=f"training/parameters{name}", variant=variant.name, **fields))
        trained = self._train()
        self.notes += sweep_notes(self.preset, trained)
        for variant, outcome in trained.items():
            self.variants.append(self._described(variant, outcome, counts[variant]))
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

    def sources(self) -> list[str]:
        """Return notes on the runs that other code or another device has trained or measured."""
        # A processor's name is followed by its threads.
        own = (self.device or device_name()).partition(", ")[0]
        for device, number in self._trained_on.items():
            if device.partition(", ")[0] != own:
                self._sources[f"Trained on another device, {device}"] += number
        return [f"{source}: {number} of the runs." for source, number in sorted(self._sources.items())]

    def _described(self, variant: Variant, outcome: TrainedVariant, sizes: ParameterCounts) -> dict[str, Any]:
        """Describe a variant and its runs, as results hold them."""
        recipe, runs = self.preset.variant_recipe(variant), [stages[-1][0] for stages in outcome.stages]
        config = build_config(recipe, vocab_size=1)
        return {
            **vars(variant),
            "parameters": sizes.total,
            "shared_parameters": sizes.shared,
            "heads": config.spec.heads(config),
            "head_dim": head_dim(config),
            "differential": config.spec.differential,
            "learning_rate": outcome.learning_rate,
            "tokens_per_step": recipe.data.batch_size * recipe.data.length,
            "tried": {f"{rate:g}": outcome.tried[rate] for rate in sorted(outcome.tried)},
            "runs": {str(seed): run.key for seed, run in enumerate(runs)},
            "diverged": [seed for seed, run in enumerate(runs) if run.diverged is not None],
        }

    def _train(self) -> dict[Variant, TrainedVariant]:
        """Train all that is in no store yet."""
        recipes = {variant: self.preset.variant_recipe(variant) for variant in self.preset.variants}
        trainings = {
            variant: TrainingOfVariant(self.preset, variant, *self._validation_of(recipe))
            for variant, recipe in recipes.items()
        }
        workers = self.workers
        if workers is None:
            devices = {recipe.train.device for recipe in recipes.values()}
            on_cpu = devices == {"cpu"} or not torch.accelerator.is_available()
            # Of all of them, finished or not: a resumed command gives each as many threads as it had before.
            workers = default_workers(sum(one.expected for one in trainings.values()), on_cpu=on_cpu)
        settings: dict[str, Any] = {"workers": workers, "build_data": self._data.of, "commit": self.commit}
        trained, runs = train_variants(trainings, self._store, self.experiment, self.progress, **settings)
        for run in runs:
            self._trained_on[run.device] += 1
            if run.commit != self.commit:
                self._sources[f"Trained by an earlier command, {_checkout(run.commit)}"] += 1
            if run.begun_at != run.commit:
                self._sources[f"Begun {_checkout(run.begun_at)}, finished {_checkout(run.commit)}"] += 1
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
        has_model = run.model_folder.is_dir()
        if path.is_file() and (self.resume or not has_model):
            existing = read_results(path)
            commit = existing.settings["commit"]
            # A checkout with changes, or no checkout at all, may hold any code.
            is_of_this_code = commit is not None and not commit.endswith("-dirty") and commit == self.commit
            if existing.settings["options"] == options and (is_of_this_code or not has_model):
                self.device = self.device or existing.device
                if commit != self.commit:
                    self._sources[f"Measured by an earlier command, {_checkout(commit)}"] += 1
                return existing.records
        if not has_model:
            raise FileNotFoundError(
                f"{variant.label} with seed {seed} was trained, but its model {str(run.model_folder)!r} is not there, "
                f"nor is {str(path)!r} with what {self.experiment.name} measured of it with the options {options}; "
                f"without {str(run.folder.parent)!r} the command trains it again."
            )
        model = load_trained(recipe, run.model_folder)
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


def _checkout(commit: str | None) -> str:
    """Name the code that ran."""
    if commit is None:
        return "outside a git checkout"
    return f"at commit {short_commit(commit)}"
