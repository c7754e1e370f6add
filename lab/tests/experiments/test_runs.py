"""An experiment end to end, at a size of seconds: trained alike, shared, resumed, compared, written down."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_lab.coordinates import Coordinates
from diff_lab.experiments import run_store, runner
from diff_lab.experiments.experiment import (
    DIFF_AND_SOFTMAX,
    ComparisonRule,
    Experiment,
    Preset,
    Variant,
    compared_by,
)
from diff_lab.experiments.in_context_experiments import RECALL
from diff_lab.experiments.request import as_defined, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.learning import ACCURACY_CURVE, curves_of
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.record import Result, ResultsFile
from diff_lab.report.pages import build_results_report
from diff_lab.results_files import device_name, read_results, write_json
from diff_lab.train import DivergenceError, Progress, TrainingInterrupted, load_recipe
from diff_transformer.utils.files import read_json, read_metrics
from small_experiment import SIZES, SMALL, TINY, Heard, Stop, trainings


class Measure(MeasurementRequest):
    """A request of a function of one run in place of a measurement."""

    def __init__(self, function: Callable[[EvalInput], float]) -> None:
        object.__setattr__(self, "function", function)

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
        measurements=lambda _: [Measure(function)],
        options=type(SMALL.option_model()()),
        presets={"cpu": preset},
        compare=compared_by(ComparisonRule(name="x")),
    )


def trained_by(measured: EvalInput) -> Any:
    """The recipe of a run's last stage."""
    assert measured.training is not None
    return load_recipe(measured.training.folder / "run" / "recipe.yaml")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ResultsFile, Heard]:
    folder, heard = tmp_path_factory.mktemp("reproduced"), Heard()
    return folder, run_experiment(request_experiment(SMALL), folder, progress=heard), heard


def test_everything_is_in_the_file(done: tuple[Path, ResultsFile, Heard]) -> None:
    folder, results, heard = done
    assert read_results(folder / "recall.json").records == results.records
    accuracy = {(r.variant, r.seed) for r in results.records if r.name == "retrieval/first_query_accuracy"}
    assert accuracy == {(variant, seed) for variant in ("diff", "softmax") for seed in (0, 1)}
    answers = [c for c in results.comparisons if "attention" not in c.name]
    assert [(c.variant, c.against, len(c.differences)) for c in answers] == [("diff", "softmax", 2)] * 2
    assert results.settings["request"]["seeds"] == 2
    assert results.notes[0] == RECALL.notes[0]
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


def test_both_variants_see_the_same_batches_in_the_same_order(done: tuple[Path, ResultsFile, Heard]) -> None:
    folder, results, _ = done
    recipes = {}
    for variant in results.settings["variants"]:
        recipes[variant["name"]] = load_recipe(folder / "runs" / variant["runs"]["1"] / "run" / "recipe.yaml")
    assert recipes["diff"].data == recipes["softmax"].data
    assert recipes["diff"].train.seed == recipes["softmax"].train.seed == 1
    assert recipes["diff"].model.attention_type == "diff"


