"""Writes the document of a benchmark as JSON, reads it back, and lays it out as Markdown tables and lines of text."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from diff_transformer.lab.bench.benchmark import BASELINE, RENAMED, WRONG, BenchRow, Threshold
from diff_transformer.lab.results_files import write_json, write_text
from diff_transformer.storage.files import read_json

Document = dict[str, Any]
Row = dict[str, Any]
# Columns of a table, each with the template of its cells, which takes a row's fields.
Columns = Mapping[str, str]

_SPAN = "[{quartiles[0]:.2f}–{quartiles[1]:.2f}]"
_PASS_AND_DTYPE = {"pass": "{pass}", "dtype": "{dtype}"}
_SIZES = "{shape[batch]} × {shape[heads]} × {shape[width]}, {shape[keys]}"
# The columns that say which case a line is, by the kind of benchmark.
_CASE: Mapping[str, Columns] = {
    "bench operator": {"batch × heads × width, length": _SIZES, **_PASS_AND_DTYPE},
    "bench model": {**_PASS_AND_DTYPE, "length": "{shape[length]}"},
}


def results_path(folder: Path, kind: str, device: str) -> Path:
    """The JSON file of a benchmark ("operator" or "model") in a folder, which is made if it does not exist.

    Raises ValueError where nothing can be written, or where the file that is there is not of this benchmark.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise ValueError(f"the output must be a folder that can be written, got {str(folder)!r}: {reason}.") from None
    path = folder / f"{kind}-{torch.device(device).type}.json"
    if path.exists():
        try:
            title = read_json(path).get("title")
        except (OSError, ValueError, AttributeError):  # AttributeError: JSON that is not an object
            title = None
        if title != f"bench {kind}":
            raise ValueError(
                f"{str(path)!r} is no result of bench {kind} and would be replaced; name another output folder."
            )
    return path


def write_document(path: Path, document: Document) -> tuple[Path, Path]:
    """Write a document, and beside it the page made from what was written."""
    return path, write_page(write_json(path, document, indent=1))


def write_page(path: Path) -> Path:
    """Write the page of a document beside it."""
    return write_text(path.with_suffix(".md"), page(read_document(path)))


def read_document(path: Path) -> Document:
    """A document with the names of this version, whichever version wrote it."""
    document = read_json(path)
    if "bars" in document:
        document["thresholds"] = document.pop("bars")
    for row in (*document["rows"], *document.get("one_head", ()), *document.get("memory", ())):
        row |= {name: RENAMED.get(row[name], row[name]) for name in ("candidate", "against") if name in row}
    for name in ("candidates", "parameters"):
        document[name] = {RENAMED.get(key, key): value for key, value in document.get(name, {}).items()}
    return document


def page(document: Document) -> str:
    """The page of one document: a section of each kind that it has."""
    # Each reason once, with the candidate and the number of cases that it kept from running.
    reasons = Counter((row["candidate"], row["reason"]) for row in _with(document, "reason"))
    template = _ENVIRONMENT.get_template("bench_page.md")
    text = template.render(document=document, base=base_of(document), reasons=reasons)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def page_part(name: str, document: Document) -> str:
    """A part of the page that is no table of cases: the macro of this name in `templates/bench_tables.md`."""
    return str(getattr(_ENVIRONMENT.get_template("bench_tables.md").module, name)(document)).strip()


def base_of(document: Document) -> str:
    """What the ratios of most cases are to: the baseline, or on CUDA its flash kernel."""
    names = [row["against"] for row in document["rows"] if row["candidate"] == row["against"]]
    return max(dict.fromkeys(names), key=names.count, default=BASELINE)


def ratio_table(
    document: Document,
    *,
    lengths: Collection[int] | None = None,
    batches: Collection[int] | None = None,
    candidates: Collection[str] | None = None,
    quartiles: bool = False,
) -> str:
    """Times: a line for each case, a column for each candidate; of the operator optionally a selection of them.

    A candidate that is measured against another one than the base has a column "a / b" for it.
    """
    base, digits = base_of(document), 3 if document["settings"]["device"].startswith("cuda") else 1
    last, template = f"{base}, ms", "{ratio:.2f}" + (f" {_SPAN}" if quartiles else "")

    def column(row: Row) -> str:
        if row["candidate"] == base:
            return last
        return row["candidate"] if row["against"] == base else f"{row['candidate']} / {row['against']}"

    def cell(row: Row) -> str:
        if row["ratio"] is None:
            return "wrong" if row["reason"] == WRONG else "–"
        return f"{row['milliseconds']:.{digits}f}" if row["candidate"] == last else template.format_map(row)

    rows = [row for row in document["rows"] if lengths is None or row["shape"]["keys"] in lengths]
    rows = [row for row in rows if batches is None or row["shape"]["batch"] in batches]
    rows = [{**row, "candidate": column(row)} for row in rows]
    # A backend that no case here can run has no column; its reason is on the page.
    shown = [row["candidate"] for row in rows if row["ratio"] is not None or row["reason"] == WRONG]
    names = [name for name in dict.fromkeys(shown) if name != last and (candidates is None or name in candidates)]
    return _case_table(rows, _CASE[document["title"]], cell, [*names, last])


