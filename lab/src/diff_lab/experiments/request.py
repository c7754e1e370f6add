"""Checks the request of an experiment before any work: the request, its recipes and data, and results that exist."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from diff_lab.coordinates import NO_COORDINATES
from diff_lab.data import TextFiles
from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment
from diff_lab.experiments.experiment import Experiment, ParameterCounts, Preset, Variant, check_alike, count, text_notes
from diff_lab.experiments.recipe_comparison import recorded_experiment
from diff_lab.learning import curves_of, judge
from diff_lab.measure.measurement import read_options, refuse_unknown
from diff_lab.measure.standard import curve_baselines
from diff_lab.record import OWN, Comparison, Headline, ResultsFile
from diff_lab.results_files import read_results
from diff_lab.train import Data, Recipe, build_config, build_data, load_recipe
from diff_lab.train.recipe import TextData, override_of


def as_defined(file: ResultsFile, experiment: Experiment | None = None) -> ResultsFile:
    """Return the results with the headline, baselines and comparisons of their experiment, and verdicts by the whole
    rule.

    These follow from the records, and from the settings that the file holds: the recipe, its overrides, and the
    preset's options. Results of an experiment that is not known, or that hold no settings, are judged alone.
    """
    request = file.settings.get("request", {})
    if experiment is None:
        is_own = request.get("preset") == OWN
        is_known = is_own or request.get("experiment") in EXPERIMENTS
        if not is_known or not {"recipe", "overrides", "options"} <= request.keys():
            return judge(file)
        experiment = recorded_experiment(request) if is_own else find_experiment(request["experiment"])
    preset = Preset(recipe=request["recipe"], overrides=tuple(request["overrides"]), options=request["options"])
    baselines = [
        baseline
        for requested in experiment.requests(preset)
        for baseline in requested.baselines(load_recipe(preset.recipe, preset.overrides))
    ]
    if curves_of(file.records):
        baselines += curve_baselines(load_recipe(preset.recipe, preset.overrides))
    headline = None
    file = replace(file, comparisons=_as_compared(file, experiment.compare(file.records, preset)))
    if experiment.headline is not None:
        headline = _present(experiment.headline(preset.options), file)
        notes = tuple(note for note in file.notes if not note.startswith("No verdict"))  # it has got one since
        if len(notes) < len(file.notes):
            file = replace(file, notes=(*(note for note in experiment.notes if note not in notes), *notes))
    return judge(replace(file, title=experiment.shows, headline=headline, baselines=tuple(baselines)))


def _as_compared(file: ResultsFile, made: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Return the comparisons of a file with the claims of its definition today, and those that this has got since.

    Intervals stay: those over documents cannot be made of a file, which has none.
    """
    now = {(row.name, row.variant, row.against, row.coordinates): row for row in made}
    comparisons = []
    for row in file.comparisons:
        new = now.pop((row.name, row.variant, row.against, row.coordinates), row)
        if (row.better is None) != (new.better is None):
            claim = {name: getattr(new, name) for name in ("better", "verdict", "seeds_needed", "exploratory")}
            row = replace(row, **claim, quality=new.quality)
        comparisons.append(row)
    return (*comparisons, *now.values())


def _present(headline: Headline, file: ResultsFile) -> Headline:
    """Return the headline, or the first comparison of the same two in the same number if this preset has none there.

    A claim is of the headline's own coordinates, so another comparison goes without it, unless the headline has none.
    """
    if any(headline.names(row) for row in file.comparisons):
        return headline
    alike = (row for row in file.comparisons if replace(headline, coordinates=row.coordinates).names(row))
    first = next(alike, None)
    if first is None:
        return headline
    claim = headline.claim if headline.coordinates == NO_COORDINATES else ""
    return replace(headline, coordinates=first.coordinates, claim=claim)


