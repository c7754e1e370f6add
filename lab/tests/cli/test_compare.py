"""`diff-lab compare`: what it says before and after, what it refuses, and its results beside others."""

import re
from pathlib import Path

import pytest

from command_fixtures import run
from commands import RETRIEVAL, fails, succeeds
from diff_lab.results_files import read_results, write_json

RECIPE = f"{RETRIEVAL}train: {{steps: 4, learning_rate: 2e-3, inspect_every: null}}\n"
OF_TEXT = RECIPE.replace("{kind: retrieval, length: 32, num_pairs: 2,", "{kind: text, length: 16,").replace(
    "validation_sequences: 4", "validation_tokens: 64, validation_fraction: 0.3"
)
ONE = ("--seeds", 1, "--learning-rates", "2e-3")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_options_of_what_is_measured(recipe: Path, tmp_path: Path) -> None:
    command = ("compare", recipe, "train.steps=2", *ONE, "--output", tmp_path / "out")
    fails(run(*command, "--option", "sequence=3"), "sequence", "sequences")
    assert not (tmp_path / "out").exists()
    assert run(*command, "--option", "sequences=3").exit_code == 0
    written = read_results(tmp_path / "out" / "recipe_mine.json")
    assert written.settings["request"]["options"] == {"sequences": 3}
    queries = {record.n for record in written.records if record.name == "retrieval/first_query_accuracy"}
    assert queries == {3}


def test_a_wrong_option_is_refused_before_any_text_is_read(tmp_path: Path) -> None:
    recipe = tmp_path / "of text.yaml"
    recipe.write_text(OF_TEXT, encoding="utf-8")
    command = ("compare", recipe, "data.paths=[nowhere]", "--output", tmp_path / "out")
    fails(run(*command, "--option", "document=3"), "'recipe_mine' has no option 'document'", "documents")
    recipe.write_text(re.sub("data: .*", "data: {kind: arithmetic, batch_size: 2}", RECIPE), encoding="utf-8")
    fails(run("compare", recipe, "--option", "documents=3", "--output", tmp_path / "out"), "it has none")


@pytest.mark.all
def test_a_comparison_ends_with_its_table_and_a_report(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("compare", recipe, "train.steps=3", *ONE)
    result = succeeds(run(*command))
    folder = Path("runs") / "compare-mine"
    written = read_results(folder / "recipe_mine.json")
    assert written.settings["request"]["recipe"]["train"]["steps"] == 3
    assert "\n2 of 2 trainings are done.\n" in result.stderr
    assert "With one seed there are no intervals over seeds, and every answer is inconclusive." in result.stderr
    assert "variants of the recipe mine: diff; softmax" in result.stdout
    assert "DIFF − Transformer" in result.stdout
    assert "paper" not in result.stdout.split("Verdict")[0]
    lines = result.stdout.splitlines()
    assert lines[-2:] == [f"numbers: {folder / 'recipe_mine.json'}", f"report: {folder / 'RESULTS.md'}"]
    report = (folder / "RESULTS.md").read_text(encoding="utf-8")
    assert "# Variants of a recipe side by side" in report
    assert "## Recipe mine" in report
    assert "Figure 7" not in report
    assert "than the paper's" not in report
    linked = re.findall(r"\((figures/[^)]+)\)", report)
    assert {folder / path for path in linked} == set((folder / "figures").iterdir())

    fails(run(*command), "There are results in", "--resume", "--overwrite")
    resumed = run(*command, "--resume")
    assert resumed.stdout == result.stdout
    assert "trainings" not in resumed.stderr
    fails(run(*command, "train.weight_decay=0", "--resume"), "recipe.train.weight_decay: 0.1 there, 0.0 asked for")
    more = run(*command, "--variants", "diff,softmax,diff_v2", "--overwrite")
    assert "3 of 3 trainings are done." in more.stderr
    assert set(re.findall(r"^(\S+) · seed 0 · learning", more.stderr, flags=re.MULTILINE)) == {"diff_v2"}
    assert "note: The attention of diff_v2 has more parameters" in more.stdout
    # A report needs neither the recipe nor the runs.
    recipe.unlink()
    assert run("report", folder, "--overwrite").exit_code == 0
    assert "DIFF V2 − Transformer" in (folder / "RESULTS.md").read_text(encoding="utf-8")


def test_the_users_text_is_what_is_compared_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIFF_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    recipe, text = tmp_path / "of text.yaml", tmp_path / "novels"
    recipe.write_text(OF_TEXT, encoding="utf-8")
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(
            f"Chapter {number}. A dark night, {number} times {number}. " * 6, encoding="utf-8"
        )
    settings = ("--text", text, *ONE, "--output", tmp_path / "out")
    result = succeeds(run("compare", recipe, *settings))
    written = read_results(tmp_path / "out" / "recipe_mine.json")
    request = written.settings["request"]
    assert request["recipe"]["data"]["paths"] == [str(text)]
    assert "AR-Hit" in result.stdout
    assert run("compare", recipe, *settings, "--resume").stdout == result.stdout
    (text / "0.txt").write_text("A dark night. " * 30, encoding="utf-8")
    assert "were asked for otherwise (text_sha256)" in run("compare", recipe, *settings, "--resume").stderr
    del request["text_sha256"]  # as in results of earlier versions
    write_json(tmp_path / "out" / "recipe_mine.json", written)
    assert run("compare", recipe, *settings, "--resume").stdout == result.stdout
    fails(run("compare", recipe, "data.dataset=novels", *settings), "in paths or in a dataset, not in both")
    short = tmp_path / "short.txt"
    fails(run("compare", recipe, "--text", tmp_path / "no", "--output", tmp_path / "none"), "There is no text file")
    short.write_text("It was a dark and stormy night.", encoding="utf-8")
    refused = run("compare", recipe, "--text", short, "--output", tmp_path / "none")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "fewer than one block of 16" in refused.stderr.splitlines()[-1]
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_compared_is_one_sentence(recipe: Path, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "none")
    fails(run("compare", "nosuch", *output), "There is no recipe 'nosuch'; shipped ones are")
    fails(run("compare", recipe, "--variants", "diff", *output), "A comparison needs two variants or more, got diff.")
    fails(
        run("compare", recipe, "--learning-rates", "1e-3,fast", *output), "numbers with commas between, got '1e-3,fast'"
    )
    fails(run("compare", recipe, "--learning-rates", "0", *output), "Learning rates are above 0")
    fails(run("compare", recipe, "--text", tmp_path, *output), "unknown key 'data.paths'")
    fails(run("compare", recipe, "--resume", "--overwrite", *output), "not both")
    assert run("compare", recipe, "--seeds", 0).exit_code == 2
    assert not (tmp_path / "none").exists()
