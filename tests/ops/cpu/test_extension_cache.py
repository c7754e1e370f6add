"""Whose libraries are loaded: permissions and owners of the cache, with a library that is never really loaded."""

import functools
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from diff_transformer.ops.cpu import cpu_backend, cpu_build
from diff_transformer.ops.cpu.cpu_build import make_private, refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is compiled here as on Linux")

SOMEBODY = 12345


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that were loaded: none is, in truth."""
    libraries: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", libraries.append)
    return libraries


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Path]) -> Path:
    """A library in a private cache, two folders below the test's own."""
    for name in ("_kernel_error", "_load_kernel", "_warn_of_fallback"):
        monkeypatch.setattr(cpu_backend, name, functools.cache(getattr(cpu_backend, name).__wrapped__))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "above" / "cache"))
    monkeypatch.delenv(cpu_build.SWITCH, raising=False)
    monkeypatch.setattr(cpu_build, "_run_compiler", lambda *_: pytest.fail("it was compiled"))
    path = cpu_build.describe().library
    make_private(path.parent)
    path.write_bytes(b"not loaded in truth")
    path.chmod(0o644)
    return path


def path_of(name: str, library: Path) -> Path:
    return {"library": library, "folder": library.parent, "cache": library.parents[1], "above": library.parents[2]}[
        name
    ]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`place` is somebody else's; of who is not root, all is."""
    if os.geteuid() == 0:
        os.chown(path, SOMEBODY, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)


def refused(loaded: list[Path], *parts: str) -> None:
    """Neither loaded nor compiled, by any way, and every way says why."""
    for attempt in (cpu_build.load, cpu_build.compile_library, lambda: cpu_build.compile_library(force=True)):
        with pytest.raises(cpu_build.BuildError) as error:
            attempt()
        for part in parts:
            assert part in str(error.value)
    assert loaded == []
    assert str(cpu_build.unavailable_reason()) == str(error.value)
    assert cpu_build.status() == f"not used: {error.value}"


def test_a_library_of_our_own_is_loaded(library: Path, loaded: list[Path]) -> None:
    assert cpu_build.unavailable_reason() is None
    cpu_build.load()
    assert loaded == [library]


@pytest.mark.parametrize("name", ["library", "folder", "cache", "above"])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_what_others_may_write_is_refused_with_the_command_that_mends_it(
    name: str, mode: int, library: Path, loaded: list[Path]
) -> None:
    path = path_of(name, library)
    path.chmod(mode)
    refused(loaded, f"{path} belongs to user {os.geteuid()} with mode 0{mode:o}", f"chmod go-w {path}`", "--force")
    path.chmod(mode & ~0o022)
    cpu_build.load()
    assert loaded == [library]


@pytest.mark.parametrize("name", ["library", "folder", "cache", "above"])
def test_what_somebody_else_owns_is_refused(
    name: str, library: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(path_of(name, library), monkeypatch)
    refused(loaded, "belongs to user", "TORCH_EXTENSIONS_DIR")


def test_below_a_sticky_folder_a_folder_of_our_own_is_fine_and_a_sticky_one_is_not(
    library: Path, loaded: list[Path]
) -> None:
    path_of("cache", library).chmod(0o1777)  # as /tmp is
    cpu_build.load()
    assert loaded == [library]
    loaded.clear()
    library.parent.chmod(0o1777)
    refused(loaded, "1777")


def test_a_link_is_followed_to_what_it_names(library: Path, loaded: list[Path], tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    elsewhere = library.rename(tmp_path / "open" / "other.so")
    library.symlink_to(elsewhere)
    refused(loaded, f"{elsewhere.parent} belongs")


def test_what_root_has_installed_for_all_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert refusal(Path("/bin/sh").resolve()) is None


def test_a_cache_that_cannot_be_entered_is_one_sentence(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(path: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as context:
        context.setattr(os, "lstat", closed)
        with pytest.raises(cpu_build.BuildError, match="Permission denied"):
            cpu_build.load()


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_what_is_made_is_ours_alone_whatever_the_umask(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.unlink()
    library.parent.rmdir()
    library.parents[1].rmdir()

    def compiled(built: cpu_build.Build, work: Path, _: object) -> int:
        (work / built.library.name).touch(mode=0o777)
        (work / built.log.name).touch()
        return 0

    monkeypatch.setattr(cpu_build, "_run_compiler", compiled)
    cpu_build.load()
    assert stat.S_IMODE(library.stat().st_mode) == 0o755
    for folder in library.parents[:2]:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("spoil", [lambda path, _: path.chmod(0o777), give_away], ids=["open", "foreign"])
def test_nothing_is_compiled_into_a_folder_of_others(
    spoil: Callable[..., None], library: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.unlink()
    spoil(library.parent, monkeypatch)
    refused(loaded, "any code")
    assert list(library.parent.iterdir()) == []
