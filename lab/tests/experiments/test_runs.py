"""An experiment end to end, at a size of seconds: trained alike, shared, resumed, compared, written down."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import runner
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, ComparisonRule, Experiment, Preset, compared_by
from diff_lab.experiments.request import request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.learning import ACCURACY_CURVE, curves_of
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.record import Result, ResultsFile
from diff_lab.results_files import device_name, read_results, write_json
from diff_lab.train import Progress, TrainingInterrupted, load_recipe
from diff_transformer.utils.files import read_json
from small_experiment import SIZES, SMALL, TINY, trainings
from small_runs import Watcher

Done = tuple[Path, ResultsFile, Watcher]


class Measure(MeasurementRequest):
    """A request of a function of one run in place of a measurement."""

    def __init__(self, function: Callable[[EvalInput], float]) -> None:
        object.__setattr__(self, "function", function)

    def resolve(self) -> Any:
        return self

    def check(self, *_: Any) -> None: ...

    def baselines(self, recipe: Any) -> list[Any]:
        return []

    def run(self, measured: EvalInput) -> list[Result]:
        value = self.function(measured)  # type: ignore[attr-defined]  # set above
        return [Result(name="x", variant=measured.variant, value=value, seed=measured.seed, better="lower")]


def measuring(function: Callable[[EvalInput], float], preset: Preset) -> Experiment:
    """The small experiment with a function of one run as all that is measured."""
    return replace(
        SMALL,
        requests=lambda _: [Measure(function)],
        options=SMALL.options,
        presets={"cpu": preset},
        compare=compared_by(ComparisonRule(names=("x",))),
    )


def trained_by(measured: EvalInput) -> Any:
    """The recipe of a run's last stage."""
    assert measured.training is not None
    return load_recipe(measured.training.folder / "run" / "recipe.yaml")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder, heard = tmp_path_factory.mktemp("reproduced"), Watcher()
    return folder, run_experiment(request_experiment(SMALL), folder, progress=heard), heard


def test_everything_is_in_the_file(done: Done) -> None:
    folder, results, heard = done
    assert read_results(folder / "recall.json").records == results.records
    accuracy = {(r.variant, r.seed) for r in results.records if r.name == "retrieval/first_query_accuracy"}
    assert accuracy == {(variant, seed) for variant in ("diff", "softmax") for seed in (0, 1)}
    answers = [c for c in results.comparisons if "attention" not in c.name]
    assert [(c.variant, c.against, len(c.differences)) for c in answers] == [("diff", "softmax", 2)] * 2
    assert results.settings["request"]["seeds"] == 2
    assert results.notes[0] == SMALL.notes[0]
    # Attention at a depth at which one seed alone has needles.
    assert any(note.startswith("Verdicts on one seed are inconclusive") for note in results.notes)
    assert {c.exploratory for c in results.comparisons} == {True}
    variants = {variant["name"]: variant for variant in results.settings["variants"]}
    assert set(variants["diff"]["tried"]) == {"0.001", "0.002"}
    assert variants["diff"]["learning_rate"] in (1e-3, 2e-3)
    assert variants["diff"]["parameters"] - variants["softmax"]["parameters"] == 6 * 8
    assert variants["diff"]["shared_parameters"] == variants["softmax"]["shared_parameters"]
    heads = [[variants[name][key] for key in ("heads", "head_dim", "differential")] for name in ("diff", "softmax")]
    assert heads == [[1, 8, True], [2, 8, False]]
    assert any(message.startswith("diff: ") and "without λ and norms" in message for message in heard.messages)
    # Two trials of each variant, of which one is its first seed's run, and the second seed's.
    assert len(heard.runs) == 6
    assert heard.runs[0] == "diff · trying the learning rate 0.001"
    assert heard.runs[-1].startswith("softmax · seed 1 · learning rate ")
    assert "6 trainings." in heard.messages


def test_a_trained_run_is_what_its_recipe_trains_alone(done: Done, tmp_path: Path) -> None:
    """Not only the right name: the weights are those of `train` with the run's own recipe."""
    from safetensors.torch import load_file

    from diff_lab.train import train

    folder, results, _ = done
    run = folder / "runs" / results.settings["variants"][0]["runs"]["1"] / "run"
    again = train(load_recipe(run / "recipe.yaml"), tmp_path / "alone")
    stored = load_file(run / "model" / "model.safetensors")
    for name, weight in load_file(again.model_folder / "model.safetensors").items():
        assert torch.equal(weight, stored[name]), name
    assert not (run / "checkpoints").exists()


