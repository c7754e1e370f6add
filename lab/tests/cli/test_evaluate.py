"""`diff-lab eval`: text is read with the model's own tokenizer, and lm-evaluation-harness runs on any model."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from command_fixtures import run
from commands import fails, succeeds
from diff_lab.cli.recipe_options import find_recipe
from diff_lab.data import byte_tokenizer
from diff_lab.data.batches import IGNORED
from diff_lab.files import read_metrics
from diff_lab.results_files import read_results
from diff_lab.train import build_data, load_recipe
from harness_tasks import write_lines, write_task


def test_a_run_is_measured_on_the_text_that_it_kept_from_training(tmp_path: Path) -> None:
    """Of a text that has changed since, what is held out now may have been trained on."""
    text, words = tmp_path / "corpus.txt", "the cat sat on the mat and the dog lay by the door. " * 200
    text.write_text(words, encoding="utf-8")
    folder, output = tmp_path / "run", tmp_path / "results.json"
    settings = ["data.tokenizer=bpe", "data.vocab_size=270", f"data.paths={text}", "train.steps=1", "data.length=16"]
    succeeds(run("train", "tiny", *settings, "--output", folder))
    text.write_text("Another line in front.\n" + words, encoding="utf-8")
    for model in (folder, folder / "checkpoints" / "step-000001"):
        fails(run("eval", model), "The data of the run have changed since ", "--text")
    succeeds(run("eval", folder, "--text", text))
    text.write_text(words, encoding="utf-8")
    succeeds(run("eval", folder, "--output", output))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    batches = build_data(load_recipe(folder / "recipe.yaml"), tokenizer).batches.validation_batches()
    count = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    assert {record.n for record in read_results(output).records} == {count}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "mine.jsonl"
    lines: list[dict[str, Any]] = [
        {"question": "To be?", "choices": ["or not to be", "xyz"], "answer": 0},
        {"context": "to be, or", "choices": ["not to be", "q"], "answer": 1},
    ]
    return write_lines(path, lines)


def test_questions_of_ones_own_are_measured(text_run: Path, questions: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    result = succeeds(run("eval", text_run, "--tasks", questions, "--output", output, "--batch-size", 1))
    written = read_results(output)
    assert [record.name for record in written.records] == ["harness/mine/acc", "harness/mine/acc_norm"]
    assert {(record.variant, record.n) for record in written.records} == {("diff", 2)}
    told = {"tasks": [str(questions)], "batch_size": 1, "published": {}, "notes": []}
    assert written.settings | told == written.settings
    assert "lm_eval" in written.versions
    for record in written.records:
        line = next(line for line in result.stdout.splitlines() if f"/{record.name.split('/')[-1]} ↑" in line)
        assert f" {record.value:.3f} [" in line
    assert "0-shot; Wilson's score interval" in result.stdout
    assert "paper" not in result.stdout


def test_the_paper_stands_beside_what_was_measured(text_run: Path, questions: Path, tmp_path: Path) -> None:
    for name in ("piqa", "hellaswag"):
        write_task(tmp_path / "tasks", name, ["or not to be" * 5, "xyz"])
    output = tmp_path / "results.json"
    options = ("--include-path", tmp_path / "tasks", "--limit", 2, "--num-fewshot", 0, "--output", output)
    result = succeeds(run("eval", text_run, "--tasks", f"piqa, hellaswag,{questions}", *options))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    numbers = {row[0]: [row[2], *row[4:]] for row in rows}
    assert numbers["piqa/acc ↑"] == ["2", "0.768", "0.767", "0.760"]
    assert numbers["hellaswag/acc_norm ↑"] == ["2", "0.714", "0.700", "0.686"]
    assert numbers["piqa/acc_norm ↑"] == numbers["mine/acc ↑"] == ["2", "–", "–", "–"]
    assert "DIFF-3B (paper)" in result.stdout
    assert "3B parameters after 1T tokens" in result.stdout
    notes = read_results(output).settings["notes"]
    assert notes == [
        f"{name}: 2 texts were longer than the model's context and lost their beginning."
        for name in ("piqa", "hellaswag")
    ]
    assert notes[0].split(" longer")[0] in result.stdout


def test_what_is_done_is_kept_where_a_later_task_fails(text_run: Path, questions: Path, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"context": "", "choices": ["a", "b" * 80], "answer": 0}), encoding="utf-8")
    output = tmp_path / "results.json"
    result = run("eval", text_run, "--tasks", questions, "--tasks", long, "--output", output)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == f"Loading {text_run / 'model'} …"
    assert result.stderr.endswith("An answer has 81 tokens, and the model's context holds 64.\n")
    assert {record.name for record in read_results(output).records} == {"harness/mine/acc", "harness/mine/acc_norm"}
    assert "acc_norm" in result.stdout


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes, **heads)).save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_options_that_do_not_go_together(text_run: Path, questions: Path) -> None:
    fails(run("eval", text_run, "--tasks", questions, "--text", questions), "--text does not go with --tasks")
    fails(run("eval", text_run, "--tasks", questions, "--measure", "repeats"), "--measure does not go with --tasks")
    for option in ("--limit", "--num-fewshot", "--batch-size", "--include-path"):
        fails(run("eval", text_run, option, 1), f"{option} does not go with a measurement without --tasks")
    fails(run("eval", text_run, "--tasks", questions.with_name("none.jsonl")), "There is no file of questions at")
    for nothing in (",", ""):
        fails(run("eval", text_run, "--tasks", nothing), "--tasks must name tasks of lm_eval", f"got {nothing!r}.")
    assert run("eval", text_run, "--tasks", questions, "--limit", 0).exit_code == 2


def test_a_measurement_is_taken_by_its_name(text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the standard one, on the run's own data, that is taken without a name."""
    output = tmp_path / "standard.json"
    result = succeeds(run("eval", text_run, "--measure", "standard", "--output", output))
    written = read_results(output)
    unnamed = run("eval", text_run, "--output", tmp_path / "unnamed.json")
    assert "bits per byte ↓" in unnamed.stdout
    assert written.records == read_results(tmp_path / "unnamed.json").records
    assert written.settings["measures"] == {"standard": {"sequences": 512}}
    for record in written.records:
        assert f"{record.value:.3f}" in result.stdout
    values = {record.name: record.value for record in written.records}
    last = read_metrics(text_run / "metrics.jsonl")[-1]
    assert values["language/validation_loss"] == pytest.approx(last["validation/loss"])
    fails(run("eval", text_run, "--measure", "standard", "--output", output), "--output must be a new file")
    monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
    fails(run("eval", text_run, "--output", tmp_path / "new.json"), "in a folder that may be written to")


