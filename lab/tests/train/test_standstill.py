"""A process that ends or hangs ends the others, in one sentence. The ranks run this file as a script."""

import importlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ranks
from diff_lab.train import Data, build_data, train
from diff_lab.train.distributed import DistributedContext, plain_connection_errors
from diff_lab.train.recipe import RetrievalData
from diff_transformer.ops.cpu import cpu_backend as cpu_backend
from small_runs import small_recipe

MINUTES = 0.2  # the first step may take seconds beside other tests
RECIPE = small_recipe(data={"batch_size": 2}, steps=1000, evaluate_every=2, checkpoint_every=1, timeout_minutes=MINUTES)


def on_a_rank() -> None:
    """Train until the second rank sends itself a signal after two steps."""
    importlib.import_module("tensorboard")  # the first rank would load it while the other one waits
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    rendezvous, waits = f"file://{folder / 'rendezvous'}", timedelta(minutes=MINUTES)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks.RANKS, timeout=waits)

    def evaluate(model: Any, step: int) -> dict[str, float]:
        if rank == 1:
            os.kill(os.getpid(), int(sys.argv[3]))
        return {}

    try:
        train(RECIPE, folder / "run", on_evaluate=evaluate)
    except ConnectionError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.all)])
def test_a_process_that_ends_or_hangs_ends_the_others(tmp_path: Path, number: int) -> None:
    cpu_backend.reason_against_cpu_kernel()  # compiles it where it is not yet there, which takes longer than the limit
    (first, second), (log, _) = ranks.start(__file__, tmp_path, str(int(number)))
    try:
        first.join(ranks.SECONDS)
        assert first.exitcode == 2, log.read_text()
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    (line,) = [line for line in log.read_text().splitlines() if "train.timeout_minutes" in line]
    assert line.startswith("The other ranks of the run cannot be reached: ")
    assert "the same command with --resume auto resumes" in line
    assert "Traceback" not in log.read_text()
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "complete.json").is_file()


def test_the_processes_wait_for_each_other_as_long_as_the_recipe_says(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: joined.append((backend, timeout)))
    monkeypatch.setenv("WORLD_SIZE", "2")
    DistributedContext.from_env("ddp", "no", "cpu", MINUTES)
    assert joined == [("gloo", timedelta(minutes=MINUTES))]


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error"),
        dist.DistStoreError("wait timeout after 3000ms"),
        RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
    ],
)
def test_errors_of_communication_become_a_sentence(error: RuntimeError) -> None:
    message = r"has ended, or has given no answer for train\.timeout_minutes=5\."
    with pytest.raises(ConnectionError, match=message), plain_connection_errors(5.0):
        raise error


def test_a_process_that_ends_while_data_are_made_is_told_in_a_sentence() -> None:
    class Interrupted(RetrievalData):
        def build(self, *_: Any) -> Data:
            raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    with pytest.raises(ConnectionError, match="one of them has ended"):
        build_data(RECIPE.model_copy(update={"data": Interrupted()}))


def test_other_errors_stay() -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit"), plain_connection_errors(5.0):
        raise RuntimeError("shapes do not fit")


if __name__ == "__main__":
    on_a_rank()