def test_another_experiment_finds_the_runs(done: Done) -> None:
    folder, results, _ = done
    other = replace(SMALL, name="other")
    trained, results_of_other = trainings(folder, request_experiment(other))
    assert trained == []
    assert [r for r in results_of_other.records if r.name == "retrieval/accuracy"] == [
        r for r in results.records if r.name == "retrieval/accuracy"
    ]
    trained, _ = trainings(folder, request_experiment(replace(SMALL, name="more"), seeds=3))
    assert [run.split(" · ")[:2] for run in trained] == [["diff", "seed 2"], ["softmax", "seed 2"]]
    longer = replace(TINY, overrides=(*SIZES, "data.num_pairs=3"), learning_rates=(1e-3,), seeds=1)
    trained, of_one_rate = trainings(folder, request_experiment(replace(SMALL, name="pairs", presets={"cpu": longer})))
    assert len(trained) == 2, "other data are other runs"
    variants: Any = of_one_rate.settings["variants"]
    assert [(one["learning_rate"], one["tried"]) for one in variants] == [(1e-3, {})] * 2  # the only rate is not tried


def test_results_are_kept_refused_or_replaced(done: Done, tmp_path: Path) -> None:
    folder, results, _ = done
    with pytest.raises(FileExistsError, match=r"There are results in .*recall\.json. already"):
        run_experiment(request_experiment(SMALL), folder)
    with pytest.raises(ValueError, match="not both"):
        run_experiment(request_experiment(SMALL), folder, resume=True, overwrite=True)
    written = (folder / "recall.json").read_bytes()
    heard = Watcher()
    assert run_experiment(request_experiment(SMALL), folder, resume=True, progress=heard).created == results.created
    (message,) = heard.messages
    checkout = "outside a git checkout" if results.commit is None else f"at commit {results.commit[:12]}"
    assert message.startswith(f"recall: existing results of {results.created}, {checkout}")
    assert (folder / "recall.json").read_bytes() == written
    trained, replaced = trainings(folder, request_experiment(SMALL, options={"sequences": 16}), overwrite=True)
    assert trained == []
    assert {r.n for r in replaced.records if r.name == "retrieval/first_query_accuracy"} == {16}
    # Results of another question are neither kept as if they were of this one nor lost.
    other = (folder / "recall.json").read_bytes()
    with pytest.raises(FileExistsError, match=r"otherwise \(options\.sequences: 16 there, 8 asked for\), and --resume"):
        run_experiment(request_experiment(SMALL), folder, resume=True)
    with pytest.raises(FileExistsError, match=r"\(seeds: 2 there, 3 asked for; options\.sequences: 16 there, 8 ask"):
        run_experiment(request_experiment(SMALL, seeds=3), folder, resume=True)
    assert (folder / "recall.json").read_bytes() == other
    strange = json.loads(other)
    del strange["settings"]["request"]["options"]
    (folder / "recall.json").write_text(json.dumps(strange), encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"otherwise \(options\.sequences: none there, 8 asked for\)"):
        run_experiment(request_experiment(SMALL), folder, resume=True)
    trained, back = trainings(folder, request_experiment(SMALL), overwrite=True)
    assert trained == []
    assert back.comparisons == results.comparisons


def test_results_of_older_code_that_knew_other_settings_are_not_lost(done: Done, tmp_path: Path) -> None:
    _, results, _ = done
    request = dict(results.settings["request"])
    del request["extension"]
    for settings, message in (
        ({**results.settings, "request": request}, r"\(extension: none there, \[\] asked for\)"),
        ({**results.settings, "request": {**results.settings["request"], "overrides": ["x" * 99]}}, r"\(overrides\)"),
        ({}, "they do not tell how"),
    ):
        path = write_json(tmp_path / "recall.json", replace(results, settings=settings))
        written = path.read_bytes()
        with pytest.raises(FileExistsError, match=message):
            run_experiment(request_experiment(SMALL), tmp_path, resume=True)
        assert path.read_bytes() == written