def test_a_measurement_for_any_model_takes_one_that_is_not_ours(llama: Path, questions: Path, tmp_path: Path) -> None:
    succeeds(run("eval", llama, "--tasks", questions), "llama")
    folder, output = tmp_path / "text", tmp_path / "results.json"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"{number} to be, or not to be " * 4, encoding="utf-8")
    small = ("--option", "frequent=1000", "--output", output)
    assert run("eval", llama, "--measure", "repeats", "--text", folder, *small).exit_code == 0
    records = {record.name: record for record in read_results(output).records}
    assert {record.variant for record in records.values()} == {"llama"}
    assert records["repeats/ar_hit"].value == pytest.approx(math.log(257), abs=0.2), "as good as nothing is learnt"
    assert records["repeats/ar_hit"].documents == ()
    fails(run("eval", llama, "--measure", "episodes"), "is not a model of this project")
    without_text = run("eval", llama, "--measure", "repeats")
    fails(without_text, "No recipe.yaml belongs to", "name a text with --text")
    assert "Loading" not in without_text.stderr
    (llama / "config.json").write_text('{"model_type": "t5"}', encoding="utf-8")
    fails(run("eval", llama, "--tasks", questions), "is no causal language model: its model_type is 't5'")


def test_a_recipe_of_another_program_is_none_of_ours(text_run: Path, text_file: Path, tmp_path: Path) -> None:
    """llm-compressor writes a recipe.yaml beside the weights; one of ours that is broken is still an error."""
    copy = shutil.copytree(text_run, tmp_path / "run")
    recipe = copy / "model" / "recipe.yaml"
    recipe.write_text("test_stage:\n  modifiers:\n    QuantizationModifier: {targets: [Linear]}\n", encoding="utf-8")
    assert find_recipe(copy / "model") == load_recipe(text_run / "recipe.yaml")
    (copy / "recipe.yaml").unlink()
    assert run("eval", copy, "--text", text_file, "--output", tmp_path / "results.json").exit_code == 0
    fails(run("eval", copy), "No recipe.yaml belongs to", "name a text with --text")
    broken = (text_run / "recipe.yaml").read_text(encoding="utf-8").replace("warmup_steps", "warmup_step")
    recipe.write_text(broken, encoding="utf-8")
    fails(run("eval", copy, "--text", text_file), "unknown key 'train.warmup_step'; did you mean")


