"""torchtitan trains a recipe as one process of `diff-lab train` does, however the model is spread.

Needs torchtitan (`make test-titan`). Every run is a torchrun of its own, on the CPU.
"""

import json
import os
import pickle
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import forked
import ranks
from diff_lab.measure.standard import validation_callback
from diff_lab.train import build_data, train
from diff_lab.train.recipe import build_config, load_recipe
from diff_lab.train.step import DivergenceError, SpikeDetector
from diff_transformer.parallel import one_rank_of

pytest.importorskip("torchtitan")

from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import ParallelismConfig

from diff_lab.titan.__main__ import main
from diff_lab.titan.model import DiffModel
from diff_lab.titan.trainer import Metrics

STEPS = 4
SMALL = ["tiny", f"train.steps={STEPS}", "train.log_every=1", "train.inspect_every=null", "train.checkpoint_every=2"]
GROUPED = ["model.attention_type=diff_grouped", "model.num_noise_heads=2"]
SMALL += ["train.evaluate_every=3", "data.validation_tokens=1344"]  # 21 rows, which no ranks share evenly
# Flags of torchtitan, changes of the recipe, and the number of ranks.
RUNS: dict[str, tuple[str, list[str], int]] = {
    "FSDP2": ("", [], 2),
    "HSDP": ("data-parallel-replicate-degree=2", [], 2),
    "TP": ("tensor-parallel-degree=2", [], 2),
    "TP without sequence parallelism": ("tensor-parallel-degree=2 no-enable-sequence-parallel", [], 2),
    "CP": ("context-parallel-degree=2", [], 2),
    "PP": ("pipeline-parallel-degree=2 training.local-batch-size=4", ["train.trackers=[wandb]"], 2),
    "FSDP2, checkpointed activations": ("", ["train.gradient_checkpointing=true"], 2),
    "TP, V2": ("tensor-parallel-degree=2", ["model.attention_type=diff_v2"], 2),
    "TP, softmax": ("tensor-parallel-degree=2", ["model.attention_type=softmax"], 2),
    "TP, grouped": ("tensor-parallel-degree=2", GROUPED, 2),
    "TP, norms of q and k, gate": ("tensor-parallel-degree=2", ["model.qk_norm=true", "model.output_gate=true"], 2),
    "TP, compiled": ("tensor-parallel-degree=2 compile.backend=aot_eager", ["train.compile=true"], 2),
    "CP, V2": ("context-parallel-degree=2", ["model.attention_type=diff_v2"], 2),
    "CP, grouped": ("context-parallel-degree=2", GROUPED, 2),
    "FSDP2, tied": ("", ["model.tie_word_embeddings=true"], 2),
    "FSDP2, asynchronous checkpoints": ("checkpoint.async-mode=async", [], 2),
    "HSDP 2 × 2": ("data-parallel-replicate-degree=2", [], 4),
    "FSDP2 and TP": ("tensor-parallel-degree=2", [], 4),
    "HSDP and TP": ("data-parallel-replicate-degree=2 tensor-parallel-degree=2", [], 4),
    "FSDP2 and CP": ("context-parallel-degree=2", [], 4),
    "TP and CP": ("tensor-parallel-degree=2 context-parallel-degree=2", [], 4),
    "PP and FSDP2": ("pipeline-parallel-degree=2 training.local-batch-size=2", [], 4),
}
SHORT = ("TP", "CP", "PP")  # in `make test-titan`; FSDP2 is between the ranks of all of them or of one


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def titan(folder: Path, changes: list[str], flags: str = "", count: int = 2) -> tuple[int | None, str]:
    """Run torchtitan; return its exit code and what the ranks printed."""
    words = [f"--{flag}" if "." in flag else f"--parallelism.{flag}" for flag in flags.split()]
    folder.mkdir(exist_ok=True)
    arguments = [*SMALL, *changes, f"--output={folder / 'run'}", "--", *words]
    code, out, err = ranks.torchrun("diff_lab.titan", arguments, folder, count)
    return code, out + err


# torchtitan's names, and ours.
CURVES = {
    "loss_metrics/global_avg_loss": "loss",
    "grad_norm": "grad_norm",
    "validation/loss": "validation/loss",
    "validation/bits_per_byte": "validation/bits_per_byte",
}