def test_runs_that_another_machine_has_trained_are_told(done: Done, tmp_path: Path) -> None:
    folder, results, _ = done
    assert not any("another device" in note for note in results.notes)
    shutil.copytree(folder / "runs", tmp_path / "runs")
    here = device_name().partition(", ")[0]
    for variant, device in zip(
        results.settings["variants"], ["An older processor, 4 threads", f"{here}, 7 threads"], strict=True
    ):
        file = tmp_path / "runs" / variant["runs"]["0"] / "trained.json"
        write_json(file, {**read_json(file), "device": device})
    notes = run_experiment(request_experiment(SMALL), tmp_path).notes
    told = [note for note in notes if "another device" in note]
    assert told == ["Trained on another device, An older processor, 4 threads: 1 of the runs."]


def test_a_second_stage_begins_with_the_model_of_the_first(tmp_path: Path) -> None:
    preset = replace(
        TINY, learning_rates=(), seeds=1, extension=("data.length=40", "train.steps=1", "model.rope_theta=20000")
    )
    lengths = {}

    def measure(run: EvalInput) -> float:
        recipe = trained_by(run)
        lengths[run.variant] = (recipe.data.length, run.model.config.max_position_embeddings)
        assert recipe.model.init_from is not None
        first = load_recipe(Path(recipe.model.init_from).parent / "recipe.yaml")
        assert first.model.attention_type == recipe.model.attention_type
        assert first.data.length == 32
        return 1.0

    experiment = measuring(measure, preset)
    trained, _ = trainings(tmp_path, request_experiment(experiment))
    assert ["extension" in run for run in trained] == [False, False, True, True]
    assert lengths == {"diff": (40, 40), "softmax": (40, 40)}
    trained, _ = trainings(tmp_path, request_experiment(experiment), overwrite=True)
    assert trained == []


def test_an_experiment_that_trains_nothing(tmp_path: Path) -> None:
    def once(preset: Preset, _: Progress) -> list[Result]:
        return [
            Result(name="ratio", variant=variant, value=1.0, seed=seed, better="higher")
            for variant in ("diff", "softmax")
            for seed in range(preset.seeds)
        ]

    experiment = Experiment(
        name="once",
        shows="a ratio",
        presets={"cpu": Preset(variants=(), seeds=1, minutes=1)},
        measure_once=once,
        compare=compared_by(ComparisonRule(names=("ratio",))),
    )
    results = run_experiment(request_experiment(experiment), tmp_path)
    assert results.settings["variants"] == []
    assert results.comparisons[0].verdict == "inconclusive"


