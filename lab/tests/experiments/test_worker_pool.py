"""Jobs that several processes do: results, progress, errors, and how they are stopped."""

import errno
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import forked
from diff_lab.experiments import worker_pool
from diff_lab.experiments.experiment import DIFF_AND_SOFTMAX
from diff_lab.experiments.worker_pool import Job, WorkerPool, default_workers
from diff_lab.measure.standard import validation_callback
from diff_lab.train import DivergenceError, Progress, TrainingInterrupted, build_data, train
from diff_lab.train.run_setup import locked
from diff_transformer.utils.cpu_count import usable_processors
from full_run import short_run
from small_experiment import TINY


@pytest.fixture(autouse=True)
def _forked(forked_workers: None) -> None:
    """No worker has to import torch."""


class Shown(Progress):
    """A progress that remembers what it hears of each run, and does something at the first step of any."""

    def __init__(self, at_step: Callable[[], object] = lambda: None, name: str = "") -> None:
        self.name, self.at_step = name, at_step
        self.runs: dict[str, Shown] = {}
        self.heard: list[tuple[Any, ...]] = []

    def run(self, name: str) -> "Shown":
        self.runs[name] = Shown(self.at_step, name)
        return self.runs[name]

    def start(self, total: int, description: str) -> None:
        self.heard.append(("start", total))

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        self.heard.append(("update", step))
        self.at_step()

    def evaluated(self, step: int, results: Mapping[str, float]) -> None:
        self.heard.append(("evaluated", step, dict(results)))

    def tell(self, message: str) -> None:
        self.heard.append(("tell", message))

    def stop(self) -> None:
        self.heard.append(("stop",))


class Stops(Shown):
    """A user who sends a signal as soon as these runs have done a step."""

    def __init__(self, number: int, *names: str) -> None:
        super().__init__()
        self.number, self.missing = number, set(names)

    def run(self, name: str) -> Shown:
        def at_step() -> None:
            if name in self.missing:
                self.missing.remove(name)
                if not self.missing:
                    signal.raise_signal(self.number)

        return Shown(at_step, name)


def process_and_threads(_: Progress) -> tuple[int, int]:
    time.sleep(0.05)  # so that no process is quick enough to do all of them
    return os.getpid(), torch.get_num_threads()


def raises(error: BaseException, _: Progress) -> None:
    raise error


def raises_what_cannot_be_sent(_: Progress) -> None:
    raise UnsendableError(1, 2)


def raises_inside_python(_: Progress) -> None:
    int("seven")


class UnsendableError(Exception):
    """Made with other arguments than its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def train_tiny(folder: Path, variant: int, steps: int, progress: Progress) -> Path:
    recipe = TINY.variant_recipe(
        DIFF_AND_SOFTMAX[variant], f"train.steps={steps}", "train.evaluate_every=1", "train.checkpoint_every=null"
    )
    data = build_data(recipe)
    settings: dict[str, Any] = {"data": data, "on_evaluate": validation_callback(data.batches), "progress": progress}
    return train(recipe, folder / str(variant), resume="auto", **settings).model_folder / "model.safetensors"


def steps_for_ever(progress: Progress) -> None:
    progress.start(1 << 30, "steps")
    for step in range(1 << 30):
        progress.update(step, 1.0, 1.0)
        time.sleep(0.01)


def fails_when_stopped(progress: Progress) -> None:
    try:
        steps_for_ever(progress)
    except TrainingInterrupted:
        raise OSError(errno.ENOSPC, "No space left on device") from None


def kills_itself(number: int, progress: Progress) -> None:
    """As a signal does that comes before a worker can take it."""
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def results_of(*jobs: Callable[[Progress], Any], workers: int = 2, shown: Shown | None = None) -> list[Any]:
    with WorkerPool[Any](workers, shown or Shown()) as trainings:
        for number, work in enumerate(jobs):
            trainings.add(Job(f"job {number}", work))
        return [result for _, result in trainings.results()]


def fails_at_the_first_result() -> None:
    with WorkerPool[Any](2, Shown()) as trainings:
        trainings.add(Job("long", steps_for_ever))
        trainings.add(Job("short", process_and_threads))
        for _ in trainings.results():
            raise ZeroDivisionError


def children() -> set[int]:
    """This process' own, and those that the process which forks for it has begun."""
    return {child.pid for child in psutil.Process().children(recursive=True) if child.status() != "zombie"}


