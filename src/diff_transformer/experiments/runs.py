"""An experiment carried out: every arm trained with every seed, measured, compared, and written down."""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diff_transformer.experiments.asked import Asked
from diff_transformer.experiments.definition import with_definition
from diff_transformer.experiments.fairness import Counts, check_counts, check_recipes, count
from diff_transformer.experiments.framework import Arm, Experiment, MeasuredRun, Preset, Situation
from diff_transformer.experiments.heads import heads_of
from diff_transformer.experiments.kept import check_results, results_path
from diff_transformer.experiments.progress import Trainings
from diff_transformer.experiments.store import Store, Stored, run_key
from diff_transformer.experiments.sweep import choose_rate, sweep_notes
from diff_transformer.experiments.unmeasured import lost_records, size_records
from diff_transformer.results import (
    Result,
    ResultsFile,
    capture_environment,
    capture_results,
    number_of,
    read_results,
    remark_on_seeds,
    write_json,
)
from diff_transformer.train import Data, Progress, Recipe, build_config
from diff_transformer.train.progress import Silent

RUNS = "runs"
SECONDS = "training/seconds"


def run_experiment(
    asked: Asked, output: str | Path, *, resume: bool = False, overwrite: bool = False, progress: Progress | None = None
) -> ResultsFile:
    """Carry an experiment out, and write its results to `output`/NAME.json.

    Trained runs lie in `output`/runs, each in a folder named by a hash of what made it. One that is finished is used
    again, one that was interrupted goes on, whatever else is asked for.

    Args:
        asked: which experiment, and how.
        output: the folder of all that is written; made where it is not there.
        resume: keep results that are there, which must have been asked for in the same way, and measurements of runs
            that the same code has made.
        overwrite: replace results that are there.
        progress: is told about every step of training.

    Raises:
        FileExistsError: there are results already, and neither `resume` nor `overwrite` is asked for; or `resume`, and
            they were asked for otherwise.
        ValueError: the arms are not alike; or `resume` and `overwrite` together; or as the experiment's own `check`.
        TrainingInterrupted: as `train`; the same call goes on.
    """
    folder = Path(output)
    path = results_path(folder, asked.experiment.name)
    check_results(path, asked, resume=resume, overwrite=overwrite)
    if resume and path.exists():
        found = with_definition(read_results(path), asked.experiment)
        if progress is not None:
            kept = f"{asked.experiment.name}: kept from {found.created}, {_place(found.commit)}"
            progress.tell(f"{kept}; --overwrite measures and compares anew, and trains nothing twice.")
        return found
    began = time.monotonic()
    work = _Work(asked.experiment, asked.preset, folder, resume, progress or Silent())
    if asked.preset.arms:
        work.train_and_measure()
    else:
        work.measure_once()
    comparisons = asked.experiment.compare(work.records, asked.preset) if work.has_numbers else []
    if (remark := remark_on_seeds(comparisons)) is not None:
        work.notes.append(remark)
    settings = {"asked": asked.settings(), "arms": work.arms, "seconds": round(time.monotonic() - began, 1)}
    results = capture_results(
        asked.experiment.shows,
        settings,
        [replace(record, documents=()) for record in work.records],
        work.device,
        comparisons=comparisons,
        notes=list(dict.fromkeys(work.notes)),
    )
    results = replace(results, commit=work.commit)
    if work.device is None and work.kept_device is not None:
        results = replace(results, device=work.kept_device)
    results = with_definition(results, asked.experiment)
    folder.mkdir(parents=True, exist_ok=True)
    # What was written is what is shown: read back, it is as strict as a file.
    return read_results(write_json(path, results))


