"""What every test gets: the same random numbers each time, and hypothesis without a clock or a database."""

import gc
import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import forked
import full_run
import triton_interpreter

# Nothing becomes garbage while tests are collected, and looking for it is a quarter of the work.
gc.disable()

# The tensors here are tiny, and a second thread costs more than it does: ten times the time on a busy machine.
torch.set_num_threads(1)

# Without them torch.manual_seed would still note, for each kind of device, which lines called it: most of its time.
for devices in (torch.cuda, torch.xpu, torch.mtia):
    if not devices.is_available():
        devices.manual_seed_all = lambda seed: None

# A shell starts what runs in its background (`make test &`) deaf to Ctrl-C, which tests send to processes of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A tokenizer or model that is no folder is not looked for on a network, which takes a minute where there is none.
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

# Without a GPU the Triton kernels run in triton's interpreter, which has to know before it sees them.
if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    triton_interpreter.quicken()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens of this run's tests alone, in one place for all its processes: the standard library is prepared once."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIFF_TRANSFORMER_CACHE", str(shared / "cache"))
        yield


hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, database=None, max_examples=60)
hypothesis.settings.load_profile("suite")


# A fixture of each of these takes many seconds, for all tests of the file. They run first: what one process takes over
# from another at the end is small, and no such fixture is set up by both.
FIRST = {
    "test_distributed.py",
    "test_sharded_checkpoints.py",
    "test_onnx.py",
    "test_tensor_parallel.py",
    "test_site.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the tests marked `all`, too, as `make test-all` does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        left_out = full_run.left_out(items)
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.name not in FIRST)
    for item in items:
        if item.get_closest_marker("gpu"):  # not a folder of that name
            # What torch remarks about compiling, profiling and tensor cores there is not about the tests.
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: looking through it for garbage takes a tenth of the time of small tests."""
    keep_what_is_loaded()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Nor is what a file has loaded looked through in later ones: generate_batch and trainers do so every time."""
    yield
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_loaded()


def keep_what_is_loaded() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one processor, so that trainings stay in this process: others would have to import torch."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a machine with two processors, forked off a process that has imported everything."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(forked.PRELOADED)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # where workers find the jobs of a test: lab.tests…
    monkeypatch.setattr("diff_lab.experiments.worker_pool.START", "forkserver")
    # Each of two has one thread, as every test.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)


@pytest.fixture
def accelerate_afresh() -> Iterator[None]:
    """accelerate keeps what a trainer set up for the whole process; the next test may want another precision."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def cold() -> Iterator[None]:
    """Compilation by torch from nothing, and nothing left of it."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class DiskRecorder:
    """What reached the disk, by inode, and what was moved where; nothing is moved that had not reached it."""

    def __init__(self) -> None:
        self.flushed: set[int] = set()
        self.moved: list[Path] = []
        self._rename = os.replace

    def flush(self, descriptor: int) -> None:
        self.flushed.add(os.fstat(descriptor).st_ino)

    def move(self, old: Path, new: Path) -> None:
        assert {path.stat().st_ino for path in (old, *old.rglob("*"))} <= self.flushed
        self.moved.append(new)
        self._rename(old, new)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> DiskRecorder:
    recorder = DiskRecorder()
    monkeypatch.setattr(os, "fsync", recorder.flush)
    monkeypatch.setattr(os, "replace", recorder.move)
    return recorder


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out uninitialised is full of NaN, so that reading what was never written shows."""
    was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was[0])
    torch.utils.deterministic.fill_uninitialized_memory = was[1]