def test_jobs_are_done_by_processes_that_are_used_again() -> None:
    before = children()
    results = results_of(*[process_and_threads] * 6, workers=2)
    processes = {process for process, _ in results}
    assert len(results) == 6
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert {threads for _, threads in results} == {1}
    assert not children() & processes
    assert len(children() - before) <= 2, "the process that forks, and the tracker of multiprocessing"


def test_one_worker_is_this_process() -> None:
    threads = torch.get_num_threads()
    assert results_of(process_and_threads, process_and_threads, workers=1) == [(os.getpid(), threads)] * 2
    with pytest.raises(ValueError, match="1 worker or more, got 0"):
        WorkerPool(0, Shown())


def test_a_result_may_lead_to_more_jobs() -> None:
    done = []
    with WorkerPool[Any](2, Shown()) as trainings:
        trainings.add(Job("first", process_and_threads))
        for job, _ in trainings.results():
            done.append(job.name)
            if len(done) < 3:
                trainings.add(Job(f"after {job.name}", process_and_threads))
    assert done == ["first", "after first", "after after first"]


def test_trainings_have_the_weights_that_they_have_alone_and_are_shown_each(tmp_path: Path) -> None:
    shown = Shown()
    jobs = [partial(train_tiny, tmp_path / "beside", variant, 3) for variant in (0, 1)]
    beside = sorted(results_of(*jobs, shown=shown))
    alone = [train_tiny(tmp_path / "alone", variant, 3, Progress()) for variant in (0, 1)]
    assert [path.read_bytes() for path in beside] == [path.read_bytes() for path in alone]
    assert shown.runs.keys() == {"job 0", "job 1"}
    for run in shown.runs.values():
        assert run.heard[0] == ("start", 3)
        assert ("update", 3) in run.heard
        assert [one[1] for one in run.heard if one[0] == "evaluated"] == [1, 2, 3]
        assert all(0 <= one[2]["validation/accuracy"] <= 1 for one in run.heard if one[0] == "evaluated")
        assert run.heard[-1] == ("stop",)


def test_ctrl_c_stops_every_training_with_a_checkpoint(tmp_path: Path) -> None:
    jobs = [partial(train_tiny, tmp_path, variant, 20_000) for variant in (0, 1)]
    with pytest.raises(TrainingInterrupted, match=r"job [01], with a checkpoint; job [01], with .*--resume") as caught:
        results_of(*jobs, shown=Stops(signal.SIGINT, "job 0", "job 1"))
    assert caught.value.signal == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for variant in (0, 1):
        assert len(list(tmp_path.glob(f"{variant}/checkpoints/step-*"))) == 1
        assert not (tmp_path / str(variant) / ".lock").exists()


def test_only_checkpoints_that_are_there_are_promised(tmp_path: Path) -> None:
    jobs = (partial(train_tiny, tmp_path, 0, 20_000), steps_for_ever, fails_when_stopped)
    with pytest.raises(TrainingInterrupted) as caught:
        results_of(*jobs, workers=3, shown=Stops(signal.SIGHUP, "job 0", "job 1", "job 2"))
    assert caught.value.signal == signal.SIGHUP
    told = str(caught.value).removeprefix("Stopped: ").partition(". The same")[0]
    failed = "job 2, [Errno 28] job 2: No space left on device"
    assert set(told.split("; ")) == {"job 0, with a checkpoint", "job 1, without a checkpoint", failed}
    assert len(list(tmp_path.glob("0/checkpoints/step-*"))) == 1


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("The text is too short."), RuntimeError, "job 1: ValueError: The text is too short."),
        (DivergenceError("It diverged."), DivergenceError, "job 1: It diverged."),
        (OSError("The disk is full."), OSError, "job 1: The disk is full."),
        (FileNotFoundError(2, "Nothing there", "a/b"), FileNotFoundError, "job 1: Nothing there: 'a/b'"),
        (KeyError("name"), KeyError, "job 1: name"),
    ],
)
def test_an_error_is_raised_as_itself_after_the_others_have_stopped(
    error: Exception, kind: type[Exception], message: str
) -> None:
    before = children()
    with pytest.raises(kind) as caught:
        results_of(steps_for_ever, partial(raises, error))
    assert message in str(caught.value)
    assert len(children() - before) <= 2


