"""How many threads a process may use: control groups, and what the kernel and the commands take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diff_transformer.utils import cpu_count
from fresh import run


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a made-up machine's control groups: sixteen processors, and no limit yet."""
    for place, name, value in (
        (os, "sched_getaffinity", lambda process: set(range(16))),
        (cpu_count, "_MEMBERSHIP", tmp_path / "membership"),
        (cpu_count, "_MOUNT", tmp_path / "mount"),
    ):
        monkeypatch.setattr(place, name, value, raising=False)
    return tmp_path


def write(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text + "\n", encoding="utf-8")


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
    assert cpu_count.usable_processors() == 16  # there are no groups
    write(groups, membership="0::/pod/box")
    write(groups / "mount" / "pod", cpu__max=parent)
    write(groups / "mount" / "pod" / "box", cpu__max=own)
    assert cpu_count.usable_processors() == processors_used
    # A container sees its own group alone, as the root of what is mounted.
    write(groups / "mount", cpu__max="100000 100000")
    assert cpu_count.usable_processors() == 1


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


def test_the_commands_ask_before_torch_is_there() -> None:
    code = """
import sys, diff_transformer.cli as cli
cli.limit_threads = lambda: print("torch" in sys.modules)
sys.argv = ["diff-transformer", "--version"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False\n")


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
