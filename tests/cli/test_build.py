"""`diff-transformer build`, with sources that compile at once; and what `info` says of the kernel."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diff_transformer.ops.cpu import cpu_build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is compiled here as on Linux")

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and sources that are one function."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "kernel.cpp").write_text('extern "C" int one() { return 1; }\n', encoding="utf-8")
    monkeypatch.setattr(cpu_build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(cpu_build, "SHIPPED", tmp_path / "none.so")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.all
def test_build_says_where_and_how_long(run: Run, cache: Path) -> None:
    assert "not compiled yet" in run("info").stdout
    for options, duration in ([[], " s: "], [[], " before: "], [["--force"], " s: "]):
        result = run("build", *options)
        assert result.exit_code == 0
        assert result.stdout.startswith("compiled for ")
        assert result.stdout.endswith(f"{duration}{cpu_build.describe().library}\n")
        assert ("compiling the CPU kernel" in result.stderr) == (duration == " s: ")
    status = " ".join(run("info").stdout.split())
    assert "compiled for" in status
    assert "backend cpu on cpu can run" in status


def test_a_build_that_cannot_be_is_one_line(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = run("build")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: The CPU kernel cannot be compiled: it needs a C++ compiler")
    assert result.stderr.count("\n") == 1
    info = " ".join(run("info").stdout.split())
    assert "backend cpu on cpu cannot run: it needs a C++ compiler" in info
    assert "fused CPU kernel not used: it needs a C++ compiler" in info


def test_build_tries_again_after_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cpu_build.describe().folder
    folder.mkdir(parents=True)
    compiler, _ = cpu_build._find_tools()
    record = {"compiler": cpu_build._identity(compiler), "reason": "the disk was full"}
    (folder / "failure.json").write_text(json.dumps(record), encoding="utf-8")
    assert "the disk was full" in " ".join(run("info").stdout.split())
    assert run("build").exit_code == 0
    assert cpu_build.unavailable_reason() is None


def test_a_cache_that_others_may_write_is_said_by_build_and_info(run: Run, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    result = run("build")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"{cache} belongs to user" in result.stderr
    assert "chmod go-w" in result.stderr
    info = " ".join(run("info").stdout.split())
    assert f"fused CPU kernel not used: torch's extension cache is not safe: {cache}" in info