def test_an_error_of_another_package_is_told_with_its_place() -> None:
    with pytest.raises(RuntimeError, match="job 0: ValueError: invalid literal") as caught:
        results_of(raises_inside_python)
    assert "in raises_inside_python" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError, match="job 0: UnsendableError: 1 and 2"):
        results_of(raises_what_cannot_be_sent)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        results_of(lambda _: None)


def test_a_killed_worker_is_named_and_the_others_stop(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(OSError, match=r"^job 1: its process ended with exit code -9, .*fewer workers.*--resume"):
        results_of(partial(train_tiny, tmp_path, 0, 20_000), partial(kills_itself, signal.SIGKILL))
    assert len(children() - before) <= 2
    with locked(tmp_path / "0"):  # nobody trains there: the file may stay where the signal came as it was made
        pass
    with pytest.raises(OSError, match=r"^job 0: its process ended with exit code -10\.") as caught:
        results_of(partial(kills_itself, signal.SIGUSR1))
    assert "memory" not in str(caught.value)


@pytest.mark.parametrize("number", short_run([signal.SIGTERM, signal.SIGHUP], [signal.SIGTERM]))
def test_a_worker_that_was_told_to_stop_before_it_could_is_no_error(number: int) -> None:
    """As where all processes of a command get a signal in its first seconds."""
    with pytest.raises(TrainingInterrupted) as caught:
        results_of(steps_for_ever, partial(kills_itself, number))
    assert caught.value.signal == number
    told = "Stopped: job 1, without a checkpoint; job 0, without a checkpoint. The same command with --resume"
    assert str(caught.value).startswith(told)


def test_an_error_of_the_caller_stops_all_jobs() -> None:
    before = children()
    with pytest.raises(ZeroDivisionError):
        fails_at_the_first_result()
    assert len(children() - before) <= 2


def trains_for_ever(folder: Path, progress: Progress) -> None:
    notes_its_process(folder / "0.pid", progress)
    train_tiny(folder, 0, 100_000, progress)


def notes_its_process(path: Path, _: Progress) -> None:
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_default_is_a_worker_for_each_core_that_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "usable_processors", lambda: 16)
    memory = SimpleNamespace(available=5 << 30)
    monkeypatch.setattr(worker_pool.psutil, "virtual_memory", lambda: memory)
    assert default_workers(40, on_cpu=True) == 5
    assert default_workers(3, on_cpu=True) == 3
    assert default_workers(0, on_cpu=True) == 1
    assert default_workers(40, on_cpu=False) == 1
    memory.available = 1
    assert default_workers(40, on_cpu=True) == 1
    monkeypatch.undo()
    assert 1 <= default_workers(40, on_cpu=True) <= usable_processors()


@pytest.mark.all
def test_workers_end_with_a_checkpoint_after_their_parent_was_killed(tmp_path: Path) -> None:
    """Workers that are spawned, as a command has them: one trains, one has nothing to do."""
    parent = forked.start(tmp_path / "log", _train_in_a_parent, tmp_path)
    begun = tmp_path / "0" / "metrics.jsonl"
    wait_until(lambda: begun.exists() and begun.stat().st_size > 0 and (tmp_path / "idle").exists())
    workers = [psutil.Process(int(path.read_text())) for path in (tmp_path / "0.pid", tmp_path / "idle")]
    parent.kill()
    parent.join()
    wait_until(lambda: len(list(begun.parent.glob("checkpoints/step-*"))) == 1)
    wait_until(lambda: all(not worker.is_running() or worker.status() == "zombie" for worker in workers))
    assert not (begun.parent / ".lock").exists()


def _train_in_a_parent(folder: Path) -> None:
    results_of(partial(trains_for_ever, folder), partial(notes_its_process, folder / "idle"))
