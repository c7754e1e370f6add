"""Labelled questions are read from files of the formats in which they are distributed."""

import json
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from diff_lab.data import read_labelled

TREC = "HUM:ind Who painted the fence ?\nNUM:dist How far is it to Troms\xf8 ?\n\nLOC:other Where is the well ?\n"


def trec(folder: Path, train: str = TREC, test: str = "HUM:ind Who was she ?\n") -> Path:
    (folder / "train.txt").write_bytes(train.encode("latin-1"))
    (folder / "TREC_10.label").write_bytes(test.encode("latin-1"))
    return folder


def test_trec(tmp_path: Path) -> None:
    task = read_labelled("trec", trec(tmp_path))
    assert task.labels == ("human", "location", "number")
    assert task.train[1] == ("How far is it to Tromsø ?", "number")
    assert task.test == (("Who was she ?", "human"),)
    assert task.demonstration(*task.train[0]) == "Question: Who painted the fence ?\nType: human\n==\n"
    assert task.query("Why ?") == "Question: Why ?\nType:"
    fine = read_labelled("trec-fine", tmp_path)
    assert fine.labels == ("human ind", "location other", "number dist")


def test_banking77(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('text,category\n"Where, pray,\nis my card?",card_arrival\n', encoding="utf-8")
    (tmp_path / "test.csv").write_text("text,category\nIs it here?,card_arrival\n", encoding="utf-8")
    task = read_labelled("banking77", tmp_path)
    assert task.train == (("Where, pray, is my card?", "card arrival"),)
    assert task.demonstration(*task.test[0]) == "query: Is it here?\nintent: card arrival\n==\n"


def test_clinc150(tmp_path: Path) -> None:
    content = {"train": [["wake me at six", "alarm"]], "test": [["wake him", "alarm"]], "oos_train": [["x", "oos"]]}
    (tmp_path / "data_full.json").write_text(json.dumps(content), encoding="utf-8")
    task = read_labelled("clinc150", tmp_path)
    assert task.labels == ("alarm",)
    assert task.query(task.test[0][0]) == "utterance: wake him\nintent:"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    trec(tmp_path)
    content = {"train": [["wake me at six", "alarm"]], "test": [["wake him", "alarm"]]}
    (tmp_path / "data_full.json").write_text(json.dumps(content), encoding="utf-8")
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text("text,category\nIs it here?,card_arrival\n", encoding="utf-8")
    tasks = ("trec", "banking77", "clinc150")
    plain = [read_labelled(name, tmp_path) for name in tasks]
    for file in tmp_path.iterdir():
        file.write_bytes(BOM_UTF8 + file.read_bytes())
    assert [read_labelled(name, tmp_path) for name in tasks] == plain


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no labelled text 'treck', only 'trec'"):
        read_labelled("treck", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no train\.txt or train_5500\.label"):
        read_labelled("trec", tmp_path)
    trec(tmp_path, train="HUM:ind Who ?\nWHO ?\n")
    with pytest.raises(ValueError, match=r"train\.txt, line 2: a line is COARSE:fine"):
        read_labelled("trec", tmp_path)
    trec(tmp_path, train="LOC:city Where ?\n")
    with pytest.raises(ValueError, match="the label 'human'"):
        read_labelled("trec", tmp_path)
    trec(tmp_path, test="\n")
    with pytest.raises(ValueError, match=r"test part of trec .* is empty"):
        read_labelled("trec", tmp_path)
    (tmp_path / "train.csv").write_text("text,label\na,b\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no columns 'text' and 'category'"):
        read_labelled("banking77", tmp_path)
    (tmp_path / "train.csv").write_text("text,category\na\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: a text and its label"):
        read_labelled("banking77", tmp_path)
    (tmp_path / "train.csv").write_text(f"text,category\n{'word ' * 10_000},\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"got \['word .{52}…\.$"):
        read_labelled("banking77", tmp_path)
    for content, message in (("[]", "lists 'train' and 'test'"), ('{"train": [["a"]], "test": []}', "row 1")):
        (tmp_path / "data_full.json").write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_labelled("clinc150", tmp_path)
