"""The trained models that come with the package: how they are packed and found, and that their numbers hold."""

import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import fresh
from command_fixtures import run
from commands import fails, succeeds
from diff_lab.cli.eval_command import evaluate_measures
from diff_lab.data import RetrievalBatches, TextFiles
from diff_lab.data.corpus import training_text, validation_text
from diff_lab.record import CardRecord
from diff_lab.results_files import read_record, read_results
from diff_lab.train import load_recipe
from diff_transformer import pretrained, pretrained_names, shipped_models
from diff_transformer.model.configuration import code_files
from full_run import short_run

PROGRAMS = Path(__file__).resolve().parents[2] / "benchmarks"
SHIPPED = pretrained_names()
NAMES = ["needles-diff", "novels-diff"]  # those that the tests pack


def program(name: str) -> Any:
    """A program of the folder `benchmarks` as a module."""
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def packer() -> Any:
    return program("pack_weights")


@pytest.fixture(scope="module")
def packed(packer: Any, text_run: Path, retrieval_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny models, packed as those that come with the package."""
    root = tmp_path_factory.mktemp("weights")
    for name, folder in zip(NAMES, (retrieval_run, text_run), strict=True):
        packer.pack(name, folder, root, "0123abc", overwrite=False)
    return root


@pytest.fixture
def weights(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same while the package finds these models, and no others."""
    monkeypatch.setattr(shipped_models, "WEIGHTS", packed)
    return packed


def check_model(name: str) -> None:
    """A model loads, generates, and has the numbers that its card states, which are of the weights in its folder."""
    folder = Path(pretrained(name))
    record = read_record(folder / shipped_models.CARD_RECORD, CardRecord)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.attention_type == name.partition("-")[2]
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) == record.parameters
    assert record.validation
    assert all(key.startswith("validation/") for key in record.validation)
    generated = model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 5)

    stated = read_results(folder / "results.json")
    ((again, _),) = evaluate_measures(folder, None, [], [], "cpu")
    assert 0 < record.tolerance <= 0.005
    for ours, theirs in zip(again.records, stated.records, strict=True):
        assert (ours.name, ours.coordinates, ours.n) == (theirs.name, theirs.coordinates, theirs.n)
        assert ours.value == pytest.approx(theirs.value, abs=record.tolerance, rel=0), ours.name
    for level, stated_level in zip(again.baselines, stated.baselines, strict=True):
        floats = {name: value for name, value in vars(stated_level).items() if isinstance(value, float)}
        assert {name: vars(level)[name] for name in floats} == pytest.approx(floats, rel=1e-12)
        assert replace(level, **floats) == stated_level
    card = (folder / "README.md").read_text(encoding="utf-8")
    for text in (record.use, record.limits, record.data_license, record.commit, f"{record.parameters:,}"):
        assert text in card

    files = {file.name for file in folder.iterdir()}
    needed = {"README.md", "card.json", "config.json", "generation_config.json", "model.safetensors", "recipe.yaml"}
    text = {"held_out.jsonl", "tokenizer.json", "tokenizer_config.json"} if record.held_out else set()
    questions = set() if record.held_out else {"examples.json"}
    assert files == needed | text | questions | {"results.json"}
    assert not any((folder / name).exists() for name in code_files())
    recipe = load_recipe(folder / "recipe.yaml")
    assert recipe.model.attention_type == model.config.attention_type
    for value in yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["data"].values():
        assert "/" not in str(value)


@pytest.mark.parametrize("name", short_run(SHIPPED, SHIPPED[:1]))
def test_a_model_of_the_package_has_its_stated_numbers(name: str) -> None:
    check_model(name)
    if name.startswith("novels"):
        result = run("generate", name, "--prompt", "It was", "--max-new-tokens", 5)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith("It was")


def test_the_models_of_the_package_are_small() -> None:
    total = sum(file.stat().st_size for file in shipped_models.WEIGHTS.rglob("*") if file.is_file())
    assert total <= 12_000_000


@pytest.mark.parametrize("name", short_run(NAMES, NAMES[:1]))
def test_a_packed_model_has_its_stated_numbers(name: str, weights: Path) -> None:
    before = list(left(weights))
    check_model(name)
    assert list(left(weights)) == before  # the package may be read-only