@dataclass
class _Work:
    """One experiment while it is carried out."""

    experiment: Experiment
    preset: Preset
    folder: Path
    resume: bool
    progress: Progress
    records: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    arms: list[dict[str, Any]] = field(default_factory=list)
    device: str | None = None  # where something was measured, as torch calls it
    kept_device: str | None = None  # the name of the one where all was measured that was kept
    _remarks: dict[str, list[str]] = field(default_factory=dict)  # on a choice of learning rates → arms
    _data: dict[str, Data] = field(default_factory=dict)
    _earlier: dict[str | None, set[str]] = field(default_factory=dict)  # commit → runs that it trained

    def __post_init__(self) -> None:
        self.notes += self.experiment.notes
        self._store = Store(self.folder / RUNS)
        # Of the code that runs: the checkout may change meanwhile.
        self.commit = capture_environment("cpu").commit

    @property
    def has_numbers(self) -> bool:
        """Whether anything was measured: not where every run diverged."""
        return any(not record.name.startswith("training/") for record in self.records)

    def measure_once(self) -> None:
        """Take the numbers of an experiment that trains nothing."""
        assert self.experiment.measure_once is not None  # Experiment's own check
        place = self.folder / self.experiment.name
        place.mkdir(parents=True, exist_ok=True)
        situation = Situation(folder=place, seeds=self.preset.seeds, progress=self.progress)
        self.records += self.experiment.measure_once(situation, self.preset)

    def train_and_measure(self) -> None:
        """Train every arm with every seed, after choosing its learning rate, and take the numbers of each."""
        recipes = {arm: self.preset.arm_recipe(arm) for arm in self.preset.arms}
        check_recipes(recipes)
        counts = {arm: self._count(recipe) for arm, recipe in recipes.items()}
        check_counts(counts, self.preset)
        self._check_measurement()
        for arm, sizes in counts.items():
            self.progress.tell(f"{arm.label}: {sizes.total:,} parameters, {sizes.shared:,} without λ and norms")
            self.records += size_records(arm, sizes)
        self._trainings = Trainings(self.progress, self._costs(counts))
        rates: dict[Arm, float] = {}
        for arm in self.preset.arms:
            tried = self._try_rates(arm)
            rates[arm] = self._choose_rate(arm, tried, recipes[arm])
            overrides = {"name": arm.name, "group": arm.group, "overrides": arm.overrides}
            numbers = {
                "parameters": counts[arm].total,
                "shared_parameters": counts[arm].shared,
                **heads_of(recipes[arm]).settings(),
            }
            chosen = {"learning_rate": rates[arm], "tried": {f"{rate:g}": value for rate, value in tried.items()}}
            self.arms.append({**overrides, **numbers, **chosen, "runs": {}, "diverged": []})
        self.notes += sweep_notes(self.preset, self._remarks)
        measured: dict[Arm, Sequence[Result]] = {}
        diverged: list[tuple[Arm, int]] = []
        for seed in range(self.preset.seeds):
            for arm, told in zip(self.preset.arms, self.arms, strict=True):
                run, recipe = self._stages(arm, rates[arm], seed)
                told["runs"][str(seed)] = run.key
                if run.diverged is None:
                    measured[arm] = self._measure(arm, seed, run, recipe)
                    self.records += measured[arm]
                else:
                    diverged.append((arm, seed))
                    told["diverged"].append(seed)
                    self.notes.append(f"{arm.label} diverged with seed {seed}: {run.diverged}")
        for arm, seed in diverged:
            self.records += lost_records(arm, seed, measured)
        for commit, found in self._earlier.items():
            self.notes.append(f"Trained by an earlier command, {_place(commit)}: {len(found)} of the runs.")

    def _check_measurement(self) -> None:
        """What can be known to fail after hours of training fails before it."""
        if self.experiment.check is None:
            return
        recipes = [self.preset.arm_recipe(arm, "train.seed=0", *self.preset.extension) for arm in self.preset.arms]
        for data in {id(data): data for data in map(self._build_data, recipes)}.values():
            self.experiment.check(self.preset.options, data)

    def _count(self, recipe: Recipe) -> Counts:
        data = self._build_data(recipe)
        return count(build_config(recipe, data.batches.vocab_size, data.tokenizer))

    def _build_data(self, recipe: Recipe) -> Data:
        """The data of a recipe: one object for all recipes with the same data and seed."""
        name = json.dumps([recipe.data.model_dump(mode="json"), recipe.train.seed])
        if name not in self._data:
            self._data[name] = self.experiment.build_data(recipe)
        return self._data[name]

    def _costs(self, counts: Mapping[Arm, Counts]) -> list[float]:
        """What every training to come will cost in operations, in the order in which they come."""

        def cost(arm: Arm, *more: str) -> float:
            recipe = self.preset.arm_recipe(arm, *more)
            return float(counts[arm].total * recipe.train.steps * recipe.data.batch_size * recipe.data.length)

        preset, costs = self.preset, []
        for arm in preset.arms:
            costs += [cost(arm, *preset.sweep)] * (len(preset.learning_rates) if len(preset.learning_rates) > 1 else 0)
        for seed in range(preset.seeds):
            for arm in preset.arms:
                is_trial = seed == 0 and len(preset.learning_rates) > 1 and not preset.sweep
                costs.append(0.0 if is_trial else cost(arm))
                if preset.extension:
                    costs.append(cost(arm, *preset.extension))
        return costs

    def _try_rates(self, arm: Arm) -> dict[float, float]:
        """Learning rate → validation of a run with the first seed, NaN where it diverged; empty where none is tried."""
        preset, name = self.preset, self.experiment.validation.name
        if len(preset.learning_rates) < 2:
            return dict.fromkeys(preset.learning_rates, math.nan)
        tried = {}
        for rate in preset.learning_rates:
            recipe = preset.arm_recipe(arm, *preset.sweep, *_settings(rate, seed=0))
            run = self._train(f"{arm.label} · trying the learning rate {rate:g}", recipe)
            tried[rate] = math.nan if run.diverged is not None else number_of(run.metrics()[-1][name])
            if run.diverged is not None:
                self.notes.append(f"{arm.label} diverged at the learning rate {rate:g} with seed 0.")
        return tried

    def _choose_rate(self, arm: Arm, tried: Mapping[float, float], recipe: Recipe) -> float:
        if not tried:
            return next(iter(self.preset.learning_rates), recipe.train.learning_rate)
        rate, remarks = choose_rate(tried, self.experiment.validation)
        for remark in remarks:
            self._remarks.setdefault(remark, []).append(arm.label)
        return rate

    def _stages(self, arm: Arm, rate: float, seed: int) -> tuple[Stored, Recipe]:
        """The run of one seed, and its recipe; where there is a second stage, those of the second."""
        title = f"{arm.label} · seed {seed} · learning rate {rate:g}"
        recipe = self.preset.arm_recipe(arm, *_settings(rate, seed))
        run = self._train(title, recipe)
        if not self.preset.extension:
            return run, recipe
        if run.diverged is not None:
            self._trainings.next(title, found=True)
            return run, recipe
        start = f"model.start_from={json.dumps(str(run.model_folder.resolve()))}"
        recipe = self.preset.arm_recipe(arm, *_settings(rate, seed), *self.preset.extension, start)
        return self._train(f"{title} · extension", recipe, before=run.key), recipe

    def _train(self, title: str, recipe: Recipe, before: str | None = None) -> Stored:
        data = self._build_data(recipe)
        key = run_key(recipe, data.batches, before, self.experiment.logs)
        found = self._store.find(key)
        self._trainings.next(title, found=found is not None)
        if found is None:
            found = self._store.train(
                key, recipe, data, self.experiment.on_evaluate(data.batches), self._trainings, self.commit
            )
        if found.commit != self.commit:
            self._earlier.setdefault(found.commit, set()).add(found.key)
        return found

    def _measure(self, arm: Arm, seed: int, run: Stored, recipe: Recipe) -> Sequence[Result]:
        """The numbers of a run: taken, or read where an interrupted command has taken them with the same code."""
        assert self.experiment.measure is not None  # Experiment's own check
        options = json.dumps(dict(self.preset.options), sort_keys=True, default=str)
        settings = {"options": options, "commit": self.commit}
        path = run.measured / f"{self.experiment.name}.json"
        # A checkout with changes, or no checkout at all, may hold any code.
        is_known = self.commit is not None and not self.commit.endswith("-dirty")
        if self.resume and is_known and path.is_file():
            kept = read_results(path)
            if kept.settings == settings:
                self.kept_device = kept.device
                return kept.records
        model = run.load(recipe)
        self.device = str(model.device)
        self.progress.tell(f"{arm.label} · seed {seed}: measuring")
        measured = MeasuredRun(
            arm=arm,
            seed=seed,
            recipe=recipe,
            folder=run.folder,
            model=model,
            data=self._build_data(recipe),
            metrics=run.metrics(),
        )
        records = self.experiment.measure(measured, self.preset)
        records = [
            *records,
            Result(name=SECONDS, arm=arm.name, group=arm.group, value=run.seconds, unit="s", seed=seed),
        ]
        run.measured.mkdir(exist_ok=True)
        write_json(path, capture_results(self.experiment.shows, settings, records, self.device))
        return records


def _settings(rate: float, seed: int) -> tuple[str, str]:
    return f"train.learning_rate={rate!r}", f"train.seed={seed}"


def _place(commit: str | None) -> str:
    """Where the code was."""
    if commit is None:
        return "outside a git checkout"
    return f"at commit {commit[:12]}{'-dirty' if commit.endswith('-dirty') else ''}"
