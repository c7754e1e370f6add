"""Training: resuming, overwriting, accumulating, stopping."""

import json
import os
import shutil
import signal
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from diff_lab.data.batches import ALL_ROWS
from diff_lab.train import (
    Data,
    DivergenceError,
    Recipe,
    TrainingInterrupted,
    build_data,
    build_model,
    load_recipe,
    read_metrics,
    train,
)
from diff_lab.train.loop import Interrupt
from diff_lab.train.run_setup import locked
from diff_transformer.model import DiffTransformerForCausalLM
from small_runs import TIMES, Watcher, assert_equal, timeless_metrics, weights
from small_runs import small_recipe as recipe


def text_recipe(path: Path, **data: Any) -> Recipe:
    return recipe(steps=2, data={"kind": "text", "paths": [str(path)], "length": 16, "batch_size": 4} | data)


def assert_identical(first: Path, second: Path) -> None:
    assert_equal(weights(first), weights(second))


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoint_names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


class Fixed:
    """Batches given by a function of the step."""

    def __init__(self, make: Callable[[int], dict[str, Tensor]]) -> None:
        self.vocab_size, self.source = 20, ""
        self.make = make

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        return {name: x[rows] for name, x in self.make(step).items()}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        yield self.train_batch(0)


def unequal(step: int) -> dict[str, Tensor]:
    """A batch whose rows have from one to eight targets, and a label of the first token, which is none."""
    generator = torch.Generator().manual_seed(step)
    input_ids = torch.randint(0, 20, (8, 12), generator=generator)
    keep = torch.arange(12) > torch.arange(3, 11).flip(0)[:, None]
    keep[:, 0] = True
    return {"input_ids": input_ids, "labels": torch.where(keep, input_ids, -100)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of a run that nothing has interrupted."""
    return train(recipe(), tmp_path_factory.mktemp("whole") / "run").model_folder


def test_a_run_leaves_what_it_promises(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher()
    calls = []

    def evaluate(model: Any, step: int) -> dict[str, float]:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert step not in watcher.steps  # it is shown after, with these numbers beside it
        calls.append(step)
        return {"validation/loss": float(step)}

    settings = recipe(log_every=2, evaluate_every=3, checkpoint_every=4)
    run = train(settings, tmp_path / "run", progress=watcher, on_evaluate=evaluate)
    assert capfd.readouterr() == ("", "")
    assert calls == [3, 6]
    assert watcher.steps == [1, 2, 3, 4, 5, 6]
    assert watcher.started == [(6, "test · diff")]
    assert watcher.stopped == 1
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 3, 4, 6]
    assert [line.get("validation/loss") for line in lines] == [None, 3.0, None, 6.0]
    logged = {"step", "loss", "learning_rate", "grad_norm", "lambdas", *TIMES}
    assert set(lines[0]) == logged
    assert set(lines[-1]) == logged | {"validation/loss"}
    assert len(lines[0]["lambdas"]) == 2
    assert lines[1]["tokens_per_second"] > 0
    assert lines[1]["seconds"] < lines[-1]["seconds"] == pytest.approx(run.seconds)
    assert watcher.messages == ["1 process (cpu), float32"]
    assert run.last == lines[-1]
    assert run.seconds > 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "examples.json",
        "metrics.jsonl",
        "model",
        "recipe.yaml",
        "tensorboard",
    ]
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert checkpoint_names(tmp_path / "run") == ["step-000004", "step-000006"]
    model = DiffTransformerForCausalLM.from_pretrained(run.model_folder)
    assert model.num_parameters() == run.parameters
    batch = build_data(settings).batches.train_batch(1)["input_ids"]
    assert torch.equal(model(batch).logits, run.model(batch).logits)
    endings = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    endings = {ending for ending in endings if not ending.removeprefix(".").isdigit()}  # TensorBoard's event files
    assert endings <= {".yaml", ".json", ".jsonl", ".safetensors", ".py"}  # nothing is pickled


@pytest.mark.parametrize(
    ("model", "train_settings"),
    [
        ({}, {}),
        ({"attention_type": "softmax"}, {"accumulation": 2}),
        ({"attention_type": "diff_v2"}, {"optimizer": "muon", "accumulation": 2}),
        ({"tie_word_embeddings": True, "attention_dropout": 0.1}, {}),
    ],
    ids=str,
)
def test_an_interrupted_and_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, model: dict[str, Any], train_settings: dict[str, Any]
) -> None:
    settings = recipe(model=model, checkpoint_every=2, **train_settings)
    uninterrupted = train(settings, tmp_path / "whole")
    watcher = Watcher(interrupt_after=3)
    with pytest.raises(TrainingInterrupted, match=r"Stopped after step 3 of 6; .*step-000003 .*--resume") as raised:
        train(settings, tmp_path / "halves", progress=watcher)
    assert "\n" not in str(raised.value)
    assert (watcher.steps, watcher.stopped) == ([1, 2, 3], 1)
    assert not (tmp_path / "halves" / "model").exists()
    torch.rand(3)  # the state of the process does not matter
    watcher = Watcher()
    resumed = train(settings, tmp_path / "halves", resume=True, progress=watcher)
    assert watcher.steps == [4, 5, 6]
    assert_identical(uninterrupted.model_folder, resumed.model_folder)
    whole, halves = (tmp_path / name / "checkpoints" / "step-000006" for name in ("whole", "halves"))
    for name in ("model", "optimizer", "random"):
        assert (whole / f"{name}.safetensors").read_bytes() == (halves / f"{name}.safetensors").read_bytes()
    states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in (whole, halves)]
    assert states[0] | {"seconds": 0} == states[1] | {"seconds": 0}
    lines = timeless_metrics(uninterrupted.folder)
    assert lines == timeless_metrics(resumed.folder)
    assert (lines[0]["lambdas"] is None) == ("attention_type" in model)


def test_a_signal_in_the_last_step_leaves_the_model_and_is_not_lost(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(TrainingInterrupted, match=r"Stopped after the last step; .*model holds the trained model"):
        train(recipe(), tmp_path / "run", progress=Watcher(interrupt_after=6))
    assert_identical(tmp_path / "run" / "model", whole)


@pytest.mark.parametrize("changed", ["the first batch", "a later text"])
def test_resuming_on_other_data_is_refused(tmp_path: Path, changed: str) -> None:
    train(recipe(steps=1), tmp_path / "run", data=Data(Fixed(unequal)))
    other = Fixed((lambda step: unequal(step + 1)) if changed == "the first batch" else unequal)
    other.source = changed
    with pytest.raises(ValueError, match="The data is not that of the run"):
        train(recipe(steps=1, keep_checkpoints=9), tmp_path / "run", resume=True, data=Data(other))
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == recipe(steps=1)


def test_a_run_is_never_overwritten_unasked(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe(steps=2), folder)
    before = files_of(folder)
    with pytest.raises(FileExistsError, match=r"already holds a run; .*--resume.*--overwrite"):
        train(recipe(), folder)
    with pytest.raises(ValueError, match="not both"):
        train(recipe(), folder, resume=True, overwrite=True)
    assert before == files_of(folder)
    (folder / "recipe.yaml").write_bytes(BOM_UTF8 + before[folder / "recipe.yaml"])  # as an editor may leave it
    with pytest.raises(FileExistsError, match="already holds a run"):
        train(recipe(), folder)


def test_overwriting_deletes_what_a_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(recipe(steps=3), folder)
    (folder / "notes.txt").write_text("mine")
    train(recipe(steps=2), folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000002"]
    assert len(read_metrics(folder / "metrics.jsonl")) == 2
    assert len(list((folder / "tensorboard").iterdir())) == 1


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: somebody else's\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path, tmp_path / "file"):
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match="not a run of ours"):
                train(recipe(), folder, overwrite=overwrite)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        train(recipe(), tmp_path, resume=True)
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        train(recipe(), tmp_path / "nowhere", resume=True)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    train(recipe(steps=1), tmp_path / "empty")


def test_bad_data_is_found_before_a_run_is_overwritten(tmp_path: Path) -> None:
    train(recipe(steps=1), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        train(text_recipe(tmp_path / "missing.txt"), tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "model").exists()


def test_accumulation_does_not_change_the_result(tmp_path: Path) -> None:
    """The parts of a batch have unequal numbers of targets: a mean of the parts' means would be another loss."""
    data = Data(Fixed(unequal))
    one, many = (train(recipe(accumulation=parts, steps=3), tmp_path / str(parts), data=data) for parts in (1, 4))
    for first, second in zip(*(read_metrics(run.folder / "metrics.jsonl") for run in (one, many)), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
        assert first["grad_norm"] == pytest.approx(second["grad_norm"], rel=1e-4)
    left, right = weights(one.model_folder), weights(many.model_folder)
    assert all(torch.allclose(left[name], right[name], atol=1e-4) for name in left)
    batch = unequal(1)
    logits = build_model(recipe(), data)(batch["input_ids"]).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert read_metrics(many.folder / "metrics.jsonl")[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_twins_start_with_the_same_weights_and_see_the_same_data(tmp_path: Path) -> None:
    settings = recipe()
    data = build_data(settings)
    twin = recipe(model={"attention_type": "softmax"})
    diff, softmax = (dict(build_model(each, data).named_parameters()) for each in (settings, twin))
    assert set(softmax) < set(diff)
    assert all(torch.equal(softmax[name], diff[name]) for name in softmax)
    reseeded = dict(build_model(recipe(seed=1), data).named_parameters())
    assert not torch.equal(reseeded["lm_head.weight"], diff["lm_head.weight"])
    matrices = [parameter for parameter in diff.values() if parameter.ndim == 2]
    assert all(0.015 < parameter.std() < 0.025 for parameter in matrices)
    assert len({parameter.flatten()[0].item() for parameter in matrices}) == len(matrices)  # no stream twice
    softmax_data = build_data(twin)
    assert torch.equal(data.batches.train_batch(5)["input_ids"], softmax_data.batches.train_batch(5)["input_ids"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_within_seconds_is_the_same_wish(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that signals every process of a job signals torchrun, too, which hands it on."""
    with Interrupt() as interrupt:
        assert not interrupt.requested
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert interrupt.requested
        assert interrupt.signal == number
    monkeypatch.setattr("diff_lab.train.loop.SAME_WISH_SECONDS", 0.0)
    with Interrupt():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_process_whose_launcher_is_gone_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one that torchrun has started: a shell may go and leave its program behind."""
    parent = os.getppid()
    with Interrupt() as alone:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        with Interrupt() as launched:
            assert not launched.requested
            monkeypatch.setattr(os, "getppid", lambda: parent + 1)
            assert launched.requested
            assert not alone.requested


def test_one_process_at_a_time_trains_in_a_folder(tmp_path: Path) -> None:
    train(recipe(), tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with locked(tmp_path / "run"):
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(ValueError, match=r"Another process trains in '.*run' now: wait for it, or end it\."):
                train(recipe(), tmp_path / "run", **options)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    train(recipe(), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_run_without_a_usable_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        train(recipe(), tmp_path / "run", progress=Watcher(interrupt_after=3))
    (tmp_path / "run" / "checkpoints" / "step-000003" / "state.json").unlink()
    before = files_of(tmp_path / "run")
    message = r"No checkpoint in .*run/checkpoints' .*\(step-000003: state.json is missing\): .*--overwrite"
    with pytest.raises(OSError, match=message):
        train(recipe(), tmp_path / "run", resume="auto")
    assert files_of(tmp_path / "run") == before


def test_a_removed_output_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Removes(Watcher):
        def update(self, step: int, loss: float, tokens_per_second: float) -> None:
            if step == 3:
                shutil.rmtree(tmp_path / "run")

    with pytest.raises(FileNotFoundError, match=r"The output folder '.*/run' was removed during training"):
        train(recipe(checkpoint_every=1), tmp_path / "run", progress=Removes())
    assert not (tmp_path / "run").exists()
    assert capfd.readouterr() == ("", "")


def test_auto_begins_and_goes_on_and_a_run_says_where(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        train(recipe(), tmp_path / "run", resume="auto", progress=Watcher(interrupt_after=3))
    shutil.copytree(tmp_path / "run", tmp_path / "early", ignore=shutil.ignore_patterns("checkpoints"))
    watcher = Watcher()
    resumed = train(recipe(), tmp_path / "run", resume="auto", progress=watcher)
    assert (watcher.steps, watcher.messages[1:]) == ([4, 5, 6], ["resumes after step 3"])
    assert_identical(whole, resumed.model_folder)
    watcher = Watcher()
    train(recipe(), tmp_path / "run", resume="auto", progress=watcher)  # as a requeued job that had ended
    assert watcher.steps == []
    with pytest.raises(ValueError, match=r"train\.steps \(6, 8\), train\.seed \(0, 1\); choose .*--overwrite"):
        train(recipe(steps=8, seed=1), tmp_path / "run", resume="auto")
    watcher = Watcher()
    train(recipe(), tmp_path / "early", resume=True, progress=watcher)
    assert (watcher.steps[0], watcher.messages[1:]) == (1, ["no checkpoint: begins at step 1"])


def test_a_run_goes_on_with_settings_that_change_no_earlier_step(tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        train(recipe(), tmp_path / "run", progress=Watcher(interrupt_after=3))
    changed = {"timeout_minutes": 60.0, "on_divergence": "skip", "max_loss_rise": 9.0, "keep_checkpoints": 3}
    again = recipe(**changed, checkpoint_every=1)
    watcher = Watcher()
    train(again, tmp_path / "run", resume=True, progress=watcher)
    assert watcher.steps == [4, 5, 6]
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 3
    assert load_recipe(tmp_path / "run" / "recipe.yaml") == again


def test_a_finished_run_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    run = train(recipe(steps=2), tmp_path / "run")
    shutil.rmtree(run.folder / "checkpoints")
    before = files_of(run.folder)
    with pytest.raises(FileExistsError, match=r"is finished and has no checkpoints .*model.*--overwrite"):
        train(recipe(steps=2), run.folder, resume="auto")
    assert before == files_of(run.folder)


def test_a_run_does_not_overwrite_the_model_that_it_starts_from(tmp_path: Path) -> None:
    run = train(recipe(steps=2), tmp_path / "run")
    further = recipe(steps=2, model={"init_from": str(run.folder / "checkpoints" / ".." / "model")})
    with pytest.raises(ValueError, match=r"lies in the run that --overwrite .* would replace"):
        train(further, run.folder, overwrite=True)
    assert train(further, tmp_path / "further").model_folder.is_dir()


@pytest.mark.parametrize("at", [4, 6])
def test_a_signal_in_an_evaluation_ends_the_run_after_it(tmp_path: Path, at: int) -> None:
    """Training draws the same random numbers, whatever an evaluation has drawn."""
    settings = recipe(evaluate_every=2, model={"attention_dropout": 0.1})
    plain = train(recipe(model={"attention_dropout": 0.1}), tmp_path / "plain")
    done: list[int] = []

    def evaluate(model: Any, step: int) -> dict[str, float]:
        if step == at and at not in done:
            signal.raise_signal(signal.SIGTERM)
        done.append(step)
        return {"validation/drawn": torch.rand(()).item()}

    with pytest.raises(TrainingInterrupted) as raised:
        train(settings, tmp_path / "run", on_evaluate=evaluate)
    assert raised.value.signal == signal.SIGTERM
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].keys() >= {"validation/drawn"}
    run = train(settings, tmp_path / "run", on_evaluate=evaluate, resume=True)
    assert done == [2, 4, 6]
    assert_identical(plain.model_folder, run.model_folder)


@pytest.mark.parametrize("at", [4, 6])
def test_an_evaluation_that_fails_loses_nothing(tmp_path: Path, whole: Path, at: int) -> None:
    """Nor is it left out: the resumed run begins with it."""
    failed: list[int] = []

    def evaluate(model: Any, step: int) -> dict[str, float]:
        if step == at and not failed:
            failed.append(step)
            raise RuntimeError("no such luck")
        return {"validation/step": step}

    settings = recipe(evaluate_every=4, log_every=3)
    with pytest.raises(RuntimeError, match="no such luck"):
        train(settings, tmp_path / "run", on_evaluate=evaluate)
    watcher = Watcher()
    resumed = train(settings, tmp_path / "run", resume=True, progress=watcher, on_evaluate=evaluate)
    assert watcher.steps == list(range(at, 7))
    assert_identical(whole, resumed.model_folder)
    logged = {line["step"]: line.get("validation/step") for line in read_metrics(resumed.folder / "metrics.jsonl")}
    assert logged == {3: None, 4: 4, 6: 6}
    assert resumed.last.keys() >= {"loss", "tokens_per_second", "lambdas"}


def test_a_gradient_that_is_no_number_stops_the_run_before_it_spoils_the_weights(tmp_path: Path) -> None:
    message = r"At step 1 the gradient norm became nan: .* There is no checkpoint yet"
    with pytest.raises(DivergenceError, match=message):
        train(recipe(model={"initializer_range": 1e30}), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


# torch's own, while it traces a graph and while it runs one.
@pytest.mark.all
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs compiled, and learns what it learns uncompiled."""
    torch._dynamo.reset()  # of what an earlier test has compiled
    graphs: list[Any] = []

    def traced(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, examples)  # the default takes half a minute to compile

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend=traced))
    plain = train(recipe(log_every=1), tmp_path / "plain")
    assert not graphs
    compiled = train(recipe(log_every=1, compile=True), tmp_path / "compiled")
    assert len(graphs) >= 2
    lines = [read_metrics(run.folder / "metrics.jsonl") for run in (plain, compiled)]
    for one, two in zip(*lines, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_a_precision_that_trains_no_more_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'fp16' trains nothing any more"):
        train(recipe(precision="fp16"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_text_with_bpe(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and that was that. " * 60)
    run = train(text_recipe(tmp_path / "text.txt", tokenizer="bpe", vocab_size=270), tmp_path / "run")
    for folder in (run.model_folder, run.folder / "checkpoints" / "step-000002"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("the cat")) == "the cat"
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(tokenizer)
        assert tokenizer.eos_token_id == json.loads((folder / "config.json").read_text())["eos_token_id"]


@pytest.mark.parametrize("isolated", [True, False])
def test_documents_are_isolated_where_the_recipe_says_so(tmp_path: Path, isolated: bool) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 5)
    batch = build_data(text_recipe(tmp_path, isolate_documents=isolated)).batches.train_batch(1)
    assert ("position_ids" in batch) == isolated