@pytest.mark.parametrize("name", short_run(NAMES, NAMES[1:]))
def test_the_cards_code_runs(name: str, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = (weights / name / "README.md").read_text(encoding="utf-8")
    namespace: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(code, namespace)
    assert namespace["model"].config.attention_type == "diff"
    if name == "novels-diff":
        assert namespace["tokenizer"]("to be")["input_ids"] == [116, 111, 32, 98, 101]
        return
    task = namespace["task"]
    assert isinstance(task, RetrievalBatches)
    assert namespace["answers"].shape == (1, task.queries)
    assert capsys.readouterr().out.count("?") == task.queries


def test_text_that_training_has_seen_is_not_what_is_measured_on(packer: Any, tmp_path: Path, text_run: Path) -> None:
    for number in range(20):
        document = "".join(f"Book {number}, paragraph {each}.\n\n" for each in range(400))
        (tmp_path / f"book-{number}.txt").write_text(document, encoding="utf-8")
    settings = [f"data.paths={tmp_path}", "data.validation_fraction=0.1"]
    passages = packer.held_out_passages(packer.documents_of(load_recipe(text_run / "recipe.yaml", settings)))
    seen, kept = ("".join(part(TextFiles([tmp_path]), 0.1)) for part in (training_text, validation_text))
    assert len(passages) > 1
    assert sum(len(passage["text"]) for passage in passages) <= packer.HELD_OUT_CHARACTERS
    for passage in passages:
        paragraphs = passage["text"].split("\n\n")
        assert passage["text"] in kept
        assert paragraphs[0] not in seen
        assert passage["source"] == f"book-{paragraphs[0].split()[1][:-1]}"
        assert re.fullmatch(r"Book \d+, paragraph \d+\.", paragraphs[0])  # a whole one
        assert re.fullmatch(r"Book \d+, paragraph \d+\.", paragraphs[-1])


def test_no_passage_is_of_a_protected_novel(packer: Any, tmp_path: Path) -> None:
    (name,) = packer.PROTECTED
    documents = []
    for stem in (name, "ENG18400_Trollope"):
        file = tmp_path / f"{stem}.txt"
        file.write_text("A paragraph.\n\n" * 100, encoding="utf-8")
        documents.append(packer.Document(file, file.stat().st_size, 0))
    assert [passage["source"] for passage in packer.held_out_passages(documents)] == ["ENG18400_Trollope"]


def test_weights_are_rounded_once_and_computed_in_float32(text_run: Path, weights: Path) -> None:
    exact = AutoModelForCausalLM.from_pretrained(text_run / "model").state_dict()
    stored = AutoModelForCausalLM.from_pretrained(pretrained("novels-diff")).state_dict()
    for name, value in stored.items():
        assert value.dtype == torch.float32
        expected = exact[name] if ".lam." in name else exact[name].bfloat16().float()
        assert torch.equal(value, expected), name
    size = (weights / "novels-diff" / "model.safetensors").stat().st_size
    assert size < 0.7 * (text_run / "model" / "model.safetensors").stat().st_size
    notes = read_results(weights / "novels-diff" / "results.json").settings["notes"]
    assert "Before the weights were rounded to bfloat16, the loss on this text was" in notes[0]


def test_nothing_of_this_machine_is_in_a_folder(weights: Path, text_file: Path, text_run: Path) -> None:
    for file in (file for file in weights.rglob("*") if file.is_file() and file.suffix != ".safetensors"):
        text = file.read_text(encoding="utf-8")
        assert [place for place in (text_file.parent, text_run.parent, weights) if str(place) in text] == [], file
    assert load_recipe(weights / "novels-diff" / "recipe.yaml").data.paths == [text_file.name]  # type: ignore[union-attr]


def test_a_copy_to_share_has_the_code_files_and_the_card(weights: Path, tmp_path: Path) -> None:
    assert "auto_map" not in (weights / "novels-diff" / "config.json").read_text()
    succeeds(run("export", "novels-diff", tmp_path / "mine"))
    assert set(code_files()) < {file.name for file in (tmp_path / "mine").iterdir()}
    assert "auto_map" in (tmp_path / "mine" / "config.json").read_text()
    card = (tmp_path / "mine" / "README.md").read_text(encoding="utf-8")
    stated = read_results(weights / "novels-diff" / "results.json").records[0].value
    record = read_record(weights / "novels-diff" / "card.json", CardRecord)
    for text in (f"{stated:.3f}", "license: mit", record.limits, record.commit):
        assert text in card
    assert "diff_transformer.pretrained" not in card


def test_eval_takes_a_name_and_the_text_beside_the_model(weights: Path, text_file: Path, tmp_path: Path) -> None:
    result = succeeds(run("eval", "novels-diff", "--output", tmp_path / "results.json"))
    assert result.stderr.splitlines() == [
        "Measured on held_out.jsonl in the model's folder, text that was kept from training.",
        "Loading novels-diff …",
        "Measuring …",
    ]
    files = (tmp_path / "results.json", weights / "novels-diff" / "results.json")
    assert result.stdout.split("\n")[0].strip() == "Evaluation of novels-diff"
    values = [[one.value for one in read_results(file).records] for file in files]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert "held_out" not in run("eval", "novels-diff", "--text", text_file).stderr
    needles = succeeds(run("eval", "needles-diff"))
    assert needles.stderr.splitlines() == ["Loading needles-diff …", "Measuring …"]
    assert "chance" in needles.stdout


def test_generate_without_a_checkpoint_takes_the_model_of_the_package(weights: Path) -> None:
    result = succeeds(run("generate", "--prompt", "to be", "--max-new-tokens", 8, "--greedy"))
    assert (
        result.stdout == run("generate", "novels-diff", "--prompt", "to be", "--max-new-tokens", 8, "--greedy").stdout
    )
    assert result.stderr == (
        "No checkpoint is named, so this is novels-diff: DIFF with 0.01M parameters, trained on 1 English novels. It "
        f"comes with the package; {weights / 'novels-diff' / 'README.md'} says what it can do.\n"
    )
    listed = run("generate", "--list")
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == NAMES
    fails(run("generate", "needles-diff", "--prompt", "x"), "has no tokenizer")


def test_a_package_without_models_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped_models, "WEIGHTS", tmp_path / "weights")
    assert pretrained_names() == []
    with pytest.raises(ValueError, match="'novels-diff': this copy of the package was built without trained models"):
        pretrained("novels-diff")
    fails(
        run("generate", "--prompt", "x"),
        "No CHECKPOINT is named, and this copy of the package was built without its model novels-diff",
        "`diff-lab train language`",
    )
    assert run("generate", "--list").stdout == "This copy of the package was built without trained models.\n"
    fails(run("eval", "novels-diff"), "The checkpoint 'novels-diff' does not exist.")


