"""Documents from files, folders, the standard library and data sets, in pieces."""

import itertools
import json
import os
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from diff_lab.data import Corpus, HubDataset, TextFiles, corpus
from diff_lab.data.corpus import PIECE


def documents(source: Corpus, skip: int = 0) -> list[str]:
    """Whole documents, the empty ones too."""
    texts, begun = [], ""
    for piece in source.pieces(skip):
        begun += piece.text
        if piece.ends:
            texts.append(begun)
            begun = ""
    assert begun == ""
    return texts


def test_the_default_is_the_source_of_the_standard_library() -> None:
    found = documents(TextFiles(None))
    text = "\n".join(found)
    assert len(found) > 200
    assert "class JSONDecoder" in text
    assert "class _TestCase_" not in text  # no tests
    assert found[100:] == documents(TextFiles(None), skip=100)


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins\nzwei", encoding="utf-8")
    assert documents(TextFiles([tmp_path / "a.txt"])) == ["eins\nzwei"]


def test_a_jsonl_line_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n{"text": ""}\n')
    assert documents(TextFiles([str(file)])) == ["one", "two", ""]
    file.write_text('{"body": "one"}\n')
    assert documents(TextFiles([file], field="body")) == ["one"]


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two"]}), file)
    assert documents(TextFiles([file])) == ["one", "two"]


def test_a_folder_is_searched_in_order_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "sub" / "c.TXT").write_text("c")
    (tmp_path / "notes.md").write_text("not this")
    assert documents(TextFiles([tmp_path])) == ["a", "b", "c"]


