"""`diff-lab reproduce`: what it says, what it refuses, and that what it prints is what it wrote."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.cli.recipe_options import parse_options
from diff_lab.experiments.definitions import EXPERIMENTS, SHOWN_BY
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX, Preset
from diff_lab.measure.measurement import MeasurementRequest, Options
from diff_lab.record import Result
from diff_lab.report.wording import format_difference, measure_label, note_words, verdict_text
from diff_lab.results_files import read_results
from diff_lab.train import load_recipe
from small_experiment import SMALL, TINY

Add = Callable[..., None]
ONE_SEED = replace(TINY, learning_rates=(), seeds=1)
VERSION_2 = replace(DIFF_AND_SOFTMAX[1], overrides=("model.attention_type=diff_v2",))
UNEQUAL = replace(ONE_SEED, variants=(DIFF_AND_SOFTMAX[0], VERSION_2))


@pytest.fixture
def add() -> Iterator[Add]:
    """Experiments that there are in place of all others: the small one under a name, with presets and other fields."""

    def added(name: str, presets: dict[str, Preset], **fields: Any) -> None:
        EXPERIMENTS[name] = replace(SMALL, name=name, presets=presets, **fields)

    with patch.dict(EXPERIMENTS, clear=True):
        yield added


@pytest.fixture
def small(add: Add) -> None:
    add("recall", {"cpu": replace(TINY, learning_rates=())})


@pytest.mark.usefixtures("small")
def test_an_experiment_ends_with_its_table(tmp_path: Path) -> None:
    result = succeeds(run("reproduce", "recall", "--output", tmp_path))
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
    fails(refused, "seeds: 1 there, 2 asked for; options.sequences: 4 there, 8 asked for")


@pytest.mark.all
@pytest.mark.usefixtures("small", "forked_workers")
def test_trainings_run_at_the_same_time(tmp_path: Path) -> None:
    """Every line of a log names the training; --workers 1 has the same numbers."""
    beside = succeeds(run("reproduce", "recall", "--workers", 2, "--output", tmp_path / "beside"))
    assert "4 trainings, 2 at a time.\n" in beside.stderr
    lines = [line for line in beside.stderr.splitlines() if ": step " in line]
    assert {line.split(" · learning")[0] for line in lines} == {
        f"{variant} · seed {seed}" for variant in ("diff", "softmax") for seed in (0, 1)
    }
    alone = run("reproduce", "recall", "--workers", 1, "--output", tmp_path / "alone")
    assert beside.stdout.replace("/beside/", "/alone/") == alone.stdout
    assert run("reproduce", "recall", "--workers", 0, "--output", tmp_path / "none").exit_code == 2


def test_the_papers_size_has_a_page_with_a_command_for_each_table_and_figure() -> None:
    text = (Path(__file__).parents[3] / "docs" / "experiments.md").read_text(encoding="utf-8")
    section = text.split("## The paper's own size")[1].split("\n## ")[0]
    of_the_paper = [name for name in (*EXPERIMENTS, *SHOWN_BY) if re.match("table|fig|appendix", name)]
    words = [re.sub(r"_?(\d+|[cg])$", r" \1", name.replace("fig", "figure")).lower() for name in of_the_paper]
    assert all(f"| {name} |" in section.lower() for name in words)
    trained = []
    for command in re.findall(r"`((?:… paper-|--measure|diff-lab (?:train|eval))[^`]*)`", section):
        words = shlex.split(command)
        given = {kind: [after for word, after in itertools.pairwise(words) if word == kind] for kind in set(words)}
        for name in given.get("--measure", ()):
            MeasurementRequest(name=name, options=parse_options(given.get("--option", []))).resolve()
        for recipe in (word for word in words if word.startswith("paper-")):
            trained.append(load_recipe(recipe, [word for word in words if "=" in word]).name)
    assert {*trained} >= {"paper-3b", "paper-3b-64k", "paper-830m"}


def test_what_one_cannot_do_keeps_no_other_from_being_done(tmp_path: Path, add: Add) -> None:
    """A wrong preset, or a bug, or a full memory."""

    def exhausted(preset: Preset, progress: Any) -> list[Result]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    add("unequal", {"cpu": UNEQUAL})
    add("broken", {"cpu": replace(ONE_SEED, options={})}, measure_once=exhausted)
    add("recall", {"cpu": ONE_SEED})
    add("big", {"gpu": TINY})
    result = run("reproduce", "recall", "all", "--output", tmp_path)
    assert result.exit_code == 2
    assert "error: unequal: The variants 'diff' and 'softmax' are not of equal size" in result.stderr
    assert "error: broken: Traceback" in result.stderr
    assert "OutOfMemoryError: CUDA out of memory." in result.stderr
    assert result.stderr.endswith("error: 2 of 3 experiments could not be carried out: unequal, broken.\n")
    assert {path.name for path in tmp_path.glob("*.json")} == {"recall.json"}
    assert "unequal" not in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "inconclusive: one seed" in result.stdout
    with pytest.raises(torch.OutOfMemoryError):
        run("reproduce", "broken", "--output", tmp_path)


def test_the_gpu_preset_is_refused_without_a_gpu(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    add("recall", {"cpu": TINY, "gpu": TINY})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    fails(run("reproduce", "recall", "--preset", "gpu"), "this machine has no GPU", "--preset cpu takes about 0.1 min")


def test_the_list_has_every_experiment() -> None:
    result = succeeds(run("reproduce", "--list"))
    for name in EXPERIMENTS:
        assert f" {name} " in result.stdout
    assert f"{EXPERIMENTS['fig8'].presets['cpu'].minutes:g} min" in result.stdout


def test_what_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    fails(run("reproduce", "nois"), "There is no experiment 'nois'; did you mean 'noise'?")
    fails(run("reproduce", "nosuch"), "There is no experiment 'nosuch'", *EXPERIMENTS)
    fails(run("reproduce"), "Name one experiment or more of ", "--list")
    fails(run("reproduce", "noise", "--text", tmp_path, "--output", tmp_path), "--text does not go with 'noise'")
    fails(run("reproduce", "noise", "--option", "sequences"), "'sequences' is not a setting; write NAME=VALUE.")
    fails(run("reproduce", "noise", "--option", "a=[", "--output", tmp_path), "The value of 'a=[' is not valid YAML.")
    fails(run("reproduce", "noise", "table6", "--option", "sequences=1"), "--option goes with one experiment")
    fails(
        run("reproduce", "table2", "fig5", "noise", "--option", "sequence=1"),
        "no option 'sequence'; did you mean 'sequences'?",
    )
    assert run("reproduce", "noise", "--seeds", 0).exit_code == 2


def test_text_goes_to_those_that_are_trained_on_it(tmp_path: Path, add: Add) -> None:
    words = tmp_path / "words"
    words.mkdir()
    for number in range(8):
        (words / f"{number}.txt").write_text(f"Chapter {number} of {number * 7}. " * 40, encoding="utf-8")
    small = [text for text in TINY.overrides if not text.startswith(("data.num_pairs", "data.validation", "data.le"))]
    on_text = replace(ONE_SEED, recipe="tiny", overrides=(*small, "data.length=16"), options={})
    add("text", {"cpu": on_text}, requests=lambda _: [MeasurementRequest(name="standard")], options=Options)
    add("recall", {"cpu": ONE_SEED})
    output = ("--output", tmp_path / "out")
    assert run("reproduce", "all", "--text", words, *output).exit_code == 0
    requests = [read_results(tmp_path / "out" / f"{name}.json").settings["request"] for name in ("text", "recall")]
    assert [request["text"] for request in requests] == [[str(words)], []]