@pytest.mark.all
def test_a_program_needs_one_import_and_the_name(weights: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nimport diff_transformer\nimport diff_transformer.shipped_models\n"
        "diff_transformer.shipped_models.WEIGHTS = Path(sys.argv[1])\n"
        "from transformers import pipeline\n"
        "writer = pipeline('text-generation', model=diff_transformer.pretrained('novels-diff'))\n"
        "print(type(writer.model).__name__, writer('to be', max_new_tokens=2)[0]['generated_text'][:5])"
    )
    done = fresh.run(code, weights, warnings_are_errors=True)
    assert (done.returncode, done.stdout) == (0, "DiffTransformerForCausalLM to be\n"), done.stderr[-1000:]


def test_an_unknown_name_is_answered_with_the_known_ones(weights: Path) -> None:
    assert pretrained_names() == NAMES
    message = "The package has no model 'novel-diff', only needles-diff, novels-diff; did you mean 'novels-diff'?"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        pretrained("novel-diff")
    fails(run("eval", "novel-diff"), "The checkpoint 'novel-diff' does not exist; did you mean 'novels-diff'?")
    fails(run("eval", "nowhere/at/all"), "does not exist; the package has needles-diff, novels-diff.")


def test_a_folder_of_the_same_name_comes_first(
    weights: Path, retrieval_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(retrieval_run / "model", tmp_path / "novels-diff")
    fails(run("generate", "novels-diff", "--prompt", "x"), "has no tokenizer")


def left(root: Path) -> Iterator[tuple[str, int]]:
    return ((str(file), file.stat().st_mtime_ns) for file in sorted(root.rglob("*")))


def test_what_does_not_suit_is_refused_and_changes_nothing(
    packer: Any, packed: Path, text_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(left(packed))

    def refused(name: str, run: Path, match: str, *, overwrite: bool = False) -> None:
        with pytest.raises((ValueError, OSError), match=match):
            packer.pack(name, run, packed, "0123abc", overwrite=overwrite)
        assert list(left(packed)) == before

    refused("novels-diff", text_run, "exists already")
    refused("books-diff", text_run, r"is called novels\|needles-TYPE, not 'books-diff'")
    refused("novels-softmax", text_run, "has attention type 'diff' and data of the kind 'text', which is not what")
    refused("needles-diff", text_run, "data of the kind 'text'", overwrite=True)
    refused("novels-diff", text_run / "checkpoints" / "step-000002", "not the folder of a finished run", overwrite=True)
    monkeypatch.setattr(packer, "ROUNDING", -1.0)
    refused("novels-diff", text_run, "Rounding the weights to bfloat16 changes the loss from", overwrite=True)


def test_a_model_can_be_packed_anew_and_others_stay(
    packer: Any, packed: Path, retrieval_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = shutil.copytree(packed, tmp_path / "weights")
    novels = dict(left(root / "novels-diff"))
    command = ["needles-diff", str(retrieval_run), "--commit", "feedbeef", "--output", str(root)]
    with pytest.raises(SystemExit, match=r"error: .* exists already"):
        packer.main(command)
    packer.main([*command, "--overwrite"])
    assert "model.safetensors (" in capsys.readouterr().out
    assert read_record(root / "needles-diff" / "card.json", CardRecord).commit == "feedbeef"
    assert dict(left(root / "novels-diff")) == novels
    assert sorted(path.name for path in root.iterdir()) == NAMES


def test_the_page_shows_the_models_that_there_are(weights: Path) -> None:
    filler = program("fill_readme")
    part = filler.shipped_models(weights.parent)
    record = read_record(weights / "novels-diff" / "card.json", CardRecord)
    loss = read_results(weights / "novels-diff" / "results.json").records[1]
    row = next(line for line in part.splitlines() if line.startswith("| [novels-diff]("))
    assert record.summary in row
    assert f"validation loss (nats/token) ↓ {loss.value:.3f}" in row
    assert (weights.parent / re.findall(r"\((.*?)\)", row)[0]).is_file()
    namespace: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", part, re.DOTALL)[0], namespace)
    assert namespace["model"].config.attention_type == "diff"
