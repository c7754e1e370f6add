"""An experiment end to end, at a size of seconds: trained alike, shared, resumed, compared, written down."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diff_transformer.experiments import runs, store
from diff_transformer.experiments.asked import Asked, ask
from diff_transformer.experiments.fairness import count
from diff_transformer.experiments.framework import (
    ACCURACY,
    LOSS,
    TWINS,
    Arm,
    Experiment,
    MeasuredRun,
    Preset,
    Situation,
)
from diff_transformer.experiments.paper import check_paper
from diff_transformer.experiments.progress import Trainings
from diff_transformer.experiments.recall import RECALL
from diff_transformer.experiments.registry import EXPERIMENTS, find_experiment
from diff_transformer.experiments.runs import run_experiment
from diff_transformer.experiments.sweep import choose_rate
from diff_transformer.results import Result, ResultsFile, compare, read_results
from diff_transformer.train import DivergenceError, TrainingInterrupted, load_recipe
from diff_transformer.train.progress import Silent

SIZES = (
    "model.hidden_size=16",
    "model.intermediate_size=16",
    "model.head_dim=8",
    "model.num_hidden_layers=1",
    "data.length=32",
    "data.num_pairs=2",
    "data.batch_size=2",
    "data.validation_sequences=4",
    "train.steps=2",
    "train.warmup_steps=0",
    "train.inspect_every=null",
)
TINY = Preset(
    recipe="retrieval",
    overrides=SIZES,
    arms=TWINS,
    learning_rates=(1e-3, 2e-3),
    seeds=2,
    options={"sequences": 8},
    minutes=0.1,
)
SMALL = replace(RECALL, presets={"cpu": TINY})


class Heard(Silent):
    """A progress that remembers."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.told: list[str] = []

    def start(self, total: int, description: str) -> None:
        self.runs.append(description)

    def tell(self, message: str) -> None:
        self.told.append(message)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ResultsFile, Heard]:
    folder, heard = tmp_path_factory.mktemp("reproduced"), Heard()
    return folder, run_experiment(ask(SMALL), folder, progress=heard), heard


def trainings(folder: Path, asked: Asked, **settings: Any) -> tuple[list[str], ResultsFile]:
    """Which runs are trained, as the progress hears of them, and the results."""
    heard = Heard()
    return heard.runs, run_experiment(asked, folder, progress=heard, **settings)


def test_everything_is_in_the_file(done: tuple[Path, ResultsFile, Heard]) -> None:
    folder, results, heard = done
    assert read_results(folder / "recall.json").records == results.records
    accuracy = {(r.arm, r.seed) for r in results.records if r.name == "retrieval/first_query_accuracy"}
    assert accuracy == {(arm, seed) for arm in ("diff", "softmax") for seed in (0, 1)}
    assert [(c.arm, c.against, len(c.differences)) for c in results.comparisons] == [("diff", "softmax", 2)] * 2
    assert results.settings["asked"]["seeds"] == 2
    assert results.notes[0] == RECALL.notes[0]
    arms = {arm["name"]: arm for arm in results.settings["arms"]}
    assert set(arms["diff"]["tried"]) == {"0.001", "0.002"}
    assert arms["diff"]["learning_rate"] in (1e-3, 2e-3)
    assert arms["diff"]["parameters"] - arms["softmax"]["parameters"] == 6 * 8
    assert arms["diff"]["shared_parameters"] == arms["softmax"]["shared_parameters"]
    assert any(message.startswith("diff: ") and "without λ and norms" in message for message in heard.told)
    # Two trials of each arm, of which one is its first seed's run, and the second seed's.
    assert len(heard.runs) == 6
    assert heard.runs[0].startswith("diff · trying the learning rate 0.001 · run 1 of 8")
    assert heard.runs[-1].startswith("softmax · seed 1 · learning rate ")


