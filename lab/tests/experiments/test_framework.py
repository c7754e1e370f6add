"""What is checked before anything is trained, and the parts that need no training."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diff_lab.experiments import run_store
from diff_lab.experiments.definitions import EXPERIMENTS, find_experiment
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Variant, check_alike, count
from diff_lab.experiments.request import ExperimentRequest, request_experiment
from diff_lab.experiments.runner import run_experiment
from diff_lab.experiments.variant_training import choose_rate, next_rate
from diff_lab.measure.standard import validation_callback
from diff_lab.record import Better
from diff_lab.train import build_config, build_data, load_recipe
from diff_lab.train.recipe import dump_recipe
from diff_transformer.attention_types import head_dim
from full_run import short_run
from rehearsal import request_anywhere
from small_experiment import SIZES, SMALL, TINY
from small_runs import Watcher


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
    ],
)
def test_the_choice_of_a_learning_rate(
    tried: dict[float, float], better: Better, rate: float, remarks: list[str]
) -> None:
    best, sentences = choose_rate(tried, better)
    assert best == rate
    assert len(sentences) == len(remarks)
    for sentence, part in zip(sentences, remarks, strict=True):
        assert part in sentence


@pytest.mark.parametrize(
    ("tried", "better", "further"),
    [
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: 2.5}, "lower", None),
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: 2.5}, "lower", 3.3e-4),
        ({5e-3: 3.0, 1.25e-2: 2.0, 3e-2: 1.5}, "lower", 7.2e-2),
        ({1e-3: 0.5, 3e-3: 0.5, 1e-2: 0.2}, "higher", None),  # as good inside
        ({1e-3: 3.0, 3e-3: 2.0, 1e-2: math.nan}, "lower", None),  # nothing to gain where it diverges
        ({1e-3: 3.0, 3e-3: math.nan}, "lower", 3.3e-4),
        ({1e-3: math.nan, 3e-3: math.nan}, "lower", None),
        ({1e-3: 3.0}, "lower", None),
        ({1e-3: 2.0, 1.02e-3: 1.0}, "lower", None),  # 0.00104 is 0.001 in two digits
    ],
)
def test_the_rate_that_is_tried_next(tried: dict[float, float], better: Better, further: float | None) -> None:
    assert next_rate(tried, better) == further


def experiment_with(*overrides: str) -> ExperimentRequest:
    other = Variant(name="other", overrides=overrides)
    return request_experiment(replace(SMALL, presets={"cpu": replace(TINY, variants=(DIFF_AND_SOFTMAX[0], other))}))


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
def test_variants_that_do_not_get_the_same_are_refused_before_anything_is_trained(
    overrides: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment(experiment_with(*overrides), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_is_asked_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'recall' has no preset 'gpu'; it has cpu"):
        request_experiment(SMALL, "gpu")
    both = replace(SMALL, presets={"cpu": TINY, "gpu": TINY})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ValueError, match="planned for one H200, and this machine has no GPU; --preset cpu takes about"):
        request_experiment(both, "gpu")
    with pytest.raises(ValueError, match="1 or more, got 0"):
        request_experiment(SMALL, seeds=0)
    with pytest.raises(ValueError, match="--text does not go with 'recall'"):
        request_experiment(SMALL, text=[tmp_path])
    with pytest.raises(ValueError, match="no option 'sequence'; did you mean 'sequences'"):
        request_experiment(SMALL, options={"sequence": 3})
    on_text = replace(SMALL, presets={"cpu": replace(TINY, recipe="language", overrides=())})
    with pytest.raises(FileNotFoundError, match=r"There is no text file or folder '.*nowhere'"):
        request_experiment(on_text, text=[tmp_path / "nowhere"])
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    request = request_experiment(on_text, text=[tmp_path / "*.txt"], seeds=4)
    assert request.preset.overrides[-1] == f"data.paths={json.dumps([str(tmp_path / '*.txt')])}"
    assert request.preset.seeds == 4


@pytest.mark.parametrize("name", short_run(EXPERIMENTS, ["table5", "noise", "appendix_c"]))
def test_every_experiment_of_the_register_is_complete(name: str) -> None:
    """At every size its recipes are valid and its variants alike."""
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.shows
    # What it logs has a name where it is not the usual: the keys of its runs hold it.
    assert bool(experiment.logs) != (experiment.on_evaluate is validation_callback)
    assert {"cpu", "gpu"} <= experiment.presets.keys() <= {"cpu", "evening", "night", "gpu"}
    assert any("No verdict" in note for note in experiment.notes) == (name in {"table1", "table4", "table8"})
    minutes = [experiment.presets[size].minutes or math.inf for size in ("cpu", "gpu")]
    # Five variants or 20,000 steps, and eight seeds.
    assert minutes[0] <= {"noise": 210, "fig6": 240, "fig7": 240, "low_bit": 240}.get(name, 65)
    assert minutes[1] <= {"language": 45}.get(name, 30)
    for preset in experiment.presets.values():
        recipes = {variant: preset.variant_recipe(variant, *preset.sweep) for variant in preset.variants}
        counts = {
            variant: count(build_config(recipe, recipe.model.vocab_size or recipe.data.vocabulary()))
            for variant, recipe in recipes.items()
        }
        check_alike(recipes, counts, preset)
        for variant in preset.variants:
            preset.variant_recipe(variant, *preset.extension)


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_users_text_reaches_every_variant_that_is_trained_on_text_and_no_other(
    name: str, preset: str, tmp_path: Path
) -> None:
    """By the recipe of the very preset."""
    experiment = find_experiment(name)
    variants = experiment.presets[preset].variants
    kinds = {experiment.presets[preset].variant_recipe(variant).data.kind for variant in variants}
    if "text" not in kinds:
        with pytest.raises(ValueError, match=f"--text does not go with '{name}' at --preset {preset}, which uses no"):
            request_anywhere(experiment, preset, [tmp_path])
        return
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    request = request_anywhere(experiment, preset, [tmp_path]).preset
    for variant in variants:
        for more in ((), request.sweep, request.extension):
            assert request.variant_recipe(variant, *more).data.paths == [str(tmp_path)]


def test_lambdas_and_norms_of_every_kind_are_left_out_of_the_count() -> None:
    def shared(*overrides: str) -> int:
        return count(build_config(load_recipe("retrieval", [*SIZES, *overrides]), 64)).shared

    assert shared() == shared("model.attention_type=softmax") == shared("model.headwise_norm=false")


def test_two_commands_do_not_train_one_run_at_a_time(tmp_path: Path) -> None:
    from filelock import FileLock

    recipe = TINY.variant_recipe(DIFF_AND_SOFTMAX[0])
    data = build_data(recipe)
    key = run_store.run_key(recipe, data.batches)
    folder = tmp_path / "runs" / key
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"), pytest.raises(ValueError, match=f"Another command is training the run in .*{key}"):
        run_store.Store(tmp_path / "runs").train(key, recipe, SMALL.on_evaluate, None, data, Watcher())


def test_a_run_is_known_by_all_that_made_it(tmp_path: Path) -> None:
    recipe = TINY.variant_recipe(DIFF_AND_SOFTMAX[0])
    batches = build_data(recipe).batches
    key = run_store.run_key(recipe, batches)
    assert key == run_store.run_key(TINY.variant_recipe(DIFF_AND_SOFTMAX[0]), batches)
    others = [
        TINY.variant_recipe(DIFF_AND_SOFTMAX[0], change)
        for change in ("train.steps=3", "model.rope_theta=9.0", "train.eps=1e-9", "model.headwise_norm=false")
    ]
    keys = {
        key,
        run_store.run_key(recipe, batches, before="0"),
        *(run_store.run_key(other, batches) for other in others),
    }
    reseeded = TINY.variant_recipe(DIFF_AND_SOFTMAX[0], "train.seed=1")
    keys.add(run_store.run_key(recipe, build_data(reseeded).batches))
    keys.add(run_store.run_key(recipe, batches, logs="other"))
    assert len(keys) == 8
    assert SMALL.logs == ""
    # So runs are found again by later versions.
    arithmetic = load_recipe("arithmetic")
    sums = build_data(arithmetic).batches
    assert run_store.run_key(arithmetic, sums) == "33381255668c9a70"
    (tmp_path / "dumped.yaml").write_text(dump_recipe(arithmetic))
    assert run_store.run_key(load_recipe(tmp_path / "dumped.yaml"), sums) == run_store.run_key(arithmetic, sums)
    assert find_experiment("appendix_g").logs == "gradients"


def test_a_run_is_known_wherever_its_text_lies_and_however_it_is_kept(tmp_path: Path) -> None:
    keys = set()
    for name, more in (("here", ()), ("there", ("train.keep_checkpoints=5", "train.timeout_minutes=9"))):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.txt").write_text(f"document {number} " * 400)
        recipe = load_recipe(
            "tiny", [f"data.paths={tmp_path / name}", f"data.cache={tmp_path / name / 'cache'}", *more]
        )
        keys.add(run_store.run_key(recipe, build_data(recipe).batches))
    assert len(keys) == 1
    (tmp_path / "there" / "0.txt").write_text("another document " * 400)
    keys.add(run_store.run_key(recipe, build_data(recipe).batches))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("overrides", "heads"),
    [
        (("model.attention_type=diff",), (12, 128, True)),
        (("model.attention_type=softmax",), (24, 128, False)),
        (("model.attention_type=diff_v2",), (24, 128, True)),
        (("model.attention_type=softmax", "model.num_attention_heads=12", "model.head_dim=256"), (12, 256, False)),
        (("model.attention_type=diff", "model.num_key_value_heads=4"), (12, 128, True)),
    ],
)
def test_heads_of_the_3b_model(overrides: tuple[str, ...], heads: tuple[int, int, bool]) -> None:
    config = build_config(load_recipe("paper-3b", overrides), vocab_size=1)
    assert (config.spec.heads(config), head_dim(config), config.spec.differential) == heads
