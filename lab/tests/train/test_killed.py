"""A run that is killed, interrupted or out of disk goes on as if nothing had happened."""

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from crash_runner import Plan, start
from diff_lab.train.recipe import dump_recipe
from full_run import short_run
from small_runs import TIMES, small_recipe

STEPS, EVERY = 120, 4
RECIPE = small_recipe(data={"batch_size": 4}, steps=STEPS, warmup_steps=0, checkpoint_every=EVERY)
SHORT = ["train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=1"]


class Run:
    """A run in a folder, by the command line, as often as it takes."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.recipe, self.folder = folder / "recipe.yaml", folder / "run"
        self.log, self.trace = folder / "log", folder / "trace"
        self.settings = settings
        self.recipe.write_text(dump_recipe(RECIPE))

    def start(self, plan: Plan | None = None) -> BaseProcess:
        """Begin it, or go on with it where there is something to go on with."""
        resume = ["--resume"] if (self.folder / "recipe.yaml").exists() else []
        arguments = [str(self.recipe), *self.settings, "--output", str(self.folder), *resume]
        return start(arguments, self.log, plan or Plan())

    def ends(self, plan: Plan | None = None) -> int:
        """Its exit code, or the number of the signal that killed it, less than 0."""
        process = self.start(plan)
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def lines(self) -> list[dict[str, Any]]:
        """What is logged, without a line that is not finished yet."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def logs(self, count: int, process: BaseProcess) -> None:
        """Wait for so many lines."""
        while len(self.lines()) < count and process.is_alive():
            time.sleep(0.002)

    def error(self) -> str:
        """The last line that it wrote."""
        return self.log.read_text().splitlines()[-1]

    def check(self, uninterrupted: "Run") -> None:
        """It is what the uninterrupted run is, and nothing is left over."""
        mine, theirs = ({path.relative_to(run.folder) for path in files(run.folder)} for run in (self, uninterrupted))
        assert mine == theirs
        for path in sorted(mine):
            if path.suffix == ".safetensors":
                assert (self.folder / path).read_bytes() == (uninterrupted.folder / path).read_bytes(), path
        lines, expected = ([strip(line) for line in run.lines()] for run in (self, uninterrupted))
        assert [line["step"] for line in lines] == list(range(1, len(expected) + 1))
        assert lines == expected


def files(folder: Path) -> Iterator[Path]:
    """All files but those of TensorBoard, of which every start makes one."""
    return (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "tensorboard")


def strip(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in TIMES}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(Run(tmp_path_factory.mktemp("long"), []))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return finished(Run(tmp_path_factory.mktemp("short"), SHORT))


def finished(run: Run) -> Run:
    assert run.ends(Plan(trace=run.trace)) == 0, run.log.read_text()
    assert not list(run.folder.rglob(".*"))
    return run


@pytest.mark.all
def test_killed_at_ten_random_times(long: Run, tmp_path: Path) -> None:
    """In turns while it starts or trains, and while it writes a checkpoint."""
    run, chance = Run(tmp_path, []), random.Random(5)
    for number in range(10):
        if number % 2:
            # The first changes of files are those of the start; the next dozen are the first checkpoint's.
            plan = Plan({chance.randrange(4, 16): signal.SIGKILL}, delay=chance.uniform(0.001, 0.01))
            assert run.ends(plan) == -signal.SIGKILL
            continue
        process = run.start()
        run.logs(len(run.lines()) + chance.randrange(6) if number else 0, process)
        time.sleep(chance.uniform(0, 0.015))
        assert process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert run.ends() == 0, run.log.read_text()
    run.check(long)


@pytest.mark.all
@pytest.mark.parametrize("every", [10, 3])
def test_killed_before_any_change_of_a_file(short: Run, tmp_path: Path, every: int) -> None:
    """One process after the other, each gets a little further than the one before, from the first file to the last."""
    run, leftovers = Run(tmp_path, SHORT), set()
    for operations in range(0, 400, every):
        code = run.ends(Plan({operations: signal.SIGKILL}))
        leftovers |= {path.name for path in run.folder.rglob(".*")}
        if code == 0:
            break
        assert code == -signal.SIGKILL, run.log.read_text()
    assert code == 0
    assert {".unfinished-step-000002", ".unfinished-model"} <= leftovers
    assert operations > 30
    run.check(short)


@pytest.mark.parametrize("size", short_run([0, 100, 3000, 20_000], [20_000]))
def test_killed_in_the_middle_of_a_write(short: Run, tmp_path: Path, size: int) -> None:
    """In the recipe, the metrics or the configuration, the weights, the optimizer's state."""
    run = Run(tmp_path, SHORT)
    run.log = Path(os.devnull)
    assert run.ends(Plan(largest_file=size, kills=True)) == -signal.SIGXFSZ
    assert run.ends() == 0
    run.check(short)


@pytest.mark.parametrize("number", short_run([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_signal_saves_and_ends(long: Run, tmp_path: Path, number: int) -> None:
    run = Run(tmp_path, [])
    process = run.start()
    run.logs(5, process)
    os.kill(process.pid or 0, number)
    process.join()
    done = len(run.lines())
    assert 5 <= done < STEPS
    assert process.exitcode == 128 + number
    saved = run.folder / "checkpoints" / f"step-{done:06d}"
    assert saved.is_dir()
    assert run.error().startswith(f"Stopped after step {done} of {STEPS}; {saved} holds the run. ")
    assert "Traceback" not in run.log.read_text()
    assert not (run.folder / "model").exists()
    assert run.ends() == 0
    run.check(long)


@pytest.mark.all
def test_under_nohup_the_end_of_the_terminal_is_none(short: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, SHORT)
    at = operations_before("step-000002", short)
    assert run.ends(Plan({at: signal.SIGHUP, at + 4: signal.SIGHUP}, ignored=signal.SIGHUP)) == 0
    run.check(short)


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(short: Run, tmp_path: Path, number: int) -> None:
    """In the middle of a checkpoint, which is not there then."""
    run = Run(tmp_path, SHORT)
    at = operations_before("step-000002", short)
    code = run.ends(Plan({at + 2: number, at + 4: number}, same_wish=0.0))
    assert code == (130 if number == signal.SIGINT else -number)
    assert len(run.lines()) == 2
    assert not (run.folder / "checkpoints" / "step-000002").exists()
    assert run.ends() == 0
    run.check(short)


def operations_before(name: str, run: Run) -> int:
    """How often files change before the first change of one of this name, in a run that was traced."""
    return next(at for at, line in enumerate(run.trace.read_text().splitlines()) if name in line)


@pytest.mark.parametrize("size", short_run([1000, 4500, 6000, 30_000], [6000]))
def test_a_full_disk(short: Run, tmp_path: Path, size: int) -> None:
    """For the recipe, the random numbers, the weights, the optimizer's state: one sentence, and all before is intact.

    Where there is room again, the run goes on from there.
    """
    run = Run(tmp_path, SHORT)
    assert run.ends(Plan({operations_before("step-000004", short): signal.SIGKILL})) == -signal.SIGKILL
    intact = run.folder / "checkpoints" / "step-000002"
    before = {path: path.read_bytes() for path in files(intact)}
    assert run.ends(Plan(largest_file=size)) == 2
    assert run.error().startswith(f"error: {str(run.folder)!r}"[:-1])
    assert "File too large" in run.error()
    assert size < 2000 or f"the checkpoint {str(intact)!r} is intact" in run.error()
    assert "Traceback" not in run.log.read_text()
    assert before == {path: path.read_bytes() for path in files(intact)}
    assert run.ends() == 0
    run.check(short)