def test_linked_folders_are_searched_once(tmp_path: Path) -> None:
    text, elsewhere = tmp_path / "text", tmp_path / "elsewhere"
    for folder in (text / "plain", elsewhere / "inner"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(folder.name)
    (text / "linked").symlink_to(elsewhere)
    (text / "again").symlink_to(elsewhere / "inner")
    (text / "another name").symlink_to(text / "plain")
    (elsewhere / "back").symlink_to(text)
    (text / "itself").symlink_to(text / "itself")
    (text / "gone").symlink_to(tmp_path / "nowhere")
    found = [os.path.relpath(file, text) for file in TextFiles([text]).files()]
    assert found == ["again/a.txt", "plain/a.txt"]


def test_bad_input_is_one_clear_sentence(tmp_path: Path) -> None:
    def message(error: type[Exception], *names: str) -> str:
        with pytest.raises(error) as raised:
            documents(TextFiles([tmp_path / name for name in names]))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "no-such.txt" in message(FileNotFoundError, "no-such.txt")
    (tmp_path / "a.pdf").write_text("x")
    assert "a.pdf" in message(ValueError, "a.pdf")
    assert ".parquet" in message(ValueError, "a.pdf")
    (tmp_path / "folder").mkdir()
    assert "holds no file" in message(ValueError, "folder")
    assert "empty" in message(ValueError)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 noir")
    assert "not UTF-8" in message(ValueError, "latin.txt")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    assert "Line 2" in message(ValueError, "a.jsonl")
    assert "only 'txt'" in message(ValueError, "a.jsonl")
    (tmp_path / "b.jsonl").write_text("[1]\n")
    assert "a list" in message(ValueError, "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"text": 3}\n')
    assert "not text" in message(ValueError, "c.jsonl")
    (tmp_path / "d.jsonl").write_text("{oops\n")
    assert "Line 1" in message(ValueError, "d.jsonl")
    (tmp_path / "bad.parquet").write_text("not parquet")
    assert "not a readable parquet file" in message(ValueError, "bad.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "b.parquet")
    assert "no column 'text', only 'body'" in message(ValueError, "b.parquet")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one", encoding="utf-8-sig")
    line = json.dumps({"text": "two"})
    (tmp_path / "b.jsonl").write_text(f"\ufeff{line}\n\ufeff{line}\n", encoding="utf-8")  # of two files, joined
    (tmp_path / "c.jsonl").write_text("", encoding="utf-8-sig")
    (tmp_path / "d.txt").write_text("a\ufeffb", encoding="utf-8")
    assert documents(TextFiles([tmp_path])) == ["one", "two", "two", "a\ufeffb"]


def test_what_is_hidden_in_a_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in (".git/a.txt", "._b.txt"):
        (tmp_path / name).write_text("not this")
    with pytest.raises(ValueError, match="holds no file"):
        TextFiles([tmp_path])
    (tmp_path / "b.txt").write_text("this")
    assert documents(TextFiles([tmp_path])) == ["this"]
    assert documents(TextFiles([tmp_path / ".git", tmp_path / "._b.txt"])) == ["not this"] * 2  # who names it wants it


def test_a_name_may_be_a_pattern_or_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    for name in ("b.txt", "a.txt", "c.jsonl", "notes.md", "sub/d.txt", "sub/.e.txt"):
        (text / name).parent.mkdir(parents=True, exist_ok=True)
        (text / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    (text / "sub" / "back").symlink_to(text)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {
        "~/text/*.txt": ["a.txt", "b.txt"],
        "~/text/[ab].*": ["a.txt", "b.txt"],
        "~/text/*": ["a.txt", "b.txt", "c.jsonl", "sub/d.txt"],
        "~/text/**/*.txt": ["a.txt", "b.txt", "sub/d.txt"],
        "~/text/**": ["a.txt", "b.txt", "c.jsonl", "sub/d.txt"],
        "~/text/sub/d.txt": ["sub/d.txt"],
    }
    read = {path: documents(TextFiles([path])) for path in found}
    assert read == found
    same = TextFiles([text / "a.txt", text / "b.txt"])
    assert TextFiles(["~/text/*.txt"]).fingerprint() == same.fingerprint()
    for path in ("~/text/*.parquet", "~/nowhere/*", "~/text/*.md"):
        with pytest.raises(FileNotFoundError, match=r"^The pattern .* matches no file that ends in .*\.parquet\.$"):
            TextFiles([path])
    with pytest.raises(FileNotFoundError, match=r"no text file or folder '~nobody-of-this-name/a\.txt'"):
        TextFiles(["~nobody-of-this-name/a.txt"])


def test_all_files_that_are_not_utf8_are_told_at_once(tmp_path: Path) -> None:
    for number in range(12):
        # Behind what is read at a time, in the middle of a character there.
        (tmp_path / f"{number:02}.txt").write_bytes(b"x" + "é".encode() * PIECE + b"caf\xe9 noir")
    (tmp_path / "a.txt").write_text("é", encoding="utf-8")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "\xff"}')
    (tmp_path / "c.txt").write_bytes(b"\xe9")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="UTF-8") as raised:
        documents(TextFiles([tmp_path]))
    message = str(raised.value)
    assert message.startswith("14 files are not UTF-8 text: ")
    assert f"00.txt' (invalid continuation byte at byte {2 * PIECE + 4})" in message
    assert message.endswith("04.txt' (invalid continuation byte at byte 524292) and 9 more.")
    with pytest.raises(ValueError, match=r"c\.txt' is not UTF-8 text: unexpected end of data at byte 0\.$"):
        documents(TextFiles([tmp_path / "a.txt", tmp_path / "c.txt"]))


def test_values_and_columns_are_quoted_in_short(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for row in (
        {"text": ["word"] * 100_000},
        {"word" * 100_000: 1},
        {f"column {n}": n for n in range(10_000)},
        "a" * 10**6,
    ):
        file.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=r"^Line 1 of .*a\.jsonl") as raised:
            documents(TextFiles([file]))
        assert len(str(raised.value)) < 700
    with pytest.raises(FileNotFoundError, match="no text file or folder 'a text") as missing:
        TextFiles(["a text that is no name, but the text itself. " * 1000])
    assert len(str(missing.value)) < 400


def test_a_file_name_is_no_pattern(tmp_path: Path) -> None:
    file = tmp_path / "x[1].parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), file)
    assert documents(TextFiles([file])) == ["one"]


def test_parquet_without_rows_and_broken_parquet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    assert documents(TextFiles([file])) == []
    file.write_text("not parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        documents(TextFiles([file]))
    assert capfd.readouterr().err == ""


def test_half_a_pair_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "a \\ud800"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*a\.jsonl.*'\\ud800', which is not a Unicode character"):
        documents(TextFiles([file]))


def test_a_long_document_comes_in_pieces_cut_where_no_token_is(tmp_path: Path) -> None:
    words = [f"wörd{number}" for number in range(PIECE // 4)]
    text = " ".join(words) + "\n" + "x" * PIECE + " end "
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text("b", encoding="utf-8")
    pieces = list(TextFiles([tmp_path]).pieces())
    assert [piece.ends for piece in pieces[-2:]] == [True, True]
    assert len(pieces) > 4
    assert "".join(piece.text for piece in pieces) == text + "b"
    for before, after in itertools.pairwise(pieces[:-1]):
        assert not before.text[-1].isspace()
        assert after.text[0].isspace()
        assert len(before.text) < 3 * PIECE


def test_text_without_a_place_to_cut_is_cut_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 10)
    monkeypatch.setattr(corpus, "_LONGEST_PIECE", 30)
    (tmp_path / "a.txt").write_text("x" * 100)
    assert [len(piece.text) for piece in TextFiles([tmp_path]).pieces()] == [30, 30, 30, 10]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", "data set"])
def test_a_row_is_cut_as_a_file_is(ending: str, tmp_path: Path) -> None:
    texts = ["wörd " * PIECE, "", " \n" * PIECE, "x" * PIECE + " y" * PIECE, "short"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "rows").mkdir()
    file = tmp_path / "rows" / ("train.jsonl" if ending == "data set" else f"train{ending}")
    if ending == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    else:
        file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = HubDataset(str(file.parent)) if ending == "data set" else TextFiles([file])
    expected = list(TextFiles([tmp_path / f"{number}.txt" for number in range(len(texts))]).pieces())
    assert list(source.pieces()) == expected
    assert len(expected) > 8
    assert documents(source, skip=1) == ["", "", *texts[3:]]


def test_a_document_of_white_space_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 10)
    (tmp_path / "a.txt").write_text(" \n" * 30)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.jsonl").write_text('{"text": "\\n "}\n')
    assert list(TextFiles([tmp_path]).pieces()) == [("", True)] * 3


@pytest.mark.parametrize("skip", [0, 1, 2, 3, 4, 5, 6])
def test_documents_can_be_skipped(tmp_path: Path, skip: int) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{"text": "c"}\n{"text": ""}\n')
    (tmp_path / "d.txt").write_text("d")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["e", "f"]}), tmp_path / "e.parquet")
    assert documents(TextFiles([tmp_path]), skip) == ["a", "b", "c", "", "d", "e", "f"][skip:]


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
        assert documents(HubDataset(folder)) == ["one", "", "three"]
        assert documents(HubDataset(folder), skip=2) == ["three"]
        assert documents(HubDataset(folder, split="test")) == ["four"]

    def test_a_fingerprint_is_of_the_split_and_the_column(self, folder: str) -> None:
        prints = {HubDataset(folder, split=split, field=field).fingerprint() for split in "ab" for field in "cd"}
        assert len(prints) == 4
        assert HubDataset(folder).fingerprint() == HubDataset(folder).fingerprint()

    def test_what_datasets_cannot_load_is_told_by_the_settings(self, folder: str) -> None:
        settings = (
            rf"^data.dataset='{folder}', data.dataset_config=None and data.dataset_split='foo' name no text that "
        )
        with pytest.raises(ValueError, match=rf"{settings}can be loaded: Bad split: foo\. Available splits: "):
            documents(HubDataset(folder, split="foo"))
        settings = (
            r"data.dataset_config='other' and data.dataset_split='train' name no text that can be loaded: Builder"
        )
        for read in (HubDataset(folder, "other").fingerprint, HubDataset(folder, "other").pieces().__next__):
            with pytest.raises(ValueError, match=settings):
                read()

    def test_a_column_that_a_row_lacks_is_named(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of some data sets the columns are not known before their rows are read."""
        monkeypatch.setattr(datasets.IterableDataset, "column_names", None)
        with pytest.raises(ValueError, match=r"^Row 1 of the data set .* has no column 'body', only 'text'\.$"):
            documents(HubDataset(folder, field="body"))

    def test_a_column_that_is_not_there_is_named(self, folder: str) -> None:
        with pytest.raises(ValueError, match=r"has no column 'body', only 'text'\."):
            documents(HubDataset(folder, field="body"))
