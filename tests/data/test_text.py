"""Documents from files, folders and the standard library."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from diff_transformer.data import load_text


def test_the_default_is_the_source_of_the_standard_library() -> None:
    documents = load_text(None)
    text = "\n".join(documents)
    assert len(documents) > 200
    assert "class JSONDecoder" in text
    assert "class _TestCase_" not in text  # no tests
    assert documents == load_text(None)


def test_a_txt_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("eins\nzwei", encoding="utf-8")
    assert load_text([tmp_path / "a.txt"]) == ["eins\nzwei"]


def test_a_jsonl_line_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n{"text": ""}\n')
    assert load_text([str(file)]) == ["one", "two"]
    file.write_text('{"body": "one"}\n')
    assert load_text([file], field="body") == ["one"]


def test_a_parquet_row_is_a_document(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two"]}), file)
    assert load_text([file]) == ["one", "two"]


def test_a_folder_is_searched_in_order_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    (tmp_path / "sub" / "c.TXT").write_text("c")
    (tmp_path / "notes.md").write_text("not this")
    assert load_text([tmp_path]) == ["a", "b", "c"]


def test_bad_input_is_one_clear_sentence(tmp_path: Path) -> None:
    def message(error: type[Exception], *names: str) -> str:
        with pytest.raises(error) as raised:
            load_text([tmp_path / name for name in names])
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "no-such.txt" in message(FileNotFoundError, "no-such.txt")
    (tmp_path / "a.pdf").write_text("x")
    assert "a.pdf" in message(ValueError, "a.pdf")
    assert ".parquet" in message(ValueError, "a.pdf")
    (tmp_path / "folder").mkdir()
    assert "holds no file" in message(ValueError, "folder")
    (tmp_path / "empty.txt").write_text(" \n")
    assert "empty" in message(ValueError, "empty.txt")
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


def test_a_file_name_is_no_pattern(tmp_path: Path) -> None:
    file = tmp_path / "x[1].parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), file)
    assert load_text([file]) == ["one"]


def test_parquet_without_rows_and_broken_parquet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    with pytest.raises(ValueError, match=r"The corpus is empty: .*a\.parquet"):
        load_text([file])
    file.write_text("not parquet")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        load_text([file])
    assert capfd.readouterr().err == ""


def test_half_a_pair_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "a \\ud800"}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*a\.jsonl.*'\\ud800', which is not a Unicode character"):
        load_text([file])
