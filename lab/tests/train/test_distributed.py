"""Two processes train what one process trains. The ranks run this file as a script."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ranks
from diff_lab.train import Recipe, TrainingInterrupted, build_data, build_model, parse_recipe, read_metrics, train
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.run_setup import draw_weights
from diff_transformer.attention_types import ATTENTION_TYPES
from full_run import short_run
from small_runs import Watcher, small_recipe
from tiny_model import KINDS

WAYS = ("ddp", "fsdp")
STEPS, HALF = 6, 3
RUNS = [(kind, way) for kind in KINDS for way in WAYS]
# Of `make test`; tests/model/test_fsdp.py has the model there.
SHORT_WAYS, SHORT_RUNS = ("fsdp",), (("diff", "ddp"), ("diff", "fsdp"))
each_way = pytest.mark.parametrize("way", short_run(WAYS, SHORT_WAYS))


def recipe(kind: str, way: str, text: Path, **settings: Any) -> Recipe:
    """Text in blocks of packed documents: rows with different numbers of targets, in two parts on each process."""
    spec = ATTENTION_TYPES[kind]
    model = {"attention_type": kind, "num_key_value_heads": 4, "num_noise_heads": 2}
    if spec.grouped:
        model["num_key_value_heads"] = 4 if spec.pairs_heads else 2
    model["token_lambda"] = spec.grouped  # the layer's own λ is spread as DIFF's
    data = {"kind": "text", "paths": [str(text)], "length": 24, "batch_size": 8}
    data |= {"validation_tokens": 100, "validation_fraction": 0.2}
    every = {"steps": STEPS, "accumulation": 2, "checkpoint_every": HALF, "max_grad_norm": 0.5}
    return small_recipe(model=model, data=data, parallel=way, **every | settings)


def evaluate(model: Any, step: int) -> dict[str, float]:
    return {"spread": float(model(torch.ones(1, 3, dtype=torch.int64)).logits[0, 0, 0])}


def on_a_rank() -> None:
    """The runs that are listed; then DIFF goes on from what one process has left."""
    rank, folder = ranks.join()
    text = folder / "text"
    plan = json.loads((folder / "plan.json").read_text())
    for kind, way in plan["runs"]:
        recorder = Watcher()
        run = train(recipe(kind, way, text), folder / f"{kind} {way}", progress=recorder, on_evaluate=evaluate)
        (folder / f"{kind} {way} {rank}.json").write_text(json.dumps([recorder.messages, run.parameters]))
    for way in plan["ways"]:
        train(recipe("diff", way, text), folder / f"one then two {way}", resume=True)
    for settings in plan["settings"]:
        train(recipe("diff", "fsdp", text, **settings), folder / "bf16 fsdp")
    first_weights(folder, rank)
    stopped_by_second_rank(folder, rank)
    torch.distributed.destroy_process_group()


def joined(settings: Recipe) -> DistributedContext:
    train = settings.train
    return DistributedContext.from_env(train.parallel, train.precision, train.device, train.timeout_minutes)


def first_weights(folder: Path, rank: int) -> None:
    """Of a sharded model that is nowhere whole."""
    settings = odd(folder / "text")
    group = joined(settings)
    model = build_model(settings, build_data(settings), without_weights=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    model, _ = group.parallelize(model, lambda model: draw_weights(model, settings.train.seed))
    tensors = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    tensors["frequencies"] = model.model.rotary_emb.inv_freq
    tensors["logits"] = model(torch.arange(7)[None]).logits
    if rank == 0:
        save_file({name: value.detach().contiguous() for name, value in tensors.items()}, folder / "first.safetensors")


def stopped_by_second_rank(folder: Path, rank: int) -> None:
    """The second process alone gets a signal; both save the same step and end."""

    def stop(model: Any, step: int) -> dict[str, float]:
        if rank == 1 and step == HALF:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    settings = recipe("diff", "ddp", folder / "text", evaluate_every=HALF)
    with pytest.raises(TrainingInterrupted, match=f"Stopped after step {HALF} of {STEPS}"):
        train(settings, folder / "stopped", on_evaluate=stop)


def odd(text: Path) -> Recipe:
    """Sizes that two processes cannot share evenly, and one matrix for embedding and output."""
    settings = recipe("diff", "fsdp", text).model_dump()
    settings["model"] |= {"intermediate_size": 33, "tie_word_embeddings": True}
    return parse_recipe(settings)


def half_of(run: Path, copy: Path) -> Path:
    """A copy of a run as it was after half of its steps."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:06d}")
    return copy


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    whole = pytestconfig.getoption("--all")
    plan = {
        "runs": RUNS if whole else SHORT_RUNS,
        "ways": WAYS if whole else SHORT_WAYS,
        "settings": [{"precision": "bf16", "optimizer": "muon"}] if whole else [],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    text = folder / "text"
    text.mkdir()
    for number in range(60):  # of very different lengths
        (text / f"{number:02d}.txt").write_text(f"{number} and {number * 7} make {number * 8}. " * (1 + number % 5))
    for kind in dict(plan["runs"]):
        train(recipe(kind, "auto", text), folder / f"{kind} single", on_evaluate=evaluate)
    for way in plan["ways"]:
        train(recipe("diff", way, text), folder / f"{way} on one")
        half_of(folder / f"{way} on one", folder / f"one then two {way}")
    for settings in plan["settings"]:
        train(recipe("diff", "auto", text, **settings), folder / "bf16 single")
    ranks.run(__file__, folder)
    return folder


def logged(run: Path) -> Tensor:
    """The loss and the gradient's norm before clipping of each step, (STEPS, 2)."""
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines], dtype=torch.float64)