def throughput_table(document: Document) -> str:
    """TFLOP/s by the Transformer's operations, and their share of a matrix product's, of every case but decoding."""
    rows, peaks = _with(document, "teraflops_per_second"), document.get("peak_teraflops_per_second", {})

    def cell(row: Row) -> str:
        share = f" ({row['teraflops_per_second'] / peaks[row['dtype']]:.0%})" if row["dtype"] in peaks else ""
        return f"{row['teraflops_per_second']:.0f}{share}"

    note = ", ".join(f"{dtype} {peak:.0f} TFLOP/s" for dtype, peak in peaks.items())
    table = _case_table(rows, _CASE["bench operator"], cell)
    return f"{table}\n\nPeak of a matrix product: {note}." if table else ""


def tokens_table(document: Document) -> str:
    """Tokens per second of every model in every case."""
    rows = _with(document, "tokens_per_second")
    return _case_table(rows, _CASE["bench model"], "{tokens_per_second:,.0f}".format_map)


def bandwidth_table(document: Document) -> str:
    """Bytes of the cache by time, of every decoding case."""
    rows = _with(document, "gigabytes_per_second")
    columns = {"batch": "{shape[batch]}", "keys": "{shape[keys]}", **_width(rows), "dtype": "{dtype}"}
    return _case_table(rows, columns, "{gigabytes_per_second:.1f}".format_map)


def row_line(row: BenchRow) -> str:
    """One row as a line of text."""
    name = f"{row.candidate} ({row.backend})" if row.backend else row.candidate
    if row.ratio is None or row.quartiles is None:
        return f"{name:24} {row.reason}"
    error = "" if row.error is None else f"   error {row.error:.2f} of the limit"
    base = "" if row.against == BASELINE else f"   (relative to {row.against})"
    rates = {"TFLOP/s": row.teraflops_per_second, "GB/s": row.gigabytes_per_second, "tokens/s": row.tokens_per_second}
    rate = "".join(f"   {value:,.1f} {unit}" for unit, value in rates.items() if value is not None)
    return f"{name:24} {row.ratio:6.2f} {_SPAN.format_map(vars(row))} {row.milliseconds:10.3f} ms{rate}{error}{base}"


def threshold_line(one: Threshold) -> str:
    """One threshold as a line of text."""
    verdict = {None: "not measured", True: "holds", False: "does not hold"}[one.holds]
    where = f" ({one.where})" if one.where else ""
    return f"threshold: {one.text}: {_number(one.worst)}, limit {one.limit:.2f}: {verdict}{where}"


def _case_table(
    rows: Sequence[Row], case_columns: Columns, cell: Callable[[Row], str], names: Sequence[str] | None = None
) -> str:
    """A line for each case: its columns, and a cell for each named candidate, by default for all."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(f"{row['pass']} {row['dtype']} {row['shape']}", {})[row["candidate"]] = row
    names = list(dict.fromkeys(row["candidate"] for row in rows)) if names is None else names
    lines = []
    for case in cases.values():
        first = next(iter(case.values()))
        cells = [cell(case[name]) if name in case else "–" for name in names]
        lines.append([*(column.format_map(first) for column in case_columns.values()), *cells])
    return markdown_table([*case_columns, *(_title(rows, name) for name in names)], lines)


def _with(document: Document, field: str) -> list[Row]:
    """The rows that have a field, which older files lack."""
    return [row for row in document["rows"] if row.get(field) is not None]


def _width(rows: Sequence[Row]) -> Columns:
    """The column of the width, where there are several."""
    return {"width": "{shape[width]}"} if len({row["shape"]["width"] for row in rows}) > 1 else {}


def _title(rows: Iterable[Row], name: str) -> str:
    """A candidate's name, with the backends that "auto" chose."""
    backends = dict.fromkeys(row["backend"] for row in rows if row["candidate"] == name and row["backend"])
    return f"{name} ({', '.join(backends)})" if backends else name


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, or nothing where there are no lines."""
    if not lines:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))


def replace_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Write each text between ``<!-- name -->`` and ``<!-- /name -->`` of a Markdown file, in place of the old one."""
    text = path.read_text(encoding="utf-8")
    for name, content in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {start.strip()} … {end} once.")
        before, _, rest = text.partition(start)
        text = f"{before}{start}{content}\n{end}{rest.partition(end)[2]}"
    write_text(path, text)


_ENVIRONMENT = Environment(
    loader=PackageLoader("diff_transformer.lab.bench"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["number"] = _number
_ENVIRONMENT.globals |= {"baseline": BASELINE}
_ENVIRONMENT.globals |= {
    table.__name__: table for table in (ratio_table, throughput_table, bandwidth_table, tokens_table)
}