def test_a_text_that_cannot_be_read_is_said_before_a_model_is_loaded(
    text_run: Path, retrieval_run: Path, text_file: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(text_run / "model", tmp_path / "run" / "model")
    shutil.copy(text_run / "recipe.yaml", tmp_path / "run")
    (model / "tokenizer.json").unlink()
    for arguments, message in (
        ((text_run, "--text", tmp_path / "missing.txt"), "There is no text file or folder"),
        ((retrieval_run, "--text", text_file), "has no tokenizer (tokenizer.json)"),
        ((model,), f"The tokenizer in {str(model)!r} is not valid: "),
    ):
        result = run("eval", *arguments)
        fails(result, message)
        assert "Loading" not in result.stderr


def test_every_record_has_a_row(retrieval_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    result = run("eval", retrieval_run, "--measure", "standard", "--option", "sequences=8", "--output", output)
    assert result.exit_code == 0
    records = [one for one in read_results(output).records if one.name == "retrieval/accuracy_by_depth"]
    assert records
    for record in records:
        lines = [line for line in result.stdout.splitlines() if "retrieval/accuracy_by_depth ↑" in line]
        (line,) = [line for line in lines if f" {record.coordinates.label} " in line]
        assert f" {record.value:.3f} [" in line
        assert f" {record.n} " in line


@pytest.mark.all
def test_measurements_of_a_run_on_many_shot_data_share_options(tmp_path: Path) -> None:
    data = "data={kind: many_shot, shots: 8, classes: 2, labels: 4, words: 4, item_length: 1, batch_size: 2}"
    sizes = ["model.hidden_size=16", "model.head_dim=8", "model.num_hidden_layers=1"]
    settings = ["data.validation_sequences=4", "train.steps=1", "train.warmup_steps=0", "train.inspect_every=null"]
    folder, output = tmp_path / "run", tmp_path / "results.json"
    assert run("train", "retrieval", data, *sizes, *settings, "--output", folder).exit_code == 0
    assert "accuracy of the labels" in run("eval", folder).stdout
    measures = ("--measure", "episodes", "--measure", "episode_orders")
    few = ("noises=[0.1]", "episodes=3", "orders=2", "queries=4", "sets=2")
    options = [part for option in few for part in ("--option", option)]
    # What both have under one name must suit both.
    fails(run("eval", folder, *measures, "--option", "shots=4"), "episodes cannot take 4 for shots", "a list")
    result = succeeds(run("eval", folder, *measures, *options, "--output", output))
    written = read_results(output)
    assert result.stdout.count("many_shot/") == len(written.records) == 3 + 8
    assert written.settings["measures"]["episode_orders"]["shots"] == 32


def test_a_run_on_sums_is_asked_its_own_kind_also_beside_text(tmp_path: Path) -> None:
    """And a text that is shorter than a context is one context."""
    sums = "data={kind: arithmetic, operations: 1, length: 16, batch_size: 2, validation_problems: 4}"
    settings = [
        "model.head_dim=8",
        "model.hidden_size=16",
        "model.num_hidden_layers=1",
        "train.steps=1",
        "train.warmup_steps=0",
    ]
    folder, text, output = tmp_path / "run", tmp_path / "short.txt", tmp_path / "results.json"
    succeeds(run("train", "arithmetic", sums, *settings, "--output", folder))
    text.write_text("1+2=3", encoding="utf-8")
    few = ("--option", "problems=2", "--text", text, "--output", output)
    succeeds(run("eval", folder, "--measure", "arithmetic", "--measure", "standard", *few))
    records = read_results(output).records
    assert {record.coordinates.label for record in records} == {"", "1 operation"}
    assert {record.n for record in records} == {2, 5}
    fails(run("eval", folder, "--measure", "quantised"), "This is measured on text, retrieval or recall")


def test_a_measure_of_text_says_that_the_run_has_none(retrieval_run: Path) -> None:
    message = "The measure repeats needs text, and the run was trained on none: name some by --text."
    result = run("eval", retrieval_run, "--measure", "standard", "--measure", "repeats")
    fails(result, message)
    assert "Loading" not in result.stderr
    in_training = run("eval", retrieval_run, "--measure", "gradients_in_training")
    fails(in_training, "The measure gradients_in_training is taken of an experiment's runs")


def test_settings_of_another_kind_are_refused_before_a_model_is_read(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    wrong = run("eval", nowhere, "--measure", "many_shot", "--option", "shots=abc")
    fails(wrong, "many_shot cannot take 'abc' for shots", "a list such as [16, 64]")
    both = ("--measure", "many_shot", "--measure", "many_shot_orders", "--option", "shots=[4]")
    fails(run("eval", nowhere, *both), "many_shot_orders cannot take [4] for shots")
    fails(run("eval", nowhere, "--measure", "many_shot", "--option", "shots=[4]"), "nowhere' does not exist")


def test_measurements_that_there_are_not(text_run: Path, text_file: Path) -> None:
    fails(run("eval", text_run, "--measure", "repeat"), "There is no measure 'repeat'; did you mean 'repeats'?")
    fails(run("eval", text_run, "--measure", "zzz"), "There is no measure 'zzz'; there are standard, ")
    wrong = ("--measure", "standard", "--option", "sequence=3")
    fails(run("eval", text_run, *wrong), "The measure standard has no option 'sequence'; did you mean 'sequences'?")
    fails(run("eval", text_run, "--option", "a=1"), "--option does not go with a measurement without a name")
    fails(run("eval", text_run, "--measure", "arithmetic", "--text", text_file), "arithmetic, which takes no text")
