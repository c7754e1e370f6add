"""Two processes that talk over gloo, for tests of what is spread over devices.

A test file that needs them runs itself as a script, once for each rank: ``run`` starts it, ``join`` connects it. The
script writes what it found to the folder it was given, and the tests compare that with one process's answer.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tiny import KINDS

RANKS = 2
SECONDS = 300  # a machine may be busy with other tests


def start(script: str, folder: Path, *words: str) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    """Start ``python SCRIPT RANK FOLDER WORDS`` for each rank, warnings as errors; return the ranks and their logs."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", "error", script, str(rank), str(folder), *words]
        more = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as stream:
            ranks.append(subprocess.Popen(command, env=environment | more, stdout=stream, stderr=stream))
    return ranks, logs


def run(script: str, folder: Path) -> None:
    """Run ``python SCRIPT RANK FOLDER`` for each rank at once; fail with what a rank printed."""
    ranks, logs = start(script, folder)
    try:
        end = time.monotonic() + SECONDS
        # One rank that failed leaves the other waiting for it.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            assert time.monotonic() < end, f"the ranks took longer than {SECONDS} s: {logs[0].read_text()[-2000:]}"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [log.read_text()[-3000:] for rank, log in zip(ranks, logs, strict=True) if rank.returncode > 0]
    assert not failed, "\n".join(failed)


def spread_models(script: str, folder: Path, make: Callable[[str], Any]) -> Path:
    """Save a model of each kind for the ranks to load, run them, and return the folder in which all is."""
    for kind in KINDS:
        make(kind).save_pretrained(folder / kind)
    run(script, folder)
    return folder


def check_saved_alike(folder: Path, kind: str) -> None:
    """The checkpoint that the ranks saved is the one that they loaded, bit for bit."""
    before, after = (load_file(folder / name / "model.safetensors") for name in (kind, f"{kind} saved"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name


def join() -> tuple[int, Path]:
    """In the script: connect with the others through a file, as a port may be anybody's; return rank and folder."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    return rank, folder
