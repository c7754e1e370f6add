"""`diff-lab reproduce`: what it says, what it refuses, and that what it prints is what it wrote."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import fails
from diff_lab.cli.experiment_commands import _shared_out
from diff_lab.experiments import experiment as definitions
from diff_lab.experiments import paper_preset, request
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Preset
from diff_lab.experiments.paper_preset import Evaluation, PaperPreset, Stage
from diff_lab.record import Result
from diff_lab.report.wording import format_difference, measure_label, note_words, verdict_text
from diff_lab.results_files import read_results
from small_experiment import SMALL, TINY

Run = Callable[..., Any]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiments that there are, at a size of seconds."""
    preset = replace(TINY, learning_rates=())
    paper = PaperPreset(
        stages=(Stage(recipe="paper-830m"),),
        variants=DIFF_AND_SOFTMAX,
        evaluations=(Evaluation(name="standard", options={"sequences": 7}),),
        commands=("diff-lab bench model",),
        remarks=("What a reader must know.",),
    )
    experiments = {"recall": replace(SMALL, presets={"cpu": preset, "paper": paper})}
    for module in (definitions, paper_preset, request):
        monkeypatch.setattr(module, "EXPERIMENTS", dict.fromkeys(experiments, ""))
        monkeypatch.setattr(module, "find_experiment", experiments.__getitem__)


@pytest.mark.usefixtures("small")
def test_an_experiment_ends_with_its_table(run: Run, tmp_path: Path) -> None:
    result = run("reproduce", "recall", "--output", tmp_path)
    assert result.exit_code == 0
    written = read_results(tmp_path / "recall.json")
    lines = result.stdout.splitlines()
    for row in written.comparisons:
        line = next(line for line in lines if measure_label(row)[:20] in line and format_difference(row) in line)
        assert "DIFF − Transformer" in line
        assert verdict_text(row).split(":")[0] in line
        assert f"{row.ours[0]:.3f} / {row.ours[1]:.3f}" in line
    for variant in written.settings["variants"]:
        assert any(
            f"{variant['parameters']:,}" in line and f"{variant['shared_parameters']:,}" in line for line in lines
        )
    assert f"note: {note_words(written, written.notes[0])}" in result.stdout
    document = tmp_path / "RESULTS.md"
    assert lines[-2:] == [f"numbers: {tmp_path / 'recall.json'}", f"report: {document}"]
    report = document.read_text(encoding="utf-8")
    assert all(verdict_text(row).split(":")[0] in report for row in written.comparisons)
    linked = re.findall(r"\((figures/[^)]+)\)", report)
    assert linked
    assert {tmp_path / path for path in linked} == set((tmp_path / "figures").iterdir())
    assert "4 trainings.\n" in result.stderr

    fails(run("reproduce", "recall", "--output", tmp_path), "There are results in", "--resume", "--overwrite")
    resumed = run("reproduce", "recall", "--output", tmp_path, "--resume")
    assert resumed.stdout == result.stdout
    assert "trainings" not in resumed.stderr
    replaced = run("reproduce", "recall", "--output", tmp_path, "--overwrite", "--seeds", 1, "--option", "sequences=4")
    assert "inconclusive: one seed" in replaced.stdout
    assert "trainings" not in replaced.stderr
    assert read_results(tmp_path / "recall.json").settings["request"]["options"] == {"sequences": 4}
    refused = run("reproduce", "all", "--output", tmp_path, "--resume")
    fails(refused, "seeds: 1 there, 2 asked for; options.sequences: 4 there, 8 asked for", "--overwrite")


@pytest.mark.all
@pytest.mark.usefixtures("small", "forked_workers")
def test_trainings_run_at_the_same_time(run: Run, tmp_path: Path) -> None:
    """Every line of a log names the training; --workers 1 has the same numbers."""
    beside = run("reproduce", "recall", "--workers", 2, "--output", tmp_path / "beside")
    assert beside.exit_code == 0
    assert "4 trainings, 2 at a time.\n" in beside.stderr
    lines = [line for line in beside.stderr.splitlines() if ": step " in line]
    assert {line.split(" · learning")[0] for line in lines} == {
        f"{variant} · seed {seed}" for variant in ("diff", "softmax") for seed in (0, 1)
    }
    alone = run("reproduce", "recall", "--workers", 1, "--output", tmp_path / "alone")
    assert beside.stdout.replace("/beside/", "/alone/") == alone.stdout
    assert run("reproduce", "recall", "--workers", 0, "--output", tmp_path / "none").exit_code == 2


