"""The paper's own size: what is printed can be started, holds its memory, and measures what there is."""

import functools
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from diff_lab.cli.app import app
from diff_lab.cli.eval_command import read_measurements
from diff_lab.coordinates import Coordinates
from diff_lab.experiments import experiment
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, EXPERIMENTS, PAPER, Variant, find_experiment
from diff_lab.experiments.paper_preset import (
    Evaluation,
    PaperPreset,
    PaperVariant,
    Stage,
    check_paper,
    experiments_by_run,
    paper_preset,
)
from diff_lab.measure.harness import TABLE_1_MEASURES, task_names
from diff_lab.train import Recipe, build_config, load_recipe, plan
from diff_lab.train.plan import Plan, meta_model, vocabulary
from diff_lab.train.run_setup import check_init_from
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from full_run import short_run
from small_experiment import SMALL

NAMES = [name for name in EXPERIMENTS if PAPER in find_experiment(name).presets]
# One of two stages, and the one whose commands are of a benchmark.
each = pytest.mark.parametrize("name", short_run(NAMES, ["table2", "table7"]))


@pytest.fixture(scope="module", autouse=True)
def _each_model_once() -> Iterator[None]:
    """Most of a plan's time goes into a model on the meta device, which it only counts; many plans are of the same."""
    models: dict[str, DiffTransformerForCausalLM] = {}

    def make_once(config: DiffTransformerConfig) -> DiffTransformerForCausalLM:
        key = config.to_json_string(use_diff=False)
        if key not in models:
            models[key] = meta_model(config)
        return models[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "meta_model", make_once)
        patch.setattr(plan, "meta_model", make_once)
        yield


