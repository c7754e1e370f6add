"""Freed memory that a process keeps: the pages that it takes anew, counted by the system."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import fresh
from diff_lab import process
from diff_lab.experiments.worker_pool import Job, WorkerPool
from diff_lab.train.progress import Progress
from freed_pages import pages_of_use

FEW = 50  # pages; without keeping, the system hands out every page again, or every huge one
COUNTS = """
import sys
from diff_lab.process import keep_freed_memory
from freed_pages import pages_of_use
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
print(kept, pages_of_use())
"""
_LIBRARY, _VERSION = platform.libc_ver()
needs_glibc = pytest.mark.skipif(
    _LIBRARY != "glibc" or [int(part) for part in _VERSION.split(".")] < [2, 35], reason="needs glibc 2.35"
)


def pages_taken(what: str, **environment: str) -> tuple[str, int]:
    """What keep_freed_memory said in a new process, and the pages of its use."""
    without = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", COUNTS, what]
    folder = Path(__file__).parent
    done = subprocess.run(command, env=without | environment, cwd=folder, capture_output=True, text=True, check=True)
    said, pages = done.stdout.split()
    return said, int(pages)


@needs_glibc
def test_memory_that_is_kept_is_not_taken_again() -> None:
    said, pages = pages_taken("keep")
    assert said == "True"
    assert pages < FEW < pages_taken("leave")[1]


@needs_glibc
@pytest.mark.parametrize(
    "environment", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}], ids=str
)
def test_what_the_user_has_set_is_left(environment: dict[str, str]) -> None:
    said, pages = pages_taken("keep", **environment)
    assert said == "False"
    assert pages > FEW


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not process.keep_freed_memory()


@needs_glibc
def test_workers_that_train_keep_it(forked_workers: None) -> None:
    with WorkerPool[int](2, Progress()) as workers:
        workers.add(Job("one", pages_of_use))
        workers.add(Job("other", pages_of_use))
        assert [pages < FEW for _, pages in workers.results()] == [True, True]


@pytest.mark.parametrize(
    ("command", "expected"),
    [*((name, "kept\n") for name in ("demo", "train", "reproduce", "compare")), ("eval", ""), ("bench", "")],
)
def test_commands_that_train_keep_it(command: str, expected: str) -> None:
    code = (
        "import sys, diff_lab.cli as cli\n"
        f"sys.argv = ['diff-lab', {command!r}, '--unknown']\n"
        "cli.keep_freed_memory = lambda: print('kept')\n"
        "cli.main()"
    )
    result = fresh.run(code)
    assert (result.returncode, result.stdout) == (2, expected)


def test_processes_of_a_launcher_keep_it() -> None:
    code = (
        "import runpy, sys, diff_lab.process as module\n"
        "sys.argv = ['-m', '--unknown']\n"
        "module.keep_freed_memory = lambda: print('kept')\n"
        "runpy.run_module('diff_lab.train', run_name='__main__')"
    )
    result = fresh.run(code)
    assert (result.returncode, result.stdout) == (2, "kept\n")