@pytest.fixture
def at_commit(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Say which commit the code is at from here on."""
    capture = runner.capture_environment

    def at(commit: str | None) -> None:
        monkeypatch.setattr(runner, "capture_environment", lambda device: replace(capture(device), commit=commit))

    return at


def test_an_interrupted_experiment_resumes(done: Done, tmp_path: Path, at_commit: Callable[[str], None]) -> None:
    _, uninterrupted, _ = done
    at_commit("a" * 40)
    with pytest.raises(TrainingInterrupted, match="--resume"):
        run_experiment(request_experiment(SMALL), tmp_path, progress=Watcher(11))  # within the last run
    assert not (tmp_path / "recall.json").exists()
    (half,) = [folder for folder in (tmp_path / "runs").iterdir() if not (folder / "trained.json").exists()]
    assert list(half.glob("run/checkpoints/step-*"))
    at_commit("b" * 40)
    heard = Watcher()
    results = run_experiment(request_experiment(SMALL), tmp_path, resume=True, progress=heard)
    assert len(heard.runs) == 1
    assert heard.steps == [2], "the first step is not done again"
    assert results.comparisons == uninterrupted.comparisons
    assert f"Begun at commit {'a' * 12}, finished at commit {'b' * 12}: 1 of the runs." in results.notes
    assert f"Trained by an earlier command, at commit {'a' * 12}: 5 of the runs." in results.notes
    assert not list(tmp_path.glob("runs/*/begun.json"))


def test_measurements_are_kept_where_their_code_is_known_or_the_model_is_gone(
    tmp_path: Path, at_commit: Callable[[str | None], None]
) -> None:
    """A checkout with changes, or none, may hold any code: what it measured is measured again."""
    measured: list[tuple[str, int]] = []

    def measure(run: EvalInput) -> float:
        measured.append((run.variant, run.seed))
        return float(len(measured))

    request = request_experiment(measuring(measure, replace(TINY, learning_rates=())))

    def newly_measured(commit: str | None, **settings: bool) -> tuple[list[tuple[str, int]], ResultsFile]:
        before = len(measured)
        (tmp_path / "recall.json").unlink(missing_ok=True)
        at_commit(commit)
        results = run_experiment(request, tmp_path, **settings)
        return measured[before:], results

    every = [("diff", 0), ("softmax", 0), ("diff", 1), ("softmax", 1)]
    for commit in (None, "a-dirty", "a" * 40, "b" * 40):
        assert newly_measured(commit, resume=True)[0] == every
    taken, results = newly_measured("b" * 40, resume=True)
    assert taken == []
    assert "Trained by an earlier command, outside a git checkout: 4 of the runs." in results.notes
    assert newly_measured("b" * 40)[0] == every
    # Of a run without its model the numbers are the only ones, whichever code took them.
    kept = tmp_path / "runs" / results.settings["variants"][0]["runs"]["1"]
    shutil.rmtree(kept / "run" / "model")
    for settings in ({"resume": True}, {"overwrite": True}):
        taken, results = newly_measured("c" * 40, **settings)
        assert set(every) - set(taken) >= {("diff", 1)}
        assert f"Measured by an earlier command, at commit {'b' * 12}: 1 of the runs." in results.notes
    shutil.rmtree(kept / "measured")
    with pytest.raises(FileNotFoundError, match=r"diff with seed 1 was trained, but its model .* trains it again"):
        newly_measured("c" * 40, overwrite=True)


def test_a_diverged_run_is_told_and_leaves_no_verdict(tmp_path: Path) -> None:
    wild = replace(DIFF_AND_SOFTMAX[1], overrides=("model.attention_type=softmax", "train.learning_rate=1e30"))
    request = request_experiment(
        replace(SMALL, presets={"cpu": replace(TINY, variants=(DIFF_AND_SOFTMAX[0], wild), learning_rates=())})
    )
    results = run_experiment(request, tmp_path)
    assert results.settings["variants"][1]["diverged"] == [0, 1]
    assert any(note.startswith("softmax diverged with seed 1: ") for note in results.notes)
    # Of the other variant it is known that it is at chance; of attention no floor is known.
    answers = [c for c in results.comparisons if "attention" not in c.name]
    assert {(c.verdict, c.at_floor) for c in answers} == {("not comparable", ("diff",))}
    assert {c.verdict for c in results.comparisons} == {"not comparable", "inconclusive"}
    assert all(math.isnan(c.difference) for c in results.comparisons)
    # Its curve ends in a number that is missing, at the last step of the training.
    ends = {(c.variant, seed): c.by_seed[seed].values[-1] for c in curves_of(results.records) for seed in (0, 1)}
    assert [key for key, value in ends.items() if math.isnan(value)] == [("softmax", 0), ("softmax", 1)]
    assert trainings(tmp_path, request, overwrite=True)[0] == [], "known to diverge"


def test_numbers_of_a_size_at_which_all_diverged_are_those_of_another_size() -> None:
    one, other = (replace(DIFF_AND_SOFTMAX[0], coordinates=Coordinates(parameters=size)) for size in (1e6, 2e6))
    records = [Result(name="x", variant="diff", value=1.0, seed=0, coordinates=Coordinates(parameters=1e6), n=3)]
    (lost,) = runner.missing_records(other, 1, {one: records})
    assert (lost.coordinates, lost.seed, lost.n, math.isnan(lost.value)) == (other.coordinates, 1, None, True)
    assert runner.missing_records(other, 1, {}) == []


@pytest.mark.all
def test_the_validation_curve_of_every_run_is_in_the_file(tmp_path: Path) -> None:
    """Of a run with two stages that of the first: the second validates on other data."""
    every = replace(TINY, overrides=(*SIZES, "train.steps=4", "train.evaluate_every=1"), learning_rates=(1e-3,))
    found = []
    for extension in ((), ("train.steps=1", "data.length=48")):
        small = replace(SMALL, presets={"cpu": replace(every, extension=extension)})
        results = run_experiment(request_experiment(small), tmp_path, overwrite=True)
        found.append(curves_of(results.records))
        assert [(one.variant, sorted(one.by_seed)) for one in found[-1]] == [("diff", [0, 1]), ("softmax", [0, 1])]
        assert {one.by_seed[seed].steps for one in found[-1] for seed in (0, 1)} == {(1, 2, 3, 4)}
    assert found[0] == found[1]
    (levels,) = (one for one in results.baselines if one.name == ACCURACY_CURVE)
    assert levels.floor > levels.chance
