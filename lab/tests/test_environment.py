import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from diff_lab.record import Result
from diff_lab.results_files import capture_environment, capture_results, command_line, short_commit
from diff_transformer.utils import environment


def test_the_environment_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/diff-lab", "compare", "--text", "my notes.txt"])
    captured = capture_environment("cpu")
    assert captured.command == "diff-lab compare --text 'my notes.txt'"
    assert "thread" in captured.device
    assert set(captured.versions) == {"python", "diff-transformer", "torch", "transformers"}
    assert captured.created.endswith("+00:00")
    monkeypatch.setattr(sys, "argv", ["lab/benchmarks/ops.py", "-v"])
    assert command_line() == "ops.py -v"
    records = [Result(name="x", variant="diff", value=1.0)]
    captured = capture_results("title", {"steps": 1}, records, "cpu")
    assert captured.records == tuple(records)
    assert captured.command == "ops.py -v"


def test_a_short_commit() -> None:
    assert short_commit(None) == "unknown"
    assert short_commit("0123456789abcdef") == "0123456789ab"
    assert short_commit("0123456789abcdef-dirty") == "0123456789ab-dirty"


def test_the_commit_is_this_projects_or_none(tmp_path: Path) -> None:
    module = Path(shutil.copy(environment.__file__, tmp_path / "results.py"))
    git_commit = runpy.run_path(str(module))["git_commit"]
    assert git_commit() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("commit", "-qm", "somebody else's", "--allow-empty")
    assert git_commit() is None, "a file that their repository does not track is not theirs"
    git("add", "results.py")
    git("commit", "-qm", "ours")
    assert git_commit() == git("rev-parse", "HEAD")
    module.write_text("changed")
    assert git_commit() == git("rev-parse", "HEAD") + "-dirty"