@pytest.mark.usefixtures("small")
def test_the_papers_size_is_told_and_not_run(run: Run, tmp_path: Path) -> None:
    result = run("reproduce", "recall", "--preset", "paper")
    assert result.exit_code == 0
    assert "not run" in result.stdout
    assert "torchrun --nproc-per-node 8 -m diff_lab.train paper-830m model.attention_type=softmax" in result.stdout
    assert result.stdout.count(" without λ and norms") == 2
    for phrase in ("8 heads of 96", "16 heads of 96", "  train on 8 × h200, about 0.21 days\n"):
        assert result.stdout.count(phrase) == (2 if "train" in phrase else 1)
    lines = result.stdout.splitlines()
    for kind in ("diff", "softmax"):
        assert f"    diff-lab eval runs/paper-830m-{kind} --measure standard --option sequences=7" in lines
    assert "What a reader must know." in lines
    assert lines[-1] == "diff-lab bench model"
    for name, value in {"--seeds": 2, "--text": tmp_path, "--option": "sequences=4"}.items():
        fails(run("reproduce", "recall", "--preset", "paper", name, value), f"{name} does not go with --preset paper")
    for name, *values in (("--output", tmp_path / "none"), ("--resume",), ("--overwrite",)):
        fails(run("reproduce", "recall", "--preset", "paper", name, *values), f"{name} does not go with --preset paper")
    assert not (tmp_path / "none").exists()