def test_a_trained_run_is_what_its_recipe_trains_alone(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
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


def test_another_experiment_finds_the_runs(done: tuple[Path, ResultsFile, Heard]) -> None:
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
    trained, _ = trainings(folder, request_experiment(replace(SMALL, name="pairs", presets={"cpu": longer})))
    assert len(trained) == 2, "other data are other runs"


def test_results_are_kept_refused_or_replaced(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
    folder, results, _ = done
    with pytest.raises(FileExistsError, match=r"There are results in .*recall\.json. already"):
        run_experiment(request_experiment(SMALL), folder)
    with pytest.raises(ValueError, match="not both"):
        run_experiment(request_experiment(SMALL), folder, resume=True, overwrite=True)
    written = (folder / "recall.json").read_bytes()
    heard = Heard()
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
    trained, back = trainings(folder, request_experiment(SMALL), overwrite=True)
    assert trained == []
    assert back.comparisons == results.comparisons


def test_results_of_older_code_that_knew_other_settings_are_not_lost(
    done: tuple[Path, ResultsFile, Heard], tmp_path: Path
) -> None:
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


def test_an_interrupted_experiment_resumes(
    done: tuple[Path, ResultsFile, Heard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, uninterrupted, _ = done
    capture, commit = runner.capture_environment, "a" * 40
    monkeypatch.setattr(runner, "capture_environment", lambda device: replace(capture(device), commit=commit))
    with pytest.raises(TrainingInterrupted, match="--resume"):
        run_experiment(request_experiment(SMALL), tmp_path, progress=Stop(11))  # within the last run
    assert not (tmp_path / "recall.json").exists()
    halves = [folder for folder in (tmp_path / "runs").iterdir() if not (folder / "trained.json").exists()]
    assert len(halves) == 1
    assert list(halves[0].glob("run/checkpoints/step-*"))
    heard, commit = Heard(), "b" * 40
    results = run_experiment(request_experiment(SMALL), tmp_path, resume=True, progress=heard)
    assert len(heard.runs) == 1
    assert heard.steps == [2], "the first step is not done again"
    assert results.comparisons == uninterrupted.comparisons
    assert f"Begun at commit {'a' * 12}, finished at commit {'b' * 12}: 1 of the runs." in results.notes
    assert not list(tmp_path.glob("runs/*/begun.json"))


@pytest.mark.all
@pytest.mark.parametrize("commit", ["0123456789abcdef", "0123456789abcdef-dirty", None])
def test_what_known_code_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    """A checkout with changes, or none, may hold any code: what it measured is measured again."""
    counted: list[tuple[str, int]] = []
    capture = runner.capture_environment
    monkeypatch.setattr(runner, "capture_environment", lambda device: replace(capture(device), commit=commit))

    def measure(run: EvalInput) -> float:
        counted.append((run.variant, run.seed))
        if len(counted) == 4 and len(set(counted)) == 4:
            raise KeyboardInterrupt
        return float(run.seed)

    experiment = measuring(measure, replace(TINY, learning_rates=()))
    with pytest.raises(KeyboardInterrupt):
        run_experiment(request_experiment(experiment), tmp_path)
    results = run_experiment(request_experiment(experiment), tmp_path, resume=True)
    four = [("diff", 0), ("softmax", 0), ("diff", 1), ("softmax", 1)]
    is_known = commit == "0123456789abcdef"
    assert counted == [*four, *(four[-1:] if is_known else four)]
    assert results.comparisons[0].differences == (0.0, 0.0)
    if not is_known:
        return
    # All is kept: where it was measured is told by what was kept, and not by where it was read.
    (tmp_path / "recall.json").unlink()
    for path in tmp_path.rglob("measured/recall.json"):
        write_json(path, replace(read_results(path), device="another machine"))
    results = run_experiment(request_experiment(experiment), tmp_path, resume=True)
    assert results.device == "another machine"
    assert f"Trained on another device, {device_name()}: 4 of the runs." in results.notes
    assert len(counted) == 5


@pytest.mark.all
def test_a_run_without_its_model_keeps_what_was_measured_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another commit measured; of a run that has its model the numbers are taken anew."""
    counted: list[tuple[str, int]] = []
    capture = runner.capture_environment

    def at(commit: str) -> None:
        monkeypatch.setattr(runner, "capture_environment", lambda device: replace(capture(device), commit=commit))

    def measure(run: EvalInput) -> float:
        counted.append((run.variant, run.seed))
        return float(len(counted))

    request = request_experiment(measuring(measure, replace(TINY, learning_rates=())))
    at("a" * 40)
    results = run_experiment(request, tmp_path)
    assert len(counted) == 4
    (tmp_path / "recall.json").unlink()
    kept = tmp_path / "runs" / results.settings["variants"][0]["runs"]["1"]
    shutil.rmtree(kept / "run" / "model")
    at("b" * 40)
    results = run_experiment(request, tmp_path, resume=True)
    assert counted[4:] == [("diff", 0), ("softmax", 0), ("softmax", 1)]
    assert [one.value for one in results.records if one.name == "x" and (one.variant, one.seed) == ("diff", 1)] == [3.0]
    note = f"Measured by an earlier command, at commit {'a' * 12}: 1 of the runs."
    assert note in results.notes
    # Its numbers are the only ones, also for a command that keeps nothing else.
    results = run_experiment(request, tmp_path, overwrite=True)
    assert len(counted) == 10
    assert note in results.notes
    (tmp_path / "recall.json").unlink()
    assert note in run_experiment(request, tmp_path).notes

    path = kept / "measured" / "recall.json"
    measured = read_results(path)
    write_json(path, replace(measured, settings={**measured.settings, "options": '{"sequences": 9}'}))
    differs = r"its model .* is not there, and .*recall\.json. holds what recall measured of it with the options "
    differs += r'\{"sequences": 9\}, not \{"sequences": 8\}; ask for those options, or without .* trains it again'
    with pytest.raises(FileNotFoundError, match=differs):
        run_experiment(request, tmp_path, overwrite=True)
    shutil.rmtree(kept / "measured")
    lacks = r"diff with seed 1 was trained, but its model .* nor what recall measured of it, .* trains it again"
    for settings in ({"resume": True}, {"overwrite": True}):
        (tmp_path / "recall.json").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError, match=lacks):
            run_experiment(request, tmp_path, **settings)


def test_runs_that_another_machine_has_trained_are_told(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
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


@pytest.mark.all
def test_the_validation_curve_of_every_run_is_in_the_file(tmp_path: Path) -> None:
    """Of a run with two stages that of the first: the second validates on other data."""
    folder, results = tmp_path, {}
    every = replace(TINY, overrides=(*SIZES, "train.steps=4", "train.evaluate_every=1"), learning_rates=(1e-3,))
    for name, extension in (("one stage", ()), ("two", ("train.steps=1", "data.length=48"))):
        small = replace(SMALL, presets={"cpu": replace(every, extension=extension)})
        results[name] = run_experiment(request_experiment(small), folder, overwrite=True)
        curves = curves_of(results[name].records)
        assert [(one.variant, sorted(one.by_seed)) for one in curves] == [("diff", [0, 1]), ("softmax", [0, 1])]
        for curve, variant in zip(curves, results[name].settings["variants"], strict=True):
            assert variant["tokens_per_step"] == 2 * 32
            for seed in (0, 1):
                assert curve.by_seed[seed].steps == (1, 2, 3, 4)
                if not extension:
                    run = folder / "runs" / variant["runs"][str(seed)] / "run" / "metrics.jsonl"
                    logged = [line["validation/accuracy"] for line in read_metrics(run)]
                    assert list(curve.by_seed[seed].values) == logged
    one, two = (curves_of(file.records) for file in results.values())
    assert one == two
    (levels,) = (one for one in results["one stage"].baselines if one.name == ACCURACY_CURVE)
    assert levels.floor > levels.chance
    assert {row.steps for row in results["one stage"].comparisons} == {4}
    assert {row.quality for row in results["one stage"].comparisons} == {True}
    assert read_results(folder / "recall.json") == results["two"]
    document = build_results_report([folder / "recall.json"], complete=as_defined)
    assert "figures/recall-cpu-learning-accuracy.svg" in document.read_text(encoding="utf-8")


@pytest.mark.all
@pytest.mark.parametrize(("seeds", "told"), [(1, "seed 0"), (2, "one of the seeds 0 to 1")])
def test_a_rate_that_diverged_is_told_with_the_seeds_that_tried_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int, told: str
) -> None:
    train = run_store.train

    def train_or_diverge(recipe: Any, *arguments: Any, **settings: Any) -> Any:
        if recipe.train.learning_rate == 2e-3 and recipe.train.seed == seeds - 1:
            raise DivergenceError("The loss is not finite at step 2.")
        return train(recipe, *arguments, **settings)

    monkeypatch.setattr(run_store, "train", train_or_diverge)
    experiment = replace(SMALL, presets={"cpu": replace(TINY, seeds=seeds, sweep_seeds=2)})
    results = run_experiment(request_experiment(experiment), tmp_path)
    assert f"diff diverged at the learning rate 0.002 with {told}." in results.notes


def test_a_diverged_run_is_told_and_leaves_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = run_store.train

    def train_or_diverge(recipe: Any, *arguments: Any, **settings: Any) -> Any:
        at_fault = recipe.model.attention_type == "softmax" and (
            recipe.train.seed == 1 or recipe.train.learning_rate > 1e-3
        )
        if at_fault:
            raise DivergenceError("The loss is not finite at step 2.")
        return train(recipe, *arguments, **settings)

    monkeypatch.setattr(run_store, "train", train_or_diverge)
    results = run_experiment(request_experiment(SMALL), tmp_path)
    softmax = results.settings["variants"][1]
    assert softmax["learning_rate"] == 1e-3
    assert softmax["tried"]["0.002"] is None
    assert softmax["diverged"] == [1]
    assert "softmax diverged at the learning rate 0.002 with seed 0." in results.notes
    assert "softmax diverged with seed 1: The loss is not finite at step 2." in results.notes
    # Of the other variant it is known that it is at chance.
    answers = [c for c in results.comparisons if "attention" not in c.name]
    assert {c.verdict for c in answers} == {"not comparable"}
    assert {c.at_floor for c in answers} == {("diff",)}
    # Of attention no floor is known.
    assert {c.verdict for c in results.comparisons} == {"not comparable", "inconclusive"}
    assert all(math.isnan(c.difference) for c in results.comparisons)
    lost = [
        r for r in results.records if (r.variant, r.seed, r.name) == ("softmax", 1, "retrieval/first_query_accuracy")
    ]
    assert len(lost) == 1
    assert math.isnan(lost[0].value)
    # Its curve ends in a number that is missing, at the last step of the training.
    ends = {(c.variant, seed): c.by_seed[seed].final for c in curves_of(results.records) for seed in (0, 1)}
    assert [key for key, value in ends.items() if math.isnan(value)] == [("softmax", 1)]
    assert {c.steps for c in curves_of(results.records)} == {2}
    monkeypatch.setattr(run_store, "train", lambda *_, **__: pytest.fail("known to diverge"))
    run_experiment(request_experiment(SMALL), tmp_path, overwrite=True)


@pytest.mark.all
def test_sizes_and_a_stated_tolerance_allow_what_must_differ(tmp_path: Path) -> None:
    other = Variant(
        name="softmax",
        coordinates=Coordinates(part="longer"),
        overrides=("model.attention_type=softmax", "train.steps=1"),
    )
    preset = replace(
        TINY,
        variants=(replace(DIFF_AND_SOFTMAX[0], coordinates=Coordinates(part="short")), other),
        learning_rates=(),
        seeds=1,
    )
    nothing: Callable[[Sequence[Result], Preset], list[Any]] = lambda *_: []  # noqa: E731  # a name for its type
    run_experiment(request_experiment(replace(SMALL, presets={"cpu": preset}, compare=nothing)), tmp_path)
    near = Variant(name="softmax", overrides=("model.attention_type=softmax", "model.intermediate_size=17"))
    tolerant = replace(TINY, variants=(DIFF_AND_SOFTMAX[0], near), learning_rates=(), seeds=1, parameter_tolerance=0.02)
    run_experiment(
        request_experiment(replace(SMALL, name="near", presets={"cpu": tolerant}, compare=nothing)), tmp_path
    )


@pytest.mark.all
def test_the_users_text_is_what_is_trained_on(tmp_path: Path) -> None:
    text = tmp_path / "novels"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(
            f"Chapter {number}. It was a dark and stormy night. " * 20, encoding="utf-8"
        )
    preset = Preset(
        recipe="language",
        overrides=(*SIZES[:4], "data.length=16", "data.batch_size=2", "train.steps=1", "train.warmup_steps=0"),
        variants=DIFF_AND_SOFTMAX,
    )

    def measure(run: EvalInput) -> float:
        assert trained_by(run).data.paths == [str(text)]
        assert run.batches is not None
        read = run.tokenizer.decode(run.batches.train_batch(1)["input_ids"][0])
        pieces = read.split(run.tokenizer.eos_token)  # a block may hold the end of one document and the next
        assert all(any(piece in file.read_text(encoding="utf-8") for file in text.iterdir()) for piece in pieces)
        assert run.training is not None
        return float(run.training.metrics[-1]["validation/loss"])

    experiment = measuring(measure, preset)
    results = run_experiment(request_experiment(experiment, text=[text]), tmp_path / "out")
    assert results.settings["request"]["text"] == [str(text)]
    assert results.settings["variants"][0]["tried"] == {}


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
        compare=compared_by(ComparisonRule(name="ratio")),
    )
    results = run_experiment(request_experiment(experiment), tmp_path)
    assert results.settings["variants"] == []
    assert results.comparisons[0].verdict == "inconclusive"
