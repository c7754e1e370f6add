"""Documents from files, folders, the standard library and data sets."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from diff_lab.data import HubDataset, TextFiles


def documents(*names: Path | str) -> list[str]:
    return list(TextFiles([str(name) for name in names]).documents())


def parquet(file: Path, **columns: list[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({name: pyarrow.array(cells) for name, cells in columns.items()}), file)
    return file


def test_the_default_is_the_source_of_the_standard_library() -> None:
    found = list(TextFiles(None).documents())
    text = "\n".join(found)
    assert len(found) > 200
    assert "class JSONDecoder" in text
    assert "class _TestCase_" not in text  # no tests
    assert found[100] == next(TextFiles(None).documents(skip=100))


@pytest.mark.parametrize("skip", [0, 1, 4, 7])
def test_a_folder_is_read_in_order_and_documents_can_be_skipped(tmp_path: Path, skip: int) -> None:
    """A `.txt` file, a line and a row are documents, empty where they hold white space; other files are left alone."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("eins\nzwei", encoding="utf-8-sig")
    lines = (
        '{"text": "b"}',
        "",
        '\ufeff{"text": "c", "id": 3}',
        '{"text": ""}',
        '{"text": "\\n "}',
    )  # two files, joined
    (tmp_path / "b.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    (tmp_path / "c.jsonl").write_text("", encoding="utf-8-sig")
    (tmp_path / "d.txt").write_text(" \n" * 30)
    parquet(tmp_path / "e[1].parquet", text=["e\ufefff", "g"], id=["1", "2"])  # a name that could be a pattern
    (tmp_path / "sub" / "h.TXT").write_text("h")
    (tmp_path / "notes.md").write_text("not this")
    read = TextFiles([tmp_path]).documents(skip)
    assert list(read) == ["eins\nzwei", "b", "c", "", "", "", "e\ufefff", "g", "h"][skip:]
    assert documents(tmp_path / "e[1].parquet") == ["e\ufefff", "g"]


def test_another_field_holds_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    parquet(tmp_path / "b.parquet", body=["two"])
    assert list(TextFiles([tmp_path], field="body").documents()) == ["one", "two"]


def test_files_of_a_folder_and_of_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linked files, but no links to nowhere or to folders, and nothing hidden unless it is named."""
    text = tmp_path / "text"
    for name in ("b.txt", "a.txt", "c.jsonl", "notes.md", "sub/d.txt", "sub/.e.txt", ".git/f.txt"):
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        (text / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "g.txt").write_text("not this")
    (text / "sub" / "linked").symlink_to(tmp_path / "elsewhere")
    (text / "sub" / "gone.txt").symlink_to(text / "nowhere")
    (text / "z.txt").symlink_to(text / "a.txt")
    (text / "sub" / "circle").symlink_to(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {
        "~/text": ["a.txt", "b.txt", "c.jsonl", "sub/d.txt", "a.txt"],
        "~/text/*.txt": ["a.txt", "b.txt", "a.txt"],
        "~/text/[ab].*": ["a.txt", "b.txt"],
        "~/text/**/d.txt": ["sub/d.txt"],
        "~/text/**/[ab].txt": ["a.txt", "b.txt"],
        "~/text/sub*": ["sub/d.txt"],
        "~/text/.git": [".git/f.txt"],
        "~/text/sub/.e.txt": ["sub/.e.txt"],
    }
    assert {path: documents(path) for path in found} == found
    for path in ("~/text/*.parquet", "~/nowhere", "~nobody-of-this-name/a.txt"):
        with pytest.raises(FileNotFoundError, match="There is no text file or folder '"):
            TextFiles([path])
    with pytest.raises(ValueError, match=r"^There is no text in .*: a text file ends in .*\.parquet\.$"):
        TextFiles(["~/text/*.md"])


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:  # root may read whatever it likes
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: .*closed"):
        TextFiles([tmp_path]).files()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", b"caf\xe9 noir", r"latin\.txt' is not UTF-8 text: invalid continuation byte at byte 3\.$"),
        ("a.jsonl", b'{"text": "\xff"}', r"^Line 1 of .*a\.jsonl' is not UTF-8 text"),
        ("a.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "^Line 2 of .* has no field 'text', only 'txt'"),
        ("a.jsonl", b"[1]\n", "a list"),
        ("a.jsonl", b'{"text": 3}\n', "not text"),
        ("a.jsonl", b"{oops\n", "^Line 1 of .* is not JSON"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "a \\ud800"}\n', r"Line 2 of .*'\\ud800', which is not a Unicode"),
        ("bad.parquet", b"not parquet", "not a readable parquet file"),
        ("a.pdf", b"x", r"There is no text in .*a\.pdf': a text file ends in .*\.parquet"),
    ],
)
def test_bad_input_is_one_clear_sentence(
    tmp_path: Path, name: str, content: bytes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as raised:
        documents(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr().err == ""


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="The corpus is empty"):
        TextFiles([])
    with pytest.raises(ValueError, match="no column 'text', only 'body'"):
        documents(parquet(tmp_path / "b.parquet", body=["one"]))
    assert documents(parquet(tmp_path / "c.parquet", text=[])) == []


def test_values_and_columns_are_quoted_in_short(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for row in ({"text": ["word"] * 100_000}, {"word" * 100_000: 1}, {f"column {n}": n for n in range(10_000)}):
        file.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=r"^Line 1 of .*a\.jsonl") as raised:
            documents(file)
        assert len(str(raised.value)) < 700


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "a.txt").write_text("one")
        (folder / "b.txt").write_text("two")
    print_of = TextFiles([first]).fingerprint()
    assert print_of == TextFiles([second / "a.txt", second / "b.txt"]).fingerprint()
    assert print_of != TextFiles([second / "b.txt", second / "a.txt"]).fingerprint()
    assert print_of != TextFiles([first], field="body").fingerprint()
    (second / "b.txt").write_text("tw")
    (second / "c.txt").write_text("o")
    assert print_of != TextFiles([second]).fingerprint()


class TestDataset:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        (tmp_path / "rows").mkdir()
        (tmp_path / "rows" / "train.jsonl").write_text('{"text": "one"}\n{"text": " "}\n{"text": "three"}\n')
        (tmp_path / "rows" / "test.jsonl").write_text('{"text": "four"}\n')
        return str(tmp_path / "rows")

    def test_a_row_is_a_document(self, folder: str) -> None:
        assert list(HubDataset(folder).documents()) == ["one", "", "three"]
        assert list(HubDataset(folder).documents(skip=2)) == ["three"]
        assert list(HubDataset(folder, split="test").documents()) == ["four"]
        with pytest.raises(ValueError, match=r"^Row 1 of the data set .* has no column 'body', only 'text'\.$"):
            list(HubDataset(folder, field="body").documents())

    def test_a_fingerprint_is_of_the_split_and_the_column(self, folder: str) -> None:
        prints = {HubDataset(folder, split=split, field=field).fingerprint() for split in "ab" for field in "cd"}
        assert len(prints) == 4
        assert HubDataset(folder).fingerprint() == HubDataset(folder).fingerprint()

    def test_what_datasets_cannot_load_is_told_by_the_settings(self, folder: str) -> None:
        settings = rf"^data.dataset='{folder}', data.dataset_config=None and data.dataset_split='foo' name no text"
        with pytest.raises(ValueError, match=rf"{settings} that can be loaded: Bad split: foo\. Available splits: "):
            list(HubDataset(folder, split="foo").documents())
        with pytest.raises(ValueError, match=r"data.dataset_config='other' .* can be loaded: Builder"):
            HubDataset(folder, "other").fingerprint()