def logged(folder: Path) -> dict[tuple[str, int], float]:
    """The numbers of each step, in float32, of the rank that has the loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for events in sorted((folder / "run").rglob("events.out.*")):
        reader = EventAccumulator(str(events.parent)).Reload()
        found |= {(ours, event.step): event.value for name, ours in CURVES.items() for event in reader.Scalars(name)}
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(changes) → the folder of a run of one process."""
    runs: dict[tuple[str, ...], Path] = {}

    def run(changes: list[str]) -> Path:
        key = tuple(changes)
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("alone") / "run"
            recipe = load_recipe(SMALL[0], [*SMALL[1:], *changes])
            data = build_data(recipe)
            train(recipe, runs[key], data=data, on_evaluate=validation_callback(data.batches))
        return runs[key]

    return run


def check_weights(folder: Path, alone: Path) -> None:
    """An exported folder has the weights of a run of one process."""
    weights = {key: x for file in folder.glob("*.safetensors") for key, x in load_file(file).items()}
    others = load_file(alone / "model" / "model.safetensors")
    assert weights.keys() == others.keys()
    for key, value in others.items():
        # By the mean: where a gradient is all rounding, AdamW takes a whole step either way.
        assert (weights[key] - value).square().mean().sqrt() <= 1e-6, key


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.all) for name in RUNS]
)
def test_a_layout_trains_as_one_process(name: str, tmp_path: Path, alone: Any) -> None:
    flags, changes, count = RUNS[name]
    code, printed = titan(tmp_path, changes, flags, count)
    assert code == 0, printed[-3000:]
    rows = map(json.loads, (alone(changes) / "metrics.jsonl").read_text().splitlines())
    expected = {(name, row["step"]): row[name] for row in rows for name in CURVES.values() if name in row}
    assert len(expected) == 2 * STEPS + 4
    assert logged(tmp_path) == pytest.approx(expected, abs=2e-6)
    for file in (tmp_path / "run").rglob("*.wandb"):  # of the rank that logs, which has not all layers
        assert b"lambda/layer_01" in (content := file.read_bytes())
        assert b"lambda/layer_02" in content
        assert "train.trackers=[wandb]" in changes
    folder = tmp_path / "run" / "checkpoint" / f"step-{STEPS}"
    assert (folder.parent / "step-2" / "complete.json").is_file(), "digests, written in the background too"
    check_weights(folder, alone(changes))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 5)


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_run_resumes_and_refuses_a_damaged_checkpoint(tmp_path: Path) -> None:
    """From step 2 to 4 as without the pause, bit for bit, dropout too; with another index it is not unpickled."""
    changes = ["model.attention_dropout=0.1"]
    code, printed = titan(tmp_path, changes)
    assert code == 0, printed[-3000:]
    run = tmp_path / "run" / "checkpoint"
    before = {file.name: file.read_bytes() for file in (run / f"step-{STEPS}").glob("*.safetensors")}
    with pytest.raises(SystemExit, match="The run is finished"):
        main([*SMALL, *changes, f"--output={tmp_path / 'run'}"])
    shutil.rmtree(run / f"step-{STEPS}")
    code, printed = titan(tmp_path, changes)
    assert code == 0, printed[-3000:]
    assert "Training starts at step 3" in printed
    assert {file.name: file.read_bytes() for file in (run / f"step-{STEPS}").glob("*.safetensors")} == before
    shutil.rmtree(run / f"step-{STEPS}")
    (run / "step-2" / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "planted")))
    code, printed = titan(tmp_path, changes)
    assert code != 0
    assert "damaged: .metadata has changed since it was written" in printed
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        (["model.tie_word_embeddings=true"], "pipeline-parallel-degree=2", "tie_word_embeddings must be false"),
        (["model.num_key_value_heads=2"], "tensor-parallel-degree=2", "2 ranks cannot share evenly"),
        ([], "checkpoint.initial-load-path=/usr", "'/usr' needs safetensors"),
    ],
)
@pytest.mark.all
def test_what_is_not_taken(changes: list[str], flags: str, message: str, tmp_path: Path) -> None:
    code, printed = titan(tmp_path, changes, flags)
    assert code != 0
    assert message in printed


@pytest.mark.parametrize(("recipe", "taken"), [("paper-3b", (1, 2, 4)), ("paper-13.1b", (1, 2, 4))])
def test_degrees_of_the_paper_s_heads(recipe: str, taken: tuple[int, ...]) -> None:
    """12 and 20 heads; before a process group is there."""
    settings = load_recipe(recipe)
    model = DiffModel.Config(hf=build_config(settings, settings.model.vocab_size or 0))
    for degree in (1, 2, 4, 8):
        degrees = ParallelismConfig(tensor_parallel_degree=degree)
        with nullcontext() if degree in taken else pytest.raises(ValueError, match="8 ranks cannot share evenly"):
            model.update_from_config(config=SimpleNamespace(parallelism=degrees))
    with pytest.raises(ValueError, match="tie_word_embeddings must be false"):
        model.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig(pipeline_parallel_degree=2)))


