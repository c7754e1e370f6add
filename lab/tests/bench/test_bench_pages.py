import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from diff_lab.bench.bench_pages import page, page_part, ratio_table, results_path, write_document
from diff_lab.bench.benchmark import Recorder
from diff_lab.bench.operator_bench import OperatorSettings, measure_operator
from diff_transformer.utils.files import read_json


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    settings = OperatorSettings(
        heads=2, head_dims=(8,), lengths=(12,), rounds=5,
        candidates=("blockwise",), passes=("forward+backward", "decode"),
    )  # fmt: skip
    return measure_operator(settings, Recorder())


def test_both_files_are_written_whole(document: dict[str, Any], tmp_path: Path) -> None:
    path = results_path(tmp_path / "new" / "folder", "operator", "cpu")
    assert write_document(path, document) == (path, path.with_suffix(".md"))
    assert sorted(os.listdir(path.parent)) == ["operator-cpu.json", "operator-cpu.md"]
    written = read_json(path)
    assert written["rows"][0]["pass"] == "forward + backward"
    text = path.with_suffix(".md").read_text(encoding="utf-8")
    assert text == page(written)
    for part in (written["device"], written["command"], written["versions"]["torch"]):
        assert part in text
    assert "## In groups" in page({**written, "grouped": written["rows"]}), "of results of an earlier version"
    assert results_path(path.parent, "operator", "cpu:0") == path


def test_the_table_has_a_line_for_each_case_and_a_column_for_each_candidate(
    document: dict[str, Any], tmp_path: Path
) -> None:
    path = results_path(tmp_path, "operator", "cpu")
    write_document(path, document)
    table = ratio_table(read_json(path))
    cases = {(row["pass"], row["dtype"], str(row["shape"])) for row in read_json(path)["rows"]}
    assert len(table.splitlines()) == 2 + len(cases)
    assert "| 1 × 2 × 8, 12 | forward + backward | float32 |" in table
    assert "auto (" in table
    assert "blockwise" in table.splitlines()[0]


def test_what_never_ran_has_no_column(document: dict[str, Any], tmp_path: Path) -> None:
    path = results_path(tmp_path, "operator", "cpu")
    rows = [dataclasses.replace(row, ratio=None, reason="not here") for row in document["rows"]]
    rows = [row if row.candidate == "blockwise" else old for row, old in zip(rows, document["rows"], strict=True)]
    write_document(path, {**document, "rows": rows})
    assert "blockwise |" not in ratio_table(read_json(path))
    assert "- blockwise: not here (cases: 4)" in path.with_suffix(".md").read_text(encoding="utf-8")


def test_an_installed_package_has_no_commit(document: dict[str, Any]) -> None:
    line = page_part("provenance", {**document, "commit": None})
    assert ", commit" not in line
    assert document["command"] in line
    assert "commit abc" in page_part("provenance", {**document, "commit": "abc"})