def test_what_one_cannot_do_keeps_no_other_from_being_done(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall = replace(SMALL, presets={"cpu": replace(TINY, learning_rates=(), seeds=1)})
    unequal = replace(
        TINY, variants=(DIFF_AND_SOFTMAX[0], replace(DIFF_AND_SOFTMAX[1], overrides=("model.attention_type=diff_v2",)))
    )
    experiments = {"unequal": replace(recall, name="unequal", presets={"cpu": unequal}), "recall": recall}
    experiments["big"] = replace(recall, name="big", presets={"gpu": TINY})
    for module in (definitions, paper_preset, request):
        monkeypatch.setattr(module, "EXPERIMENTS", dict.fromkeys(experiments, ""))
        monkeypatch.setattr(module, "find_experiment", experiments.__getitem__)
    result = run("reproduce", "recall", "all", "--output", tmp_path)
    assert result.exit_code == 2
    assert "error: unequal: The variants 'diff' and 'softmax' are not of equal size" in result.stderr
    assert result.stderr.endswith("error: 1 of 2 experiments could not be carried out: unequal.\n")
    assert {path.name for path in tmp_path.glob("*.json")} == {"recall.json"}
    assert "unequal" not in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "inconclusive: one seed" in result.stdout


def test_a_bug_or_a_full_memory_in_one_of_several_stops_none_of_the_others(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(TINY, learning_rates=(), seeds=1)

    def exhausted(preset: Preset, progress: Any) -> list[Result]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    broken = replace(SMALL, name="broken", measurements="", measure_once=exhausted)
    broken = replace(broken, presets={"cpu": replace(tiny, options={})})
    experiments = {"broken": broken, "recall": replace(SMALL, presets={"cpu": tiny})}
    for module in (definitions, paper_preset, request):
        monkeypatch.setattr(module, "EXPERIMENTS", dict.fromkeys(experiments, ""))
        monkeypatch.setattr(module, "find_experiment", experiments.__getitem__)
    result = run("reproduce", "all", "--output", tmp_path)
    assert result.exit_code == 2
    assert "error: broken: Traceback" in result.stderr
    assert "OutOfMemoryError: CUDA out of memory." in result.stderr
    assert result.stderr.endswith("error: 1 of 2 experiments could not be carried out: broken.\n")
    assert (tmp_path / "recall.json").is_file()
    assert (tmp_path / "RESULTS.md").is_file()
    with pytest.raises(torch.OutOfMemoryError):
        run("reproduce", "broken", "--output", tmp_path)


@pytest.mark.all
def test_a_rehearsal_tells_what_it_took_and_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unequal = replace(
        TINY, variants=(DIFF_AND_SOFTMAX[0], replace(DIFF_AND_SOFTMAX[1], overrides=("model.attention_type=diff_v2",)))
    )
    experiments = {
        "recall": replace(SMALL, presets={"cpu": TINY, "gpu": TINY}),
        "unequal": replace(SMALL, name="unequal", presets={"gpu": unequal}),
    }
    for module in (definitions, paper_preset, request):
        monkeypatch.setattr(module, "EXPERIMENTS", dict.fromkeys(experiments, ""))
        monkeypatch.setattr(module, "find_experiment", experiments.__getitem__)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    alone = run("reproduce", "recall", "--rehearse")
    assert alone.exit_code == 0
    (row,) = [line for line in alone.stdout.splitlines() if "recall" in line]
    assert re.search(r"recall +│ +[\d.]+ │ +[\d.]+ │ +\d+ │", row)
    assert re.search(r"┃ checks, s ┃ small experiment, s ┃ comparisons ┃", alone.stdout)
    result = run("reproduce", "all", "--preset", "gpu", "--rehearse")
    assert result.exit_code == 2
    assert "recall" in result.stdout
    assert "error: unequal: The variants 'diff' and 'softmax' are not of equal size" in result.stderr
    assert result.stderr.endswith("error: 1 of 2 experiments could not be rehearsed: unequal.\n")
    assert list(tmp_path.iterdir()) == []
    for name, *values in (("--output", tmp_path / "none"), ("--resume",), ("--overwrite",)):
        fails(run("reproduce", "recall", "--rehearse", name, *values), f"{name} does not go with --rehearse")
    fails(run("reproduce", "recall", "--preset", "paper", "--rehearse"), "--rehearse does not go with --preset paper")
    fails(run("reproduce", "recall", "--preset", "gpu"), "this machine has no GPU", "--rehearse")


def test_the_list_has_every_experiment(run: Run) -> None:
    result = run("reproduce", "--list")
    assert result.exit_code == 0
    for name in definitions.EXPERIMENTS:
        assert f" {name} " in result.stdout
    assert f"{definitions.find_experiment('fig8').presets['cpu'].minutes:g} min" in result.stdout


def test_what_cannot_be_run_is_one_sentence(run: Run, tmp_path: Path) -> None:
    fails(run("reproduce", "recal"), "There is no experiment 'recal'; did you mean 'recall'?")
    fails(run("reproduce", "nosuch"), "There is no experiment 'nosuch'", *definitions.EXPERIMENTS)
    fails(run("reproduce"), "Name one experiment or more of ", "--list")
    fails(run("reproduce", "recall", "--text", tmp_path, "--output", tmp_path), "--text does not go with 'recall'")
    fails(run("reproduce", "recall", "--option", "sequences"), "'sequences' is not a setting; write NAME=VALUE.")
    fails(run("reproduce", "recall", "--option", "a=[", "--output", tmp_path), "The value of 'a=[' is not valid YAML.")
    twice = ("--option", "sequences=1", "--option", "sequences=2")
    fails(run("reproduce", "recall", *twice, "--output", tmp_path), "'sequences' is set twice")
    fails(run("reproduce", "recall", "--option", "sequence=1"), "no option 'sequence'; did you mean 'sequences'?")
    fails(
        run("reproduce", "recall", "--option", "sequences=x"),
        "'recall' cannot take 'x' for sequences (sequences of the retrieval task): it should be a valid integer.",
    )
    assert run("reproduce", "recall", "--seeds", 0).exit_code == 2


def test_text_and_options_go_to_those_that_know_them() -> None:
    on_text = replace(TINY, recipe="language", overrides=(), options={"length": 1})
    text = replace(SMALL, name="text", presets={"cpu": on_text, "gpu": TINY})
    shared = _shared_out([SMALL, text], "cpu", [Path("novels")], {"sequences": 2, "length": 3})
    assert shared == [
        {"text": [], "options": {"sequences": 2}},
        {"text": [Path("novels")], "options": {"length": 3}},
    ]
    unknown = _shared_out([SMALL, text], "cpu", [], {"depth": 2})
    assert [share["options"] for share in unknown] == [{"depth": 2}] * 2
    # What none of them takes goes to all, and is refused by the first.
    both = replace(SMALL, presets={"cpu": TINY, "gpu": TINY})
    assert [share["text"] for share in _shared_out([both, text], "gpu", [Path("novels")], {})] == [[Path("novels")]] * 2
