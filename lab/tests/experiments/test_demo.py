"""The demo end to end with models that are smaller still, in this process unless a test says otherwise."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import diff_lab.experiments.demo as demo
from diff_lab.data import RetrievalBatches
from diff_lab.experiments.demo import run_demo
from diff_lab.learning import ACCURACY_CURVE, LOSS_CURVE, curves_of
from diff_lab.measure import standard
from diff_lab.measure.retrieval import FIRST_QUERY
from diff_lab.results_files import read_record, read_results
from diff_lab.train import Progress, TrainingInterrupted, load_recipe
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.explorer import Example
from small_experiment import Heard
from tiny_demo import TINY


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "FAST_DEMO", TINY)
        patch.setattr(demo, "SEQUENCES", 16)
        patch.setattr(standard, "VALIDATION_SEQUENCES", 16)
        patch.setattr(demo, "default_workers", lambda *_, **__: 1)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text("A short text about nothing in particular, repeated. " * 400, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return run_demo(tmp_path_factory.mktemp("demo") / "run", text=[text], seed=3, fast=True)


def test_both_twins_are_measured_on_both_tasks(finished: Path) -> None:
    results = read_results(finished / "results.json")
    measured = {(record.name, record.variant) for record in results.records}
    for variant in ("diff", "softmax"):
        for name in ("retrieval/accuracy", "retrieval/attention_noise_share", "language/bits_per_byte"):
            assert (name, variant) in measured
    assert results.settings["seed"] == 3
    assert "attention_type" not in results.settings["retrieval"]["model"]


def test_twins_differ_in_lambda_and_norm_alone(finished: Path) -> None:
    counts = {
        r.variant: r.value for r in read_results(finished / "results.json").records if r.name == "language/parameters"
    }
    config = DiffTransformerForCausalLM.from_pretrained(finished / "language-diff" / "model").config
    assert counts["diff"] - counts["softmax"] == config.num_hidden_layers * 6 * config.head_dim


def test_the_question_is_the_first_of_a_sequence_with_the_place_of_its_answer(finished: Path) -> None:
    example = read_record(finished / "question.json", Example)
    tokens, answer = example.text.split(), example.answer
    assert answer is not None
    assert (tokens.count("?"), tokens[-2], len(tokens)) == (1, "?", answer.query + 1)
    assert tokens[answer.begin - 1] == tokens[-1], "the key that is asked for"
    assert (tokens[answer.begin][0], answer.end) == ("v", answer.begin + 1)


def test_resuming_a_finished_demo_trains_nothing(finished: Path, text: Path) -> None:
    before = read_results(finished / "results.json").records

    heard = Heard()
    run_demo(finished, text=[text], seed=3, fast=True, resume=True, progress=heard)
    assert heard.steps == []
    after = read_results(finished / "results.json").records
    assert [(r.name, r.variant, r.value) for r in after] == [(r.name, r.variant, r.value) for r in before]


def test_validation_curves_are_of_first_queries_and_have_their_levels(finished: Path) -> None:
    results = read_results(finished / "results.json")
    curves = curves_of(results.records)
    assert [(one.name, one.variant) for one in curves] == [
        (name, variant) for name in (ACCURACY_CURVE, LOSS_CURVE) for variant in demo.VARIANTS
    ]
    assert all(one.by_seed[3].steps == (2, 4, 6) for one in curves)
    levels = {one.name: one.levels() for one in results.baselines}
    assert levels[ACCURACY_CURVE] == levels[FIRST_QUERY]
    assert set(levels[ACCURACY_CURVE]) == {"chance", "floor"}, "no answer is in view"


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_both_variants_train_at_the_same_time(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They become the models that they become one after the other; each has one thread here in either case."""
    monkeypatch.setattr(demo, "default_workers", lambda *_, **__: 2)
    heard = Heard()
    folder = run_demo(tmp_path / "run", text=[text], seed=3, fast=True, progress=heard)
    assert heard.runs == ["retrieval, DIFF", "retrieval, Transformer", "language, DIFF", "language, Transformer"]
    assert "are trained at the same time, on two tasks" in heard.messages[0]
    assert "Language: 6 steps on" in heard.messages[0]
    assert "In all a minute or so on two processor cores." in heard.messages[0]
    for run in ("retrieval-softmax", "language-diff"):
        weights = [
            DiffTransformerForCausalLM.from_pretrained(one / run / "model").state_dict() for one in (folder, finished)
        ]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_an_interrupted_demo_resumes(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "default_workers", lambda *_, **__: 2)

    class StopsAtLanguage(Progress):
        def run(self, name: str) -> Progress:
            if name == "language, Transformer":
                signal.raise_signal(signal.SIGTERM)
            return self

    folder = tmp_path / "run"
    with pytest.raises(TrainingInterrupted, match="--resume"):
        run_demo(folder, text=[text], fast=True, progress=StopsAtLanguage())
    assert (folder / "retrieval-diff" / "model").is_dir()
    assert not (folder / "results.json").exists()
    with pytest.raises(FileExistsError, match="already holds a demo"):
        run_demo(folder, text=[text], fast=True)
    assert (run_demo(folder, text=[text], fast=True, resume=True) / "results.json").is_file()


