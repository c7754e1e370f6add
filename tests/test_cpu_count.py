"""How many threads a process may use: control groups, and what the kernel and the commands take."""

import os
from pathlib import Path

import pytest

from diff_transformer.utils import cpu_count
from fresh import run


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a made-up machine's control groups: sixteen processors, and no limit yet."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(cpu_count, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(cpu_count, "_MOUNT", tmp_path / "mount")
    return tmp_path


def write(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="utf-8")


def test_the_first_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cpu_count.is_rank0()
    for rank, is_first in (("0", True), ("1", False), ("10", False)):
        monkeypatch.setenv("RANK", rank)
        assert cpu_count.is_rank0() == is_first


def test_where_there_are_no_groups_all_processors_are_used(groups: Path) -> None:
    assert cpu_count.usable_processors() == 16


@pytest.mark.parametrize(
    ("own", "parent", "processors_used"),
    [
        ("max 100000", "max 100000", 16),
        ("200000 100000", "max 100000", 2),
        ("150000 100000", "max 100000", 2),  # one and a half
        ("5000 100000", "max 100000", 1),
        ("max 100000", "300000 100000", 3),
        ("800000 100000", "300000 100000", 3),
        ("6400000 100000", "max 100000", 16),
    ],
)
def test_version_2(own: str, parent: str, processors_used: int, groups: Path) -> None:
    write(groups, membership="0::/pod/box")
    write(groups / "mount" / "pod", cpu__max=parent)
    write(groups / "mount" / "pod" / "box", cpu__max=own)
    assert cpu_count.usable_processors() == processors_used


def test_version_2_in_a_container_that_sees_its_own_group_alone(groups: Path) -> None:
    write(groups, membership="0::/pod/box")
    write(groups / "mount", cpu__max="400000 100000")
    assert cpu_count.usable_processors() == 4


def test_the_command_line_takes_no_more_threads(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu_count.THREADS, raising=False)
    cpu_count.limit_threads()
    assert cpu_count.THREADS not in os.environ
    write(groups, membership="0::/")
    write(groups / "mount", cpu__max="200000 100000")
    cpu_count.limit_threads()
    assert os.environ[cpu_count.THREADS] == "2"
    monkeypatch.setenv(cpu_count.THREADS, "5")
    cpu_count.limit_threads()
    assert os.environ[cpu_count.THREADS] == "5"


THREADS_OF_THE_COMMANDS = """
import os, sys
from diff_transformer.utils import cpu_count
from diff_transformer.cli import main
cpu_count.usable_processors, cpu_count._allowed = lambda: 3, lambda: 4
sys.argv = ["diff-transformer", "--version"]
try:
    main()
except SystemExit:
    pass
assert os.environ["OMP_NUM_THREADS"] == "3", os.environ["OMP_NUM_THREADS"]
"""


def test_the_commands_ask_before_torch_is_there() -> None:
    environment = {name: value for name, value in os.environ.items() if name != cpu_count.THREADS}
    finished = run(THREADS_OF_THE_COMMANDS, environment=environment)
    assert finished.returncode == 0, finished.stderr


THREADS_OF_THE_KERNEL = """
import os, torch
from diff_transformer import diff_attention
torch.set_num_threads(1)
q = torch.randn(2, 8, 2, 300, 16, requires_grad=True)
v = torch.randn(2, 8, 300, 32)
before = len(os.listdir("/proc/self/task"))
diff_attention(q, q, v, torch.tensor(0.5), is_causal=True, backend="cpu").sum().backward()
with torch.no_grad():
    diff_attention(q[..., -1:, :], q, v, torch.tensor(0.5), is_causal=True, backend="cpu")
grown = len(os.listdir("/proc/self/task")) - before
assert grown <= 1, grown  # autograd's own thread
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_the_kernel_takes_no_more_threads_than_torch() -> None:
    finished = run(THREADS_OF_THE_KERNEL)
    assert finished.returncode == 0, finished.stderr
