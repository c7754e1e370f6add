"""The demo end to end with models that are smaller still, in this process unless a test says otherwise."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import diff_lab.experiments.demo as demo
from diff_lab.data import RecallBatches
from diff_lab.experiments.demo import run_demo
from diff_lab.learning import ACCURACY_CURVE, curves_of
from diff_lab.results_files import read_results
from diff_lab.train import Progress, TrainingInterrupted, load_recipe
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from small_runs import Watcher
from tiny_demo import TINY


@pytest.fixture(scope="module", autouse=True)
def _tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "FAST_DEMO", TINY)
        patch.setattr(demo, "SEQUENCES", 16)
        patch.setattr(demo, "default_workers", lambda *_, **__: 1)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_demo(tmp_path_factory.mktemp("demo") / "run", seed=3, fast=True)


def test_both_variants_are_measured_and_diff_with_other_lambdas(finished: Path) -> None:
    results = read_results(finished / "results.json")
    values = {(one.name, one.coordinates.label, one.variant): one.value for one in results.records}
    for variant in demo.VARIANTS:
        for pairs in (2, 4):
            assert ("noise/accuracy", f"{pairs} pairs", variant) in values
    by_lambda = {label: value for (name, label, _), value in values.items() if name == "noise/accuracy_by_lambda"}
    assert list(by_lambda) == [f"λ × {factor:g}" for factor in (0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2)]
    # One number everywhere: the curve ends, and λ × 1 is, what is measured at the most pairs.
    ends = {one.variant: one.by_seed[3].values[-1] for one in curves_of(results.records)}
    assert ends == {variant: values["noise/accuracy", "4 pairs", variant] for variant in demo.VARIANTS}
    assert by_lambda["λ × 1"] == ends["diff"]
    assert all(one.seed in (3, None) for one in results.records)
    assert "attention_type" not in results.settings["recall"]["model"]


def test_twins_differ_in_lambda_and_norm_alone(finished: Path) -> None:
    counts = {
        r.variant: r.value for r in read_results(finished / "results.json").records if r.name == "training/parameters"
    }
    config = DiffTransformerForCausalLM.from_pretrained(finished / "diff" / "model").config
    assert counts["diff"] - counts["softmax"] == config.num_hidden_layers * 6 * config.head_dim


def test_the_view_is_of_a_question_with_the_place_of_its_answer(finished: Path) -> None:
    view = read_results(finished / "results.json").settings["view"]
    words = view["words"]
    assert len(words) == 9
    assert words[view["answer"] - 1] == words[-1], "the key that is asked for"
    assert words[view["answer"]].startswith("v")
    learned, without = (torch.tensor(view[name]) for name in ("learned", "without"))
    assert learned.shape == without.shape == (9, 9)
    assert (without.sum(-1) - 1).abs().max() < 1e-5, "ordinary attention"
    assert learned.sum(-1).max() < 0.9


def test_resuming_a_finished_demo_trains_nothing(finished: Path) -> None:
    before = read_results(finished / "results.json").records
    heard = Watcher()
    run_demo(finished, seed=3, fast=True, resume=True, progress=heard)
    assert heard.steps == []
    after = read_results(finished / "results.json").records
    assert [(r.name, r.variant, r.value) for r in after] == [(r.name, r.variant, r.value) for r in before]


def test_validation_curves_have_their_levels(finished: Path) -> None:
    results = read_results(finished / "results.json")
    curves = curves_of(results.records)
    assert [(one.name, one.variant) for one in curves] == [(ACCURACY_CURVE, variant) for variant in demo.VARIANTS]
    assert all(one.by_seed[3].steps == (2, 4, 6) for one in curves)
    levels = {(one.name, one.coordinates.label): one.levels() for one in results.baselines}
    assert levels[ACCURACY_CURVE, ""] == levels["noise/accuracy", "4 pairs"]
    assert set(levels[ACCURACY_CURVE, ""]) == {"chance", "floor"}, "no answer is in view"


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_both_variants_train_at_the_same_time(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They become the models that they become one after the other; each has one thread here in either case."""
    monkeypatch.setattr(demo, "default_workers", lambda *_, **__: 2)
    heard = Watcher()
    folder = run_demo(tmp_path / "run", seed=3, fast=True, progress=heard)
    assert heard.runs == ["DIFF", "Transformer"]
    assert "trained at the same time, for 6 steps each" in heard.messages[0]
    assert "In all a minute on two idle processor cores." in heard.messages[0]
    for run in demo.VARIANTS:
        weights = [
            DiffTransformerForCausalLM.from_pretrained(one / run / "model").state_dict() for one in (folder, finished)
        ]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.all
@pytest.mark.usefixtures("forked_workers")
def test_an_interrupted_demo_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "default_workers", lambda *_, **__: 2)

    class StopsAtOnce(Progress):
        def start(self, total: int, description: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    folder = tmp_path / "run"
    with pytest.raises(TrainingInterrupted, match="--resume"):
        run_demo(folder, fast=True, progress=StopsAtOnce())
    assert not (folder / "results.json").exists()
    with pytest.raises(FileExistsError, match="already holds a demo"):
        run_demo(folder, fast=True)
    assert (run_demo(folder, fast=True, resume=True) / "results.json").is_file()


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
    task = RecallBatches(pairs=2, questions=1, tokens=9)
    answers = [torch.tensor([[letter == "x"] for letter in one]) for one in (diff, softmax, without)]
    monkeypatch.setattr(demo, "SEQUENCES", 4)
    monkeypatch.setattr(demo, "retrieval_answers", lambda *_: answers.pop(0))
    config = DiffTransformerConfig(vocab_size=18, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    models = dict.fromkeys(demo.VARIANTS, DiffTransformerForCausalLM(config))
    words = demo.opening_view(models, task)["words"]
    assert words == [task.words()[token] for token in task.sample(4, 0).input_ids[row, :-1]]


def test_a_folder_that_is_taken(finished: Path, tmp_path: Path) -> None:
    before = (finished / "results.json").read_bytes()
    with pytest.raises(FileExistsError, match="already holds a demo"):
        run_demo(finished, fast=True)
    assert (finished / "results.json").read_bytes() == before
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds no demo"):
        run_demo(tmp_path, fast=True, overwrite=True)
    with pytest.raises(ValueError, match="not both"):
        run_demo(finished, fast=True, resume=True, overwrite=True)


@pytest.mark.all
def test_overwriting_deletes_all_of_the_old_demo_before_the_first_run(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "notes.txt").write_text("mine")
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=r"was started with another recipe.*choose another --output"):
        run_demo(folder, seed=4, fast=True, resume=True)
    assert sorted(folder.rglob("*")) == before

    class Interrupted(Progress):
        def start(self, total: int, description: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(folder, seed=4, fast=True, overwrite=True, progress=Interrupted())
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["notes.txt"]
    assert not list(folder.glob("*/model"))
    run_demo(folder, seed=4, fast=True, resume=True)
    assert read_results(folder / "results.json").settings["seed"] == 4
    assert {load_recipe(recipe).train.seed for recipe in folder.glob("*/recipe.yaml")} == {4}
