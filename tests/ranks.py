"""Two processes that talk over gloo, for tests of what is spread over devices.

A test file that needs them runs itself as a script, once for each rank: ``run`` starts it in a forked process of its
own, ``join`` connects it. The
script writes what it found to the folder it was given, and the tests compare that with one process's answer.
"""

import multiprocessing.connection
import os
import runpy
import sys
import time
import warnings
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file

import forked

RANKS = 2
SECONDS = 300  # a machine may be busy with other tests


def start(script: str, folder: Path, *words: str, count: int = RANKS) -> tuple[list[BaseProcess], list[Path]]:
    """Start ``python SCRIPT RANK FOLDER WORDS`` for each rank, warnings as errors; return the ranks and their logs."""
    logs = [folder / f"rank{rank}.log" for rank in range(count)]
    words = (str(folder), *words)
    return [forked.start(log, _run_script, script, count, rank, words) for rank, log in enumerate(logs)], logs


def _run_script(script: str, count: int, rank: int, words: tuple[str, ...]) -> None:
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("error")
    sys.argv = [script, str(rank), *words]
    runpy.run_path(script, run_name="__main__")


def run(script: str, folder: Path, count: int = RANKS) -> None:
    """Run ``python SCRIPT RANK FOLDER`` for each rank at once; fail with what a rank printed."""
    ranks, logs = start(script, folder, count=count)
    try:
        end = time.monotonic() + SECONDS
        # One rank that failed leaves the other waiting for it.
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            assert time.monotonic() < end, f"the ranks took longer than {SECONDS} s: {logs[0].read_text()[-2000:]}"
            multiprocessing.connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1)
        failed = [log.read_text()[-3000:] for rank, log in zip(ranks, logs, strict=True) if rank.exitcode]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert not failed, "\n".join(failed)


def torchrun(module: str, arguments: list[str], folder: Path, count: int = RANKS) -> tuple[int | None, str, str]:
    """Run ``torchrun --standalone --nproc-per-node COUNT -m MODULE ARGUMENTS``; return its exit code and output.

    Nothing is imported anew: the launcher is forked off a process that has all of it, and forks the ranks.
    """
    out, err = folder / "torchrun.out", folder / "torchrun.err"
    process = forked.start(err, _launch, module, arguments, count, out=out)
    process.join(SECONDS)
    process.kill()
    process.join()
    return process.exitcode, out.read_text(), err.read_text()


def _launch(module: str, arguments: list[str], count: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _run_module)(module, arguments)


def _run_module(module: str, arguments: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def check_saved_alike(folder: Path, kind: str) -> None:
    """The checkpoint that the ranks saved is the one that they loaded, bit for bit."""
    before, after = (load_file(folder / name / "model.safetensors") for name in (kind, f"{kind} saved"))
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def join() -> tuple[int, Path]:
    """In the script: connect with the others through a file, as a port may be anybody's; return rank and folder."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=SECONDS),
    )
    return rank, folder
