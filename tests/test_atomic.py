"""Files and folders that appear under their names only when they are complete, and JSON that somebody hands us."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from diff_transformer.utils.files import (
    atomic_directory,
    atomic_file,
    clean_up,
    clean_up_all,
    commit,
    parse_json,
    present_folders,
    read_json,
    unfinished_path,
    write_atomically,
)


class Interrupted(BaseException):
    """As Ctrl-C is: no Exception."""


def fail(file: Path, error: type[BaseException]) -> None:
    file.write_text("new")
    raise error


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_file_replaces_the_old_one_when_it_is_on_the_disk(tmp_path: Path, disk: Any, concurrent: bool) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    with atomic_file(file, concurrent=concurrent) as unfinished:
        assert unfinished.parent == tmp_path
        unfinished.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert disk.moved == [file]
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("error", [OSError, Interrupted])
def test_what_failed_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "a.txt"
    file.write_text("old")
    with pytest.raises(error), atomic_file(file) as unfinished:
        fail(unfinished, error)
    with pytest.raises(error), atomic_directory(tmp_path / "folder") as folder:
        fail(folder / "a", error)
    assert file.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_what_a_killed_process_left_of_a_file_is_overwritten(tmp_path: Path) -> None:
    unfinished = unfinished_path(tmp_path / "a.txt")
    unfinished.write_text("half of something long")
    unfinished.chmod(0o400)
    write_atomically(tmp_path / "a.txt", "λ\n")
    assert (tmp_path / "a.txt").read_bytes() == "λ\n".encode()
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_get_the_permissions_of_new_ones(umask: int, tmp_path: Path) -> None:
    """Also where a library makes them for their owner alone."""
    before = os.umask(umask)
    try:
        with atomic_file(tmp_path / "file") as unfinished:
            unfinished.unlink()
            unfinished.touch(mode=0o600)
        with atomic_directory(tmp_path / "folder") as folder:
            (folder / "inside").mkdir()
            (folder / "inside" / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    for file in (tmp_path / "file", tmp_path / "folder" / "inside" / "file"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask
    assert names(tmp_path / "folder") == ["inside"]


def test_a_folder_has_its_name_when_it_is_on_the_disk(tmp_path: Path, disk: Any) -> None:
    target = tmp_path / "new" / "folder"
    with atomic_directory(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert names(target) == ["a"]
    assert names(target.parent) == ["folder"]
    assert disk.moved == [target]
    assert {target.parent.stat().st_ino, tmp_path.stat().st_ino} <= disk.flushed  # the new names as well


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_folder_that_exists_is_refused(tmp_path: Path, when: str) -> None:
    target = tmp_path / "folder"
    if when == "before":
        target.mkdir()
    with pytest.raises(FileExistsError, match="exists already"), atomic_directory(target):
        target.mkdir()
    assert names(tmp_path) == ["folder"]
    assert names(target) == []


def test_a_folder_is_replaced_only_where_that_is_meant(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    for text in ("old", "new"):
        unfinished = unfinished_path(target)
        unfinished.mkdir()
        (unfinished / "a").write_text(text)
        if text == "new":
            with pytest.raises(FileExistsError, match="exists already"):
                commit(unfinished, target)
            assert (target / "a").read_text() == "old"
        commit(unfinished, target, replace=True)
        assert (target / "a").read_text() == text
    clean_up(target)
    assert names(tmp_path) == ["folder"]


def test_what_a_killed_process_left_of_folders_is_found_and_cleaned_up(tmp_path: Path) -> None:
    for name in ("step-1", ".replaced-step-1", ".replaced-step-2", ".unfinished-step-2", ".unfinished-step-3", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / ".replaced-step-2" / "a").write_text("moved aside")
    assert present_folders(tmp_path, "step-*") == {
        "step-1": tmp_path / "step-1",
        "step-2": tmp_path / ".replaced-step-2",
    }
    clean_up_all(tmp_path, "step-*")
    assert names(tmp_path) == ["step-1", "step-2", "x"]
    assert names(tmp_path / "step-2") == ["a"]


def test_a_parent_that_cannot_be_read_does_not_undo_a_finished_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a home folder of mode 0711: its names cannot be flushed, and need not be."""
    open_any = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if tmp_path.is_relative_to(path):
            raise PermissionError(path)
        return open_any(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with atomic_directory(tmp_path / "made") as unfinished:
        (unfinished / "file").write_text("whole")
    assert names(tmp_path) == ["made"]


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DEEP, "lists in lists too deep"),
        ('{"a": ' * 200_000, "lists in lists too deep"),
        ("{", "not JSON"),
        ("", "not JSON"),
        ("9" * 5000, "not JSON: .*Exceeds the limit"),
        (b"\xff{}", "UTF-8 text: .* at byte 0"),
    ],
    ids=["deep", "deep objects", "half", "nothing", "digits", "bytes"],
)
def test_json_that_cannot_be_read_is_one_sentence_with_its_place(
    data: str | bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"line 3 .*{message}") as caught:
        parse_json(data, "line 3")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    file = tmp_path / "config.json"
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(ValueError, match=f"config.json .*{message}"):
        read_json(file)


def test_json_that_can_be_read_is(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "a.json").write_text('{"λ": [1, null]}', encoding=encoding)
        assert read_json(tmp_path / "a.json") == {"λ": [1, None]}
    with pytest.raises(FileNotFoundError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")
