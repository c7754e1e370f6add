import subprocess
from pathlib import Path

import pytest

from diff_transformer.results import Result, capture_environment, capture_results, command_line, environment


def test_the_environment_says_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.sys, "argv", ["/somewhere/bin/diff-transformer", "demo", "--text", "my notes.txt"])
    found = capture_environment("cpu")
    assert found.command == "diff-transformer demo --text 'my notes.txt'"
    assert "thread" in found.device
    assert set(found.versions) == {"python", "diff-transformer", "torch", "transformers"}
    assert found.created.endswith("+00:00")
    monkeypatch.setattr(environment.sys, "argv", ["benchmarks/ops.py", "-v"])
    assert command_line() == "ops.py -v"
    records = [Result(name="x", arm="diff", value=1.0)]
    captured = capture_results("title", {"steps": 1}, records, "cpu")
    assert captured.records == tuple(records)
    assert captured.command == "ops.py -v"


def test_the_commit_is_this_projects_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "results.py"
    module.write_text("")
    monkeypatch.setattr(environment, "__file__", str(module))
    assert environment._git_commit() is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "somebody else's")
    assert environment._git_commit() is None, "a file that their repository does not track is not theirs"
    git("add", "results.py")
    git("commit", "-qm", "ours")
    assert environment._git_commit() == git("rev-parse", "HEAD")
    module.write_text("changed")
    assert environment._git_commit() == git("rev-parse", "HEAD") + "-dirty"