def test_both_arms_see_the_same_batches_in_the_same_order(done: tuple[Path, ResultsFile, Heard]) -> None:
    folder, results, _ = done
    recipes = {}
    for arm in results.settings["arms"]:
        recipes[arm["name"]] = load_recipe(folder / "runs" / arm["runs"]["1"] / "run" / "recipe.yaml")
    assert recipes["diff"].data == recipes["softmax"].data
    assert recipes["diff"].train.seed == recipes["softmax"].train.seed == 1
    assert recipes["diff"].model.attention_type == "diff"


def test_a_trained_run_is_what_its_recipe_trains_alone(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
    """Not only the right name: the weights are those of `train` with the run's own recipe."""
    from safetensors.torch import load_file

    from diff_transformer.train import train

    folder, results, _ = done
    run = folder / "runs" / results.settings["arms"][0]["runs"]["1"] / "run"
    again = train(load_recipe(run / "recipe.yaml"), tmp_path / "alone")
    found = load_file(run / "model" / "model.safetensors")
    for name, weight in load_file(again.model_folder / "model.safetensors").items():
        assert torch.equal(weight, found[name]), name
    assert not (run / "checkpoints").exists()


def test_another_experiment_finds_the_runs(done: tuple[Path, ResultsFile, Heard]) -> None:
    folder, results, _ = done
    other = replace(SMALL, name="other")
    trained, found = trainings(folder, ask(other))
    assert trained == []
    assert [r for r in found.records if r.name == "retrieval/accuracy"] == [
        r for r in results.records if r.name == "retrieval/accuracy"
    ]
    trained, found = trainings(folder, ask(replace(SMALL, name="more"), seeds=3))
    assert [run.split(" · ")[:2] for run in trained] == [["diff", "seed 2"], ["softmax", "seed 2"]]
    longer = replace(TINY, overrides=(*SIZES, "data.num_pairs=3"), learning_rates=(1e-3,), seeds=1)
    trained, _ = trainings(folder, ask(replace(SMALL, name="pairs", presets={"cpu": longer})))
    assert len(trained) == 2, "other data are other runs"


def test_results_are_kept_refused_or_replaced(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
    folder, results, _ = done
    with pytest.raises(FileExistsError, match=r"There are results in .*recall\.json. already"):
        run_experiment(ask(SMALL), folder)
    with pytest.raises(ValueError, match="not both"):
        run_experiment(ask(SMALL), folder, resume=True, overwrite=True)
    written = (folder / "recall.json").read_bytes()
    assert run_experiment(ask(SMALL), folder, resume=True).created == results.created
    assert (folder / "recall.json").read_bytes() == written
    trained, replaced = trainings(folder, ask(SMALL, options={"sequences": 16}), overwrite=True)
    assert trained == []
    assert {r.n for r in replaced.records if r.name == "retrieval/first_query_accuracy"} == {16}
    trained, back = trainings(folder, ask(SMALL), resume=True)
    assert trained == []
    assert back.comparisons == results.comparisons, "results of another question are not kept"


class Stop(Silent):
    """A user who presses Ctrl-C after so many steps."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        import signal

        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_experiment_goes_on(done: tuple[Path, ResultsFile, Heard], tmp_path: Path) -> None:
    _, whole, _ = done
    with pytest.raises(TrainingInterrupted, match="--resume"):
        run_experiment(ask(SMALL), tmp_path, progress=Stop(11))  # within the last run
    assert not (tmp_path / "recall.json").exists()
    halves = [place for place in (tmp_path / "runs").iterdir() if not (place / "trained.json").exists()]
    assert len(halves) == 1
    assert list(halves[0].glob("run/checkpoints/step-*"))
    trained, results = trainings(tmp_path, ask(SMALL), resume=True)
    assert len(trained) == 1
    assert results.comparisons == whole.comparisons


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    counted = []

    def measure(run: MeasuredRun, preset: Preset) -> list[Result]:
        counted.append((run.arm.name, run.seed))
        if len(counted) == 4 and len(set(counted)) == 4:
            raise KeyboardInterrupt
        return [Result(name="x", arm=run.arm.name, value=float(run.seed), seed=run.seed, better="lower")]

    preset = replace(TINY, learning_rates=())
    experiment = replace(
        SMALL,
        measure=measure,
        presets={"cpu": preset},
        compare=lambda records, _: [compare(records, "x", "diff", "softmax")],
    )
    with pytest.raises(KeyboardInterrupt):
        run_experiment(ask(experiment), tmp_path)
    results = run_experiment(ask(experiment), tmp_path, resume=True)
    assert counted == [("diff", 0), ("softmax", 0), ("diff", 1), ("softmax", 1), ("softmax", 1)]
    assert results.comparisons[0].differences == (0.0, 0.0)


def test_a_second_stage_begins_with_the_model_of_the_first(tmp_path: Path) -> None:
    preset = replace(
        TINY, learning_rates=(), seeds=1, extension=("data.length=40", "train.steps=1", "model.rope_theta=20000")
    )
    lengths = {}

    def measure(run: MeasuredRun, preset: Preset) -> list[Result]:
        lengths[run.arm.name] = (run.recipe.data.length, run.model.config.max_position_embeddings)
        assert run.recipe.model.start_from is not None
        first = load_recipe(Path(run.recipe.model.start_from).parent / "recipe.yaml")
        assert first.model.attention_type == run.recipe.model.attention_type
        assert first.data.length == 32
        return [Result(name="x", arm=run.arm.name, value=1.0, seed=run.seed, better="lower")]

    experiment = replace(
        SMALL,
        measure=measure,
        presets={"cpu": preset},
        compare=lambda records, _: [compare(records, "x", "diff", "softmax")],
    )
    trained, _ = trainings(tmp_path, ask(experiment))
    assert ["extension" in run for run in trained] == [False, True, False, True]
    assert lengths == {"diff": (40, 40), "softmax": (40, 40)}
    trained, _ = trainings(tmp_path, ask(experiment), overwrite=True)
    assert trained == []


def test_a_diverged_run_is_told_and_leaves_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = store.train

    def train_or_diverge(recipe: Any, *arguments: Any, **settings: Any) -> Any:
        at_fault = recipe.model.attention_type == "softmax" and (
            recipe.train.seed == 1 or recipe.train.learning_rate > 1e-3
        )
        if at_fault:
            raise DivergenceError("The loss is not finite at step 2.")
        return train(recipe, *arguments, **settings)

    monkeypatch.setattr(store, "train", train_or_diverge)
    results = run_experiment(ask(SMALL), tmp_path)
    softmax = results.settings["arms"][1]
    assert softmax["learning_rate"] == 1e-3
    assert softmax["tried"]["0.002"] is None
    assert softmax["diverged"] == [1]
    assert "softmax diverged at the learning rate 0.002 with seed 0." in results.notes
    assert "softmax diverged with seed 1: The loss is not finite at step 2." in results.notes
    assert {c.verdict for c in results.comparisons} == {"inconclusive"}
    assert all(math.isnan(c.difference) for c in results.comparisons)
    lost = [r for r in results.records if (r.arm, r.seed, r.name) == ("softmax", 1, "retrieval/first_query_accuracy")]
    assert len(lost) == 1
    assert math.isnan(lost[0].value)
    monkeypatch.setattr(store, "train", lambda *_, **__: pytest.fail("known to diverge"))
    run_experiment(ask(SMALL), tmp_path, overwrite=True)


@pytest.mark.parametrize(
    ("tried", "better", "rate", "remarks"),
    [
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: 2.5}, "lower", 3e-3, []),
        ({1e-3: 0.3, 3e-3: 0.2, 1e-2: 0.5}, "higher", 1e-2, ["0.01, was the largest tried (0.001, 0.003, 0.01)"]),
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: 2.5}, "lower", 1e-3, ["0.001, was the smallest tried"]),
        (
            {1e-3: 3.0, 3e-3: 2.0, 1e-2: 2.0, 3e-2: 4.0},
            "lower",
            3e-3,
            ["0.003, 0.01 validated equally well; the lowest"],
        ),
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: math.nan}, "lower", 3e-3, []),
        ({1e-3: math.nan, 3e-3: math.nan}, "lower", 1e-3, ["diverged at every learning rate"]),
        ({2e-3: 1.0}, "higher", 2e-3, []),
    ],
)
def test_the_choice_of_a_learning_rate(tried: dict[float, float], better: str, rate: float, remarks: list[str]) -> None:
    validation = LOSS if better == "lower" else ACCURACY
    found, said = choose_rate(tried, validation)
    assert found == rate
    assert len(said) == len(remarks)
    for sentence, part in zip(said, remarks, strict=True):
        assert part in sentence


def twins_with(*overrides: str) -> Asked:
    other = Arm(name="other", overrides=overrides)
    return ask(replace(SMALL, presets={"cpu": replace(TINY, arms=(TWINS[0], other))}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.attention_type=softmax", "train.steps=3"),
            r"'diff' and 'other' are not trained alike: train.steps \(2, 3\)",
        ),
        (("model.attention_type=softmax", "data.num_pairs=3"), r"not trained alike: data.num_pairs \(2, 3\)"),
        (
            ("model.attention_type=softmax", "model.intermediate_size=24"),
            "not of equal size: without λ and norms they have",
        ),
        (("model.attention_type=diff_v2",), "not of equal size"),
    ],
)
def test_arms_that_do_not_get_the_same_are_refused_before_anything_is_trained(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment(twins_with(*overrides), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_groups_and_a_stated_tolerance_allow_what_must_differ(tmp_path: Path) -> None:
    other = Arm(name="softmax", group="longer", overrides=("model.attention_type=softmax", "train.steps=1"))
    preset = replace(TINY, arms=(replace(TWINS[0], group="short"), other), learning_rates=(), seeds=1)
    nothing: Callable[[Sequence[Result], Preset], list[Any]] = lambda *_: []  # noqa: E731  # a name for its type
    run_experiment(ask(replace(SMALL, presets={"cpu": preset}, compare=nothing)), tmp_path)
    near = Arm(name="softmax", overrides=("model.attention_type=softmax", "model.intermediate_size=17"))
    tolerant = replace(TINY, arms=(TWINS[0], near), learning_rates=(), seeds=1, parameter_tolerance=0.02)
    run_experiment(ask(replace(SMALL, name="near", presets={"cpu": tolerant}, compare=nothing)), tmp_path)


def test_an_experiment_that_trains_nothing(tmp_path: Path) -> None:
    def once(situation: Situation, preset: Preset) -> list[Result]:
        assert situation.folder.is_dir()
        ratios = [Result(name="ratio", arm=arm, value=1.0, seed=0, better="higher") for arm in ("diff", "softmax")]
        return ratios * 1

    experiment = Experiment(
        name="once",
        shows="a ratio",
        presets={"cpu": Preset(seeds=1, minutes=1)},
        measure_once=once,
        compare=lambda records, _: [compare(records, "ratio", "diff", "softmax")],
        uses_text=False,
    )
    results = run_experiment(ask(experiment), tmp_path)
    assert results.settings["arms"] == []
    assert results.comparisons[0].verdict == "inconclusive"


def test_what_is_asked_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'recall' has no preset 'gpu'; it has cpu"):
        ask(SMALL, "gpu")
    both = replace(SMALL, presets={"cpu": TINY, "gpu": TINY, "paper": TINY})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="planned for one H200, and this machine has no GPU; --preset cpu takes about"):
        ask(both, "gpu")
    with pytest.raises(ValueError, match="it is checked, and not run"):
        ask(both, "paper")
    with pytest.raises(ValueError, match="1 or more, got 0"):
        ask(SMALL, seeds=0)
    with pytest.raises(ValueError, match="--text does not go with 'recall'"):
        ask(SMALL, text=[tmp_path])
    with pytest.raises(ValueError, match="no option 'sequence'; did you mean 'sequences'"):
        ask(SMALL, options={"sequence": 3})
    with pytest.raises(FileNotFoundError, match="nowhere' does not exist"):
        ask(replace(SMALL, uses_text=True), text=[tmp_path / "nowhere"])
    asked = ask(replace(SMALL, uses_text=True), text=[tmp_path], seeds=4)
    assert asked.preset.overrides[-1] == f"data.paths={json.dumps([str(tmp_path)])}"
    assert asked.preset.seeds == 4


def test_the_papers_size_is_counted_and_told() -> None:
    preset = Preset(recipe="paper-1.4b", arms=TWINS, gpus=64)
    found = check_paper(replace(SMALL, presets={"paper": preset}))
    assert [arm.counts.shared for arm in found] == [found[0].counts.shared] * 2
    assert 1.3e9 < found[0].counts.total < 1.5e9
    assert found[0].counts.total - found[1].counts.total == 24 * 6 * 128
    assert found[1].command == (
        "torchrun --nproc-per-node 64 -m diff_transformer.train paper-1.4b model.attention_type=softmax "
        "--output runs/recall-softmax"
    )


def test_every_experiment_of_the_register_is_whole() -> None:
    for name in EXPERIMENTS:
        experiment = find_experiment(name)
        assert experiment.name == name
        assert experiment.shows
        for preset in experiment.presets.values():
            for arm in preset.arms:
                preset.arm_recipe(arm, *preset.sweep)
    with pytest.raises(ValueError, match="There is no experiment 'recal'; did you mean 'recall'"):
        find_experiment("recal")


def test_lambdas_and_norms_of_every_kind_are_left_out_of_the_count() -> None:
    from diff_transformer.train import build_config

    def shared(*overrides: str) -> int:
        return count(build_config(load_recipe("retrieval", [*SIZES, *overrides]), 64)).shared

    assert shared() == shared("model.attention_type=softmax") == shared("model.headwise_norm=false")


def test_time_left_is_guessed_from_what_was_done() -> None:
    now = [0.0]
    heard = Heard()
    counted = Trainings(heard, [1.0, 1.0, 0.0, 2.0], clock=lambda: now[0])
    for title, found, seconds in (("a", False, 120.0), ("b", True, 0.0), ("c", False, 0.0), ("d", False, 0.0)):
        counted.next(title, found=found)
        if not found:
            counted.start(3, "recipe")
        now[0] += seconds
    assert heard.runs == ["a · run 1 of 4", "c · run 3 of 4 · 4 min left", "d · run 4 of 4 · 4 min left"]
    for _ in range(2):
        counted.tell("1 process (cpu), float32")
    assert heard.told == ["1 process (cpu), float32"]


def test_two_commands_do_not_train_one_run_at_a_time(tmp_path: Path) -> None:
    from filelock import FileLock

    recipe = TINY.arm_recipe(TWINS[0])
    data = SMALL.build_data(recipe)
    key = store.run_key(recipe, data.batches)
    place = tmp_path / "runs" / key
    place.mkdir(parents=True)
    with FileLock(place / ".lock"), pytest.raises(ValueError, match=f"Another command is training the run in .*{key}"):
        store.Store(tmp_path / "runs").train(key, recipe, data, SMALL.on_evaluate(data.batches))


def test_a_run_is_known_by_all_that_made_it() -> None:
    recipe = TINY.arm_recipe(TWINS[0])
    batches = SMALL.build_data(recipe).batches
    key = store.run_key(recipe, batches)
    assert key == store.run_key(TINY.arm_recipe(TWINS[0]), batches)
    others = [
        TINY.arm_recipe(TWINS[0], change) for change in ("train.steps=3", "model.rope_theta=9.0", "train.eps=1e-9")
    ]
    keys = {key, store.run_key(recipe, batches, before="0"), *(store.run_key(other, batches) for other in others)}
    reseeded = TINY.arm_recipe(TWINS[0], "train.seed=1")
    keys.add(store.run_key(recipe, SMALL.build_data(reseeded).batches))
    assert len(keys) == 6
    assert runs.RUNS == "runs"