@functools.cache
def checked(name: str) -> list[PaperVariant]:
    return check_paper(find_experiment(name))


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The subcommand of `diff-lab` and what the command line makes of its arguments."""
    program, name, *arguments = shlex.split(command)
    assert program == "diff-lab"
    subcommand = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]  # it is a group
    return name, subcommand.make_context(name, arguments).params


def launched(command: str) -> tuple[int, dict[str, Any]]:
    """The GPUs that torchrun takes on all machines, and the arguments of `train`."""
    launcher, training = command.split(" -m diff_lab.train ")
    words = launcher.split()
    assert words[0] == "torchrun"
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    assert (nodes > 1) == ("--rdzv-endpoint" in words)
    return nodes * int(words[words.index("--nproc-per-node") + 1]), parsed(f"diff-lab train {training}")[1]


@functools.cache
def planned(recipe: str, gpus: int) -> Plan:
    """The plan on H200s of a recipe in JSON: many experiments name the same one."""
    return Plan(Recipe.model_validate_json(recipe), "h200", gpus)


@each
def test_every_training_fits_the_gpus_that_its_command_names(name: str) -> None:
    preset = paper_preset(find_experiment(name))
    assert len(checked(name)) == len(preset.variants)
    for variant in checked(name):
        assert len(variant.trainings) == len(preset.stages)
        for training in variant.trainings:
            gpus, arguments = launched(training.command)
            recipe = load_recipe(arguments["recipe"], arguments["settings"])
            assert recipe == training.recipe
            assert arguments["output"] == Path(training.folder)
            assert not arguments["overwrite"]
            command_plan, checkpointing = planned(recipe.model_dump_json(), gpus), recipe.train.gradient_checkpointing
            assert command_plan.device_memory is not None
            assert command_plan.ways[checkpointing].memory.total <= command_plan.device_memory
            assert gpus == 8 or not planned(recipe.model_dump_json(), gpus // 2).ways[checkpointing].fits


@each
def test_every_stage_can_start_from_the_one_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variant in checked(name):
        assert variant.trainings[0].recipe.model.init_from is None
        for before, after in zip(variant.trainings, variant.trainings[1:], strict=False):
            assert after.recipe.model.init_from == f"{before.folder}/model"
            folder = Path(before.folder) / "model"
            config = build_config(before.recipe, vocabulary(before.recipe))
            config.save_pretrained(folder)
            (folder / "model.safetensors").touch()
            check_init_from(after.recipe)  # as `train` does, which reads no weights by then
            assert config.vocab_size == vocabulary(after.recipe)
            assert before.recipe.data.model_dump()["tokenizer"] == after.recipe.data.model_dump()["tokenizer"]


@each
def test_every_measuring_command_can_be_read(name: str) -> None:
    preset = paper_preset(find_experiment(name))
    for variant in checked(name):
        assert variant.evaluations
        for command, meant in zip(variant.evaluations, preset.evaluations, strict=True):
            called, arguments = parsed(command)
            assert called == "eval"
            assert arguments["checkpoint"] == Path(variant.trainings[-1].folder)
            assert list(arguments["text"] or ()) == ([Path(meant.text)] if meant.text else [])
            assert arguments["num_fewshot"] == (meant.options["examples"] if meant.name == "harness" else None)
            if meant.name == "harness":
                assert task_names(arguments["tasks"]) == list(TABLE_1_MEASURES)
                continue
            assert list(arguments["measure"]) == [meant.name]
            assert read_measurements([meant.name], list(arguments["option"] or ())) == {meant.name: meant.resolve()}
    assert bool(checked(name)) != bool(preset.commands)
    for command in preset.commands:
        called, arguments = parsed(command)
        assert (called, arguments["benchmark"], arguments["device"]) == ("bench", "model", "cuda")
        values = [list(arguments[option]) for option in ("length", "pass_", "candidate")]
        assert values == [[2048, 4096], ["forward", "step"], ["diff"]]


@pytest.mark.all
def test_a_run_that_several_need_is_one_folder_and_one_command() -> None:
    commands: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for training in (training for name in NAMES for variant in checked(name) for training in variant.trainings):
        commands.setdefault(training.folder, set()).add(training.command)
        recipe = training.recipe
        trained = repr((build_config(recipe, vocabulary(recipe)).to_dict(), recipe.data, recipe.train, recipe.model))
        folders.setdefault(trained, set()).add(training.folder)
    assert all(len(names) == 1 for names in (*commands.values(), *folders.values()))
    assert len(commands) == len(folders)
    needed = experiments_by_run()
    assert needed.keys() == commands.keys()
    three_billion = ["fig3", "fig4", "table2", "fig5", "table3", "fig6", "fig7", "table4", "table5", "fig8", "table8"]
    for variant in ("diff", "softmax"):
        assert needed[f"runs/paper-3b-{variant}"] == [*three_billion, "appendix_c", "appendix_g"]
        assert needed[f"runs/paper-3b-64k-{variant}"] == ["fig4", "fig5", "fig6", "fig7"]
        assert needed[f"runs/paper-1.4b-{variant}"] == ["fig3", "table6", "v2"]
        assert needed[f"runs/paper-830m-{variant}"] == ["fig3", "lr_sensitivity"]


def test_the_papers_training_and_its_own_settings() -> None:
    tokens = {
        training.folder: training.plan.steps * training.plan.tokens_per_step
        for name in NAMES
        for variant in checked(name)
        for training in variant.trainings
    }
    assert tokens["runs/paper-3b-1t-diff"] == pytest.approx(1e12, rel=1e-5)
    assert tokens["runs/paper-3b-diff"] == pytest.approx(350e9, rel=1e-5)
    assert tokens["runs/paper-3b-64k-softmax"] == pytest.approx(1.5e9, rel=2e-3)
    assert tokens["runs/paper-3b-mathematics-softmax"] == pytest.approx(20e9, rel=1e-3)
    (variant,) = checked("table1")  # the paper trained no Transformer on as many tokens
    assert variant.heads == (12, 128, True)
    assert [command.split("eval runs/paper-3b-64k-diff ")[1] for command in checked("fig5")[0].evaluations] == [
        f"--measure needles --option needles=8 --option queried=1 --option length={1024 * thousand} --option samples=50"
        for thousand in (8, 16, 24, 32, 40, 48, 56, 64)
    ]
    tasks = [command.split("task=")[1].split()[0] for command in checked("fig6")[0].evaluations]
    assert tasks == ["trec", "trec-fine", "banking77", "clinc150"]
    (judged,) = checked("table4")[0].evaluations
    assert "judge=https://api.openai.com/v1" in judged
    assert "judge_model=gpt-4o" in judged
    assert "sources=xsum.jsonl,cnn_dm.jsonl,multi_news.jsonl,qasper.jsonl,hotpotqa.jsonl,2wikimqa.jsonl" in judged


def small(**settings: Any) -> list[PaperVariant]:
    return check_paper(replace(SMALL, presets={PAPER: PaperPreset(variants=DIFF_AND_SOFTMAX, **settings)}))


def test_the_papers_size_is_counted_and_told() -> None:
    variants = small(stages=(Stage(recipe="paper-1.4b"),))
    assert [variant.counts.shared for variant in variants] == [variants[0].counts.shared] * 2
    assert 1.3e9 < variants[0].counts.total < 1.5e9
    assert variants[0].counts.total - variants[1].counts.total == 24 * 6 * 128
    assert [variant.heads[:2] for variant in variants] == [(8, 128), (16, 128)]
    assert variants[1].trainings[0].command == (
        "torchrun --nproc-per-node 8 -m diff_lab.train paper-1.4b model.attention_type=softmax "
        "--output runs/paper-1.4b-softmax"
    )


def test_the_folder_of_a_paper_variant_needs_no_quotes() -> None:
    variants = (
        Variant(
            name="diff, λ_init 0.8", coordinates=Coordinates(parameters=830000000), overrides=("model.lambda_init=0.8",)
        ),
    )
    preset = PaperPreset(stages=(Stage(recipe="paper-830m"),), variants=variants)
    (variant,) = check_paper(replace(SMALL, presets={PAPER: preset}))
    ending = " model.lambda_init=0.8 --output runs/paper-830m-diff-lambda_init-0.8-0.83B"
    assert variant.trainings[0].command.endswith(ending)


def test_what_cannot_be_run_or_measured_is_said() -> None:
    with pytest.raises(ValueError, match=r"'paper-13.1b' \(diff\) fits on no h200s among which its batch of 128 can"):
        small(stages=(Stage(recipe="paper-13.1b", overrides=("train.parallel=ddp",)),))
    stages = (Stage(recipe="paper-830m"),)
    with pytest.raises(ValueError, match="There is no measure 'needle'; did you mean 'needles'"):
        small(stages=stages, evaluations=(Evaluation(name="needle"),))
    with pytest.raises(ValueError, match="The measure needles has no option 'cells'"):
        small(stages=stages, evaluations=(Evaluation(name="needles", options={"cells": [[1, 1]]}),))
    with pytest.raises(ValueError, match=r"needles cannot take 'x' for samples .*: it should be a valid integer"):
        small(stages=stages, evaluations=(Evaluation(name="needles", options={"samples": "x"}),))
