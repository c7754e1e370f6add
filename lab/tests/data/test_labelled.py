"""Labelled texts are read from tables of two columns."""

from pathlib import Path
from typing import Any

import pandas
import pytest

from diff_lab.data import read_labelled

ROWS = [("Who painted  the fence ?", "human"), ("How far is it to Tromsø, pray ?", "number")]


def write(folder: Path, train: Any = ROWS, test: Any = (("Who was she ?", "human"),), ending: str = "csv") -> Path:
    for part, rows in (("train", train), ("test", test)):
        table, file = pandas.DataFrame(rows, columns=["text", "label"]), folder / f"{part}.{ending}"
        if ending == "csv":
            table.to_csv(file, index=False, encoding="utf-8-sig")  # a byte order mark is no text
        elif ending == "jsonl":
            table.to_json(file, orient="records", lines=True)
        else:
            table.to_parquet(file)
    return folder


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_table_is_a_task(tmp_path: Path, ending: str) -> None:
    task = read_labelled("trec", write(tmp_path, ending=ending))
    assert task.labels == ("human", "number")
    assert task.train == (("Who painted the fence ?", "human"), ROWS[1])
    assert task.test == (("Who was she ?", "human"),)
    assert task.demonstration(*task.train[0]) == "Question: Who painted the fence ?\nType: human\n==\n"
    assert task.query("Why ?") == "Question: Why ?\nType:"
    assert read_labelled("my task", tmp_path).query("Why ?") == "text: Why ?\nlabel:"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"train": [("Who ?", "human"), ("", "human")]}, r"train\.csv, row 2: a text and its label are not empty"),
        ({"train": [("word " * 10_000, "")]}, r"got \['word .{52}…\.$"),
        ({"train": [("Where ?", "location")]}, "the test part of trec alone has the label 'human'"),
        ({"test": []}, r"test\.csv has no rows"),
        ({"test": [(1, 2)], "ending": "jsonl"}, r"test\.jsonl, row 1: "),
    ],
)
def test_what_is_refused(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_labelled("trec", write(tmp_path, **rows))


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no train\.csv or train\.jsonl or train\.parquet"):
        read_labelled("trec", tmp_path)
    for name, content, message in (
        ("train.parquet", "no parquet", r"train\.parquet cannot be read: "),
        ("train.jsonl", "{", r"train\.jsonl cannot be read: "),
        ("train.csv", "text,category\na,b\n", "no columns 'text' and 'label', but 'text', 'category'"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_labelled("trec", tmp_path)