def check_equal(resumed: Path, expected: Path) -> None:
    """Within float32's rounding: over 20 steps the losses are 3e-7 apart, and by one wrong factor more than 1e-2."""
    torch.testing.assert_close(logged(resumed), logged(expected), rtol=1e-5, atol=0)
    one, two = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (expected, resumed))
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("kind", "way"), [pytest.param(*run, marks=() if run in SHORT_RUNS else pytest.mark.all) for run in RUNS]
)
def test_the_losses_are_those_of_one_process(spread: Path, kind: str, way: str) -> None:
    check_equal(spread / f"{kind} {way}", spread / f"{kind} single")


def test_each_rank_drops_other_attention_weights(spread: Path) -> None:
    states = load_file(max((spread / "diff ddp" / "checkpoints").glob("step-*")) / "random.safetensors")
    assert not torch.equal(states["cpu/0"], states["cpu/1"])


@each_way
def test_a_checkpoint_of_one_process_goes_on_with_two(spread: Path, way: str) -> None:
    check_equal(spread / f"one then two {way}", spread / "diff single")


@each_way
def test_a_checkpoint_of_two_processes_goes_on_with_one(spread: Path, way: str, tmp_path: Path) -> None:
    half = half_of(spread / f"diff {way}", tmp_path / "run")
    recorder = Watcher()
    train(recipe("diff", way, spread / "text"), half, resume=True, progress=recorder)
    assert recorder.messages == ["1 process (cpu), float32", f"resumes after step {HALF}"]
    check_equal(half, spread / "diff single")


def test_a_sharded_model_starts_with_the_weights_of_one_process(spread: Path) -> None:
    """To the last bit, although no process ever had all of them."""
    tensors = load_file(spread / "first.safetensors")
    settings = odd(spread / "text")
    model = build_model(settings, build_data(settings))
    expected = dict(model.named_parameters()) | {"frequencies": model.model.rotary_emb.inv_freq}
    torch.testing.assert_close(tensors.pop("logits"), model(torch.arange(7)[None]).logits)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


@pytest.mark.all
def test_sharded_in_bfloat16_with_muon(spread: Path) -> None:
    """Muon computes in bfloat16. The losses differ by the rounding of sums in another order."""
    losses, expected = (logged(spread / f"bf16 {way}")[:, 0] for way in ("fsdp", "single"))
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)


@pytest.mark.all
def test_the_run_says_what_is_used(spread: Path) -> None:
    parameter_count = json.loads((spread / "diff ddp 0.json").read_text())[1]
    shown = {}
    for way in WAYS:
        messages, parameters = json.loads((spread / f"diff {way} 0.json").read_text())
        assert parameters == parameter_count
        (shown[way],) = messages
        assert json.loads((spread / f"diff {way} 1.json").read_text())[0] == []  # the second one is silent
    assert shown["ddp"] == "2 processes (gloo, cpu): DDP, float32"
    assert shown["fsdp"] == "2 processes (gloo, cpu): FSDP, float32"


@each_way
def test_an_evaluation_sees_the_model(spread: Path, way: str) -> None:
    """On every process: λ of a sharded layer is put together first."""
    last, expected = (read_metrics(spread / f"diff {name}" / "metrics.jsonl")[-1] for name in (way, "single"))
    assert last["spread"] == pytest.approx(expected["spread"], rel=1e-3)
    assert last["lambdas"] == pytest.approx(expected["lambdas"], rel=1e-4)


@pytest.mark.all
def test_torchrun(tmp_path: Path) -> None:
    """The command of the README."""
    (tmp_path / "text.txt").write_text("one, two, three, and so on. " * 400)
    arguments = ["tiny", f"data.paths=[{tmp_path / 'text.txt'}]", "--output", str(tmp_path / "run")]
    arguments += ["train.parallel=fsdp", "data.validation_fraction=0.3"]
    code, out, err = ranks.torchrun("diff_lab.train", arguments, tmp_path)
    assert code == 0, err[-3000:]
    assert err.count("2 processes (gloo, cpu): FSDP, float32") == 1
    assert out.count("parameters, ") == out.count("model: ") == 1
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "^The launcher is configured for DEEPSPEED: .* train.parallel=ddp or"),
        ({"ACCELERATE_USE_FSDP": "true"}, "^The launcher is configured for FSDP: "),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "^The launcher is configured for mixed precision 'bf16', and train"),
        ({"WORLD_SIZE": "2"}, "variable RANK expected, but not set"),
        ({"WORLD_SIZE": "1"}, None),
    ],
)
def test_launchers(environment: dict[str, str], message: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        context = DistributedContext.from_env("ddp", "no", "cpu", 1.0)
        assert (context.kind, context.count, context.device.type) == ("single", 1, "cpu")


def test_a_signal_to_one_process_stops_all(spread: Path) -> None:
    assert [path.name for path in (spread / "stopped" / "checkpoints").iterdir()] == [f"step-{HALF:06d}"]


@pytest.mark.parametrize(
    ("count", "precision", "message"),
    [
        (2, "no", r"batch_size=6 cannot be divided among 2 processes and train.accumulation=2"),
        (1, "fp16", r"'fp16' trains nothing any more: it is 'bf16', or 'no' for float32\."),
        (3, "bf16", None),
    ],
)
def test_what_cannot_share_a_batch_or_train_in_a_precision(count: int, precision: str, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        DistributedContext("ddp", torch.device("cpu"), 0, count, precision).check(6, 2)


if __name__ == "__main__":
    on_a_rank()