def test_a_rise_of_the_loss_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsProcessor, "log", lambda *_: None)
    metrics = object.__new__(Metrics)
    metrics.model_parts, metrics.config, metrics.spikes = [], Metrics.Config(), SpikeDetector(0.5)
    metrics.parallel_dims = SimpleNamespace(pp_enabled=False)
    metrics.device_memory_monitor = SimpleNamespace(device=torch.device("cpu"))
    with one_rank_of(1):
        for step in range(1, 101):
            metrics.log(step, 1.0, 1.0, 1.0)
        with pytest.raises(DivergenceError, match=r"Stopped at step 101: the loss rose to 2\.00, from 1\.00"):
            metrics.log(101, 2.0, 2.0, 1.0)


@pytest.mark.all
def test_another_layout_resumes(tmp_path: Path, alone: Any) -> None:
    """Two steps with FSDP2, and two as TP × CP on four ranks, within rounding of one process' four."""
    code, printed = titan(tmp_path, [])
    assert code == 0, printed[-3000:]
    last = tmp_path / "run" / "checkpoint" / f"step-{STEPS}"
    shutil.rmtree(last)
    code, printed = titan(tmp_path, [], "tensor-parallel-degree=2 context-parallel-degree=2", 4)
    assert code == 0, printed[-3000:]
    assert "Training starts at step 3" in printed
    check_weights(last, alone([]))


@pytest.mark.all
def test_a_start_from_the_model_of_a_run(tmp_path: Path, alone: Any) -> None:
    """The first loss is that of the model in the folder, which has been trained already."""
    model = alone([]) / "model"
    code, printed = titan(tmp_path, [], f"checkpoint.initial-load-path={model} checkpoint.initial-load-in-hf")
    assert code == 0, printed[-3000:]
    again = alone([f"model.init_from={model}"])
    rows = map(json.loads, (again / "metrics.jsonl").read_text().splitlines())
    expected = {("loss", row["step"]): row["loss"] for row in rows if "loss" in row}
    assert {key: x for key, x in logged(tmp_path).items() if key in expected} == pytest.approx(expected, abs=2e-6)


@pytest.mark.all
def test_a_killed_rank_loses_no_checkpoint(tmp_path: Path) -> None:
    """kill -9 of one rank ends the others; the same command goes on from the newest complete checkpoint."""
    run, printed = tmp_path / "run", tmp_path / "out"
    arguments = [*SMALL, "train.steps=2000", f"--output={run}"]
    process = forked.start(tmp_path / "err", ranks._launch, "diff_lab.titan", arguments, 2, out=printed)
    while not list(run.glob("checkpoint/step-*/complete.json")):
        assert process.is_alive(), (tmp_path / "err").read_text()[-3000:]
        time.sleep(0.1)
    rank = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1]
    os.kill(int(rank), signal.SIGKILL)
    process.join(120)
    assert process.exitcode not in (0, None)
    complete = max(int(file.parent.name.removeprefix("step-")) for file in run.glob("checkpoint/step-*/complete.json"))
    code, printed_again = titan(tmp_path, [f"train.steps={complete + 1}"])
    assert code == 0, printed_again[-3000:]
    assert f"Training starts at step {complete + 1}" in printed_again


@pytest.mark.all
def test_sigterm_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    """torchrun passes the signal on; the step is finished, saved, and where the next run begins."""
    run, printed = tmp_path / "run", tmp_path / "out"
    arguments = [*SMALL, "train.steps=2000", "train.checkpoint_every=2000", f"--output={run}"]
    process = forked.start(tmp_path / "err", ranks._launch, "diff_lab.titan", arguments, 2, out=printed)
    while not (printed.is_file() and "step:  3" in printed.read_text() + (tmp_path / "err").read_text()):
        assert process.is_alive()
        time.sleep(0.2)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(120)
    (saved,) = (run / "checkpoint").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step >= 3
    code, printed_again = titan(tmp_path, [f"train.steps={step + 1}", "train.checkpoint_every=2000"])
    assert code == 0, printed_again[-3000:]
    assert f"Training starts at step {step + 1}" in printed_again