@pytest.mark.parametrize(
    ("diff", "softmax", "without", "row"),
    [
        (".xxx", "x.xx", "..x.", 3),
        (".xxx", "x.xx", ".xxx", 2),
        ("..x.", "xx..", "....", 2),
        ("....", "....", "....", 0),
    ],
    ids=["both, by λ", "both", "DIFF", "none"],
)
def test_the_question_is_one_that_is_answered_if_there_is_one(
    diff: str, softmax: str, without: str, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = RetrievalBatches(num_pairs=2, length=20, num_queries=2, num_keys=9, num_values=9, num_noise=9)
    answers = [torch.tensor([[letter == "x", True] for letter in one]) for one in (diff, softmax, without)]
    monkeypatch.setattr(demo, "EXAMPLES", 4)
    monkeypatch.setattr(demo, "retrieval_answers", lambda *_: answers.pop(0))
    config = DiffTransformerConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    models = dict.fromkeys(demo.VARIANTS, DiffTransformerForCausalLM(config))
    text = demo.example_question(models, batches, seed=0).text.split()
    assert text == [batches.words()[token] for token in batches.sample(4, 0).input_ids[row, : len(text)]]


def test_a_folder_that_is_taken(finished: Path, text: Path, tmp_path: Path) -> None:
    before = (finished / "results.json").read_bytes()
    with pytest.raises(FileExistsError, match="already holds a demo"):
        run_demo(finished, text=[text], fast=True)
    assert (finished / "results.json").read_bytes() == before
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no demo"):
        run_demo(tmp_path, text=[text], fast=True, overwrite=True)
    with pytest.raises(ValueError, match="not both"):
        run_demo(finished, fast=True, resume=True, overwrite=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("absent.txt", "absent.txt"), ("empty.txt", "There is no text"), ("table.csv", "table.csv")],
)
def test_bad_text_is_refused_before_any_work(tmp_path: Path, wrong: str, message: str) -> None:
    if wrong != "absent.txt":
        (tmp_path / wrong).write_text("" if wrong == "empty.txt" else "a,b")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_demo(tmp_path / "run", text=[tmp_path / wrong], fast=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.all
def test_overwriting_deletes_all_of_the_old_demo_before_the_first_run(
    finished: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "notes.txt").write_text("mine")
    before = sorted(folder.rglob("*"))
    with pytest.raises(FileNotFoundError):
        run_demo(folder, text=[tmp_path / "absent.txt"], fast=True, overwrite=True)
    with pytest.raises(ValueError, match=r"was started with another recipe.*choose another --output"):
        run_demo(folder, text=[text], seed=4, fast=True, resume=True)
    assert sorted(folder.rglob("*")) == before

    class Interrupted(Progress):
        def start(self, total: int, description: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(folder, text=[text], seed=4, fast=True, overwrite=True, progress=Interrupted())
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["notes.txt"]
    assert not list(folder.glob("*/model"))
    run_demo(folder, text=[text], seed=4, fast=True, resume=True)
    assert read_results(folder / "results.json").settings["seed"] == 4
    assert {load_recipe(recipe).train.seed for recipe in folder.glob("*/recipe.yaml")} == {4}