@dataclass(frozen=True)
class ExperimentRequest:
    """An experiment as it is to be run: its preset has the user's seeds, text and options."""

    experiment: Experiment
    preset_name: str
    preset: Preset
    text: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Return everything that decides the numbers, as JSON has it."""
        request: dict[str, Any] = {"experiment": self.experiment.name, "preset": self.preset_name, "text": self.text}
        data = self.preset.variant_recipe(self.preset.variants[0]).data if self.preset.variants else None
        if isinstance(data, TextData) and data.paths:
            request["text_sha256"] = TextFiles(data.paths, data.text_field).fingerprint()
        settings: dict[str, Any] = json.loads(json.dumps({**request, **asdict(self.preset)}, default=dict))
        del settings["minutes"]  # what it is thought to take decides nothing
        del settings["more_rates"]  # results of earlier versions, which tried none, are kept
        if self.preset.sweep_seeds == 1:  # as in earlier versions
            del settings["sweep_seeds"]
        if not self.preset.most_seeds:
            del settings["most_seeds"]
        return settings


def request_experiment(
    experiment: Experiment,
    preset: str = "cpu",
    *,
    seeds: int | None = None,
    text: Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> ExperimentRequest:
    """Check a request, and put it into the preset.

    Seeds and options stand in place of the preset's, text (files or folders) in place of the standard library's source.

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: no such preset, one that this machine cannot run, settings that mean nothing to the experiment, or
            an option of another kind than the preset's.
    """
    chosen = preset_of(experiment, preset)
    name = experiment.name
    if preset == "gpu" and not torch.accelerator.is_available():
        raise ValueError(
            f"The gpu preset of {name!r} is planned for one H200, and this machine has no GPU; "
            f"--preset cpu takes about {experiment.presets['cpu'].minutes:g} min."
        )
    if seeds is not None and seeds < 1:
        raise ValueError(f"The number of seeds must be 1 or more, got {seeds}.")
    if text and not chosen.trains_on_text:
        raise ValueError(f"--text does not go with {name!r} at --preset {preset}, which uses no text.")
    if text:
        TextFiles(text)  # refuses what is no text
    refuse_unknown(options or {}, chosen.options, repr(name))
    all_options = read_options(experiment.options, {**chosen.options, **(options or {})}, repr(name))
    paths = tuple(str(Path(path).expanduser().resolve()) for path in text)
    resolved = replace(
        chosen,
        overrides=(*chosen.overrides, override_of("data.paths", list(paths))) if paths else chosen.overrides,
        seeds=chosen.seeds if seeds is None else seeds,
        options=all_options.model_dump(mode="json", include=set(chosen.options)),
    )
    return ExperimentRequest(experiment, preset, resolved, paths)


def preset_of(experiment: Experiment, preset: str) -> Preset:
    """Return a preset by name. Raises ValueError if the experiment has none of it."""
    if preset not in experiment.presets:
        has = ", ".join(experiment.presets)
        raise ValueError(f"The experiment {experiment.name!r} has no preset {preset!r}; it has {has}.")
    return experiment.presets[preset]


class DatasetCache:
    """The data of recipes, built once for all that have the same data and seed."""

    def __init__(self) -> None:
        self._built: dict[str, Data] = {}

    def of(self, recipe: Recipe) -> Data:
        key = json.dumps([recipe.data.model_dump(mode="json"), recipe.train.seed])
        if key not in self._built:
            self._built[key] = build_data(recipe)
        return self._built[key]


def check_preset(
    request: ExperimentRequest, data: DatasetCache
) -> tuple[dict[Variant, ParameterCounts], tuple[str, ...]]:
    """Check that the variants are alike, that their data are there, and that these serve the measurements.

    Returns the parameters of each variant, and notes on the text. Raises ValueError or OSError if the preset cannot be
    carried out.
    """
    preset = request.preset
    recipes = {variant: preset.variant_recipe(variant) for variant in preset.variants}
    counts = {}
    for variant, recipe in recipes.items():
        built = data.of(recipe)
        counts[variant] = count(build_config(recipe, built.batches.vocab_size, built.tokenizer))
    check_alike(recipes, counts, preset)
    check_measurements(request, data)
    notes = (note for recipe in recipes.values() for note in text_notes(recipe, data.of(recipe).batches))
    return counts, tuple(dict.fromkeys(notes))


def check_measurements(request: ExperimentRequest, data: DatasetCache) -> None:
    """Raise ValueError if the data of the last stage hold no batch, or cannot serve the measurements."""
    preset = request.preset
    last = [preset.variant_recipe(variant, "train.seed=0", *preset.extension) for variant in preset.variants]
    for built in {id(built): built for built in map(data.of, last)}.values():
        built.batches.train_batch(1)
        for requested in request.experiment.requests(preset):
            requested.resolve().check(built.batches, built.tokenizer)


def results_path(output: Path, name: str) -> Path:
    """Return the path of an experiment's results."""
    return output / f"{name}.json"


def refuse_results(path: Path, *, resume: bool, overwrite: bool) -> None:
    """Say why there may be no results at `path`, if so, whatever they are of. Raises as `run_experiment`."""
    if resume and overwrite:
        raise ValueError("Results are either kept (--resume) or replaced (--overwrite), not both.")
    if path.exists() and not (resume or overwrite):
        raise FileExistsError(
            f"There are results in {str(path)!r} already; choose another --output, keep them with --resume, or replace "
            "them with --overwrite, which trains nothing twice."
        )


def check_results(path: Path, request: ExperimentRequest, *, resume: bool, overwrite: bool) -> None:
    """Say why an experiment's results cannot be written to `path` or kept there, if so. Raises as `run_experiment`."""
    refuse_results(path, resume=resume, overwrite=overwrite)
    if resume and path.exists():
        before, now = read_results(path).settings.get("request"), request.settings()
        if isinstance(before, Mapping) and "text_sha256" not in before:  # results of earlier versions
            now.pop("text_sha256", None)
        differs = _differences(before, now)
        if differs:
            raise FileExistsError(
                f"The results in {str(path)!r} were asked for otherwise ({differs}), and --resume would lose them; "
                "ask for the same, choose another --output, or replace them with --overwrite, which trains nothing "
                "twice."
            )


def _differences(before: object, now: Mapping[str, Any]) -> str:
    """Describe the differences of two requests: "seeds: 10 there, 3 asked for; …"; empty if there are none."""
    if not isinstance(before, Mapping):
        return "they do not tell how"
    there, here = _flat(before), _flat(now)
    differences = []
    for name in {**there, **here}:
        # A setting may be None, which is a value; one that is not there is shown as "none".
        sides = [side.get(name, "none") for side in (there, here)]
        if sides[0] != sides[1]:
            is_short = all(len(str(side)) <= 60 for side in sides)
            differences.append(f"{name}: {sides[0]} there, {sides[1]} asked for" if is_short else name)
    return "; ".join(differences)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, those of sections such as the recipe by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value) if isinstance(value, Mapping) else {}
        flat |= {f"{name}.{key}": one for key, one in inner.items()} or {name: value}
    return flat
