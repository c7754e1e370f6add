"""Writes the document of a benchmark as JSON, reads it back, and lays it out as Markdown tables and lines of text."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from diff_lab.bench.benchmark import BASELINE, WRONG
from diff_lab.results_files import short_commit, write_json, write_text
from diff_transformer.utils.files import read_json

Document = dict[str, Any]
Row = dict[str, Any]

# The columns that say which case a line is, by the kind of benchmark, each with where a case has it.
_CASE_COLUMNS = {
    "bench operator": {"batch × heads × width, length": "sizes", "pass": "pass", "dtype": "dtype"},
    "bench model": {"pass": "pass", "dtype": "dtype", "length": "shape.length"},
}


def results_path(folder: Path, kind: str, device: str) -> Path:
    """Return the JSON file of a benchmark ("operator" or "model") in a folder, which is made if it does not exist."""
    if folder.is_file():
        raise ValueError(f"the output must be a folder that can be written, got {str(folder)!r}: it is a file.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{kind}-{torch.device(device).type}.json"


def write_document(path: Path, document: Document) -> tuple[Path, Path]:
    """Write a document, and beside it its page."""
    return path, write_page(write_json(path, document, indent=1))


def write_page(path: Path) -> Path:
    """Write the page of a document beside it."""
    return write_text(path.with_suffix(".md"), page(read_json(path)))


def page(document: Document) -> str:
    """Return the page of one document: a section of each kind that it has."""
    # Each reason once, with the candidate and the number of cases that it kept from running.
    reasons = Counter((row["candidate"], row["reason"]) for row in document["rows"] if row.get("reason"))
    template = _ENVIRONMENT.get_template("bench_page.md")
    text = template.render(document=document, base=base_of(document), reasons=reasons)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page_part(name: str, *values: Any) -> str:
    """Return a part of a page by the name of its macro in `templates/bench_tables.md`: "throughput", "memory", …"""
    return str(getattr(_ENVIRONMENT.get_template("bench_tables.md").module, name)(*values)).strip()


def base_of(document: Document) -> str:
    """Return the base of most ratios: the baseline, or on CUDA its flash kernel."""
    names = Counter(row["against"] for row in document["rows"] if row["candidate"] == row["against"])
    return max(names, key=names.__getitem__, default=BASELINE)


def ratio_table(document: Document, *, quartiles: bool = False) -> str:
    """Return the table of times: a line for each case, a column for each candidate, "a / b" for other bases."""
    base, digits = base_of(document), 3 if document["settings"]["device"].startswith("cuda") else 1
    last = f"{base}, ms"

    def column(row: Row) -> str:
        if row["candidate"] == base:
            return last
        return row["candidate"] if row["against"] == base else f"{row['candidate']} / {row['against']}"

    rows = [{**row, "candidate": column(row)} for row in document["rows"]]
    # A backend that no case here can run has no column; its reason is on the page.
    shown = dict.fromkeys(row["candidate"] for row in rows if row["ratio"] is not None or row["reason"] == WRONG)
    names = [name for name in shown if name != last]
    return page_part("times", rows, _CASE_COLUMNS[document["title"]], [*names, last], digits, quartiles)


def grouped_table(document: Document) -> str:
    """Return the table of times of grouped differential attention, whose rows are a part of their own."""
    return ratio_table({**document, "rows": document.get("grouped", [])}, quartiles=True)


def _cases(rows: Iterable[Row]) -> list[Row]:
    """Return each case once, with its rows by candidate, and the operator's sizes as a reader takes them in."""
    cases: dict[str, Row] = {}
    for row in rows:
        case = cases.setdefault(f"{row['pass']} {row['dtype']} {row['shape']}", {**row, "by_name": {}})
        case["by_name"][row["candidate"]] = row
        if "heads" in row["shape"]:
            case["sizes"] = "{batch} × {heads} × {width}, {keys}".format_map(row["shape"])
    return list(cases.values())


def _titles(rows: Sequence[Row], names: Iterable[str]) -> list[str]:
    """Return the candidates' names, with the backends that "auto" chose."""
    titles = []
    for name in names:
        backends = dict.fromkeys(row["backend"] for row in rows if row["candidate"] == name and row["backend"])
        titles.append(f"{name} ({', '.join(backends)})" if backends else name)
    return titles


_ENVIRONMENT = Environment(
    loader=PackageLoader("diff_lab.bench"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.filters |= {"number": lambda value: "–" if value is None else f"{value:.2f}", "short_commit": short_commit}
_ENVIRONMENT.globals |= {"baseline": BASELINE, "wrong": WRONG, "case_columns": _CASE_COLUMNS}
_ENVIRONMENT.globals |= {"ratio_table": ratio_table, "grouped_table": grouped_table}
_ENVIRONMENT.globals |= {"cases": _cases, "titles": _titles}
_ENVIRONMENT.globals["has_widths"] = lambda rows: len({row["shape"]["width"] for row in rows}) > 1
