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
from diff_lab.record import AttentionExample
from diff_lab.results_files import read_record, read_results
from diff_lab.train import Progress, TrainingInterrupted, load_recipe
from diff_transformer import DiffTransformerForCausalLM
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


def test_example_maps_are_the_difference(finished: Path) -> None:
    example = read_record(finished / "attention.json", AttentionExample)
    maps = example.maps["diff"]
    for a1, a2, difference in zip(maps["A1"], maps["A2"], maps["difference"], strict=True):
        for first, second, weight in zip(a1, a2, difference, strict=True):
            assert weight == pytest.approx(first - example.lambda_ * second, abs=3e-5)
    assert set(example.maps["softmax"]) == {"A"}
    assert example.answered.keys() == {"diff", "softmax"}
    assert example.tokens[example.query_position].startswith("k")
    assert all(example.tokens[position].startswith("v") for position in example.answer_positions)


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


def answers(*rows: str) -> torch.Tensor:
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def test_the_query_that_is_shown_is_answered_and_was_not_asked_before() -> None:
    batches = RetrievalBatches(
        num_pairs=2, length=20, num_queries=4, repeats=True, num_keys=4, num_values=4, num_noise=4
    )
    sample = batches.sample(3, 0)
    sample.answer_spans[:] = torch.tensor([[1, 1, 3, 1], [3, 1, 3, 1], [1, 3, 1, 3]])
    none = answers("....", "....", "....")

    def chosen(diff: torch.Tensor, softmax: torch.Tensor, without: torch.Tensor = none) -> tuple[int, int]:
        return demo._first_query(sample, {"diff": diff, "softmax": softmax}, without)

    every = answers(".xx.", "xxxx", "xxxx")
    assert chosen(every, answers(".x..", ".x..", "xx..")) == (1, 1)
    assert chosen(every, answers(".x..", ".x..", "xx.."), without=answers("....", "xx..", "....")) == (2, 0)
    assert chosen(every, answers(".x..", ".x..", "xx.."), without=every) == (1, 1)
    assert chosen(answers("....", "..x.", "x..."), answers("..x.", "....", "....")) == (2, 0)
    assert chosen(answers("....", "..x.", "...."), answers(".x..", "....", ".x..")) == (2, 1)
    assert chosen(none, none) == (0, 0)


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
