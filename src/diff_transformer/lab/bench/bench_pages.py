"""Writes the document of a benchmark as JSON, reads it back, and lays it out as Markdown tables and lines of text."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diff_transformer.lab.bench.benchmark import BASELINE, RENAMED, WRONG, BenchRow, Threshold
from diff_transformer.lab.results_files import write_json, write_text
from diff_transformer.storage.files import read_json

Document = dict[str, Any]
Row = dict[str, Any]
Case = dict[str, Row]  # the rows of a case by candidate

MEMORY_NOTE = (
    "MiB in a process of its own, above what it held before the inputs. Total: the peak with inputs, output and "
    "gradients. Own: the peak above the inputs. The ratio is of the totals."
)


def results_path(folder: Path, kind: str, device: str) -> Path:
    """The JSON file of a benchmark ("operator" or "model") in a folder, which is made if it does not exist.

    Raises:
        ValueError: nothing can be written there, or the file there is not of this benchmark.
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
    write_json(path, document, indent=1)
    return path, write_page(path)


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
    """The whole page of one document."""
    operator = document["title"] == "bench operator"
    base = base_of(document)
    sections = {"Thresholds": thresholds_table(document)}
    if operator:
        sections["Times"] = ratio_table(document, quartiles=True)
        sections["TFLOP/s, and the share of the peak"] = throughput_table(document)
        sections["Decoding: GB/s of keys and values"] = bandwidth_table(document)
        sections["One differential head on all threads"] = one_head_table(document)
        sections["Peak memory"] = memory_table(document)
    else:
        sections["Times"] = model_table(document, quartiles=True)
        sections["Tokens per second"] = tokens_table(document)
    sections["Candidates"] = _candidates(document)
    sections["Not measured"] = _reasons(document["rows"])
    parts = [
        f"# {'The operator' if operator else 'The whole model'}, relative to `{base}`",
        f"Each cell is a ratio of times: the median over the rounds of (time / time of `{base}` in the same round), "
        "with the quartiles in brackets. All candidates run once a round, in one process. Below 1 is faster.",
        provenance(document),
        *document.get("notes", ()),
        *(f"## {heading}\n\n{text}" for heading, text in sections.items() if text),
    ]
    return "\n\n".join(parts) + "\n"


def base_of(document: Document) -> str:
    """What the ratios of most cases are to: the baseline, or on CUDA its flash kernel."""
    names = [row["against"] for row in document["rows"] if row["candidate"] == row["against"]]
    return max(dict.fromkeys(names), key=names.count, default=BASELINE)


def provenance(document: Document) -> str:
    """Device, versions, command, commit and time of a document, in one line."""
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in ("torch", "transformers", "python"))
    commit = ""
    if document["commit"]:  # an installed package has none
        commit = f", commit {document['commit'][:12]}" + ("-dirty" if document["commit"].endswith("-dirty") else "")
    return f"{document['device']}, {versions}{commit}, {document['created'][:10]}, `{document['command']}`."


def thresholds_table(document: Document) -> str:
    """Each limit, the value furthest from it, and whether it holds."""
    holds = {None: "not measured", True: "yes", False: "**no**"}
    lines = [
        (one["text"], f"{one['limit']:.2f}", _number(one["worst"]), one["where"] or "–", holds[one["holds"]])
        for one in document["thresholds"]
    ]
    return markdown_table(("threshold", "limit", "measured", "where", "holds"), lines)


def ratio_table(
    document: Document,
    *,
    lengths: Collection[int] | None = None,
    batches: Collection[int] | None = None,
    candidates: Collection[str] | None = None,
    quartiles: bool = False,
) -> str:
    """The operator's times: a line for each case, a column for each candidate; optionally a selection of them."""
    rows, base = document["rows"], base_of(document)
    rows = [row for row in rows if lengths is None or row["shape"]["keys"] in lengths]
    rows = [row for row in rows if batches is None or row["shape"]["batch"] in batches]
    # A backend that no case here can run has no column; its reason is on the page.
    shown = _names(row for row in rows if row["ratio"] is not None or row["reason"] == WRONG)
    names = [name for name in shown if name != base and (candidates is None or name in candidates)]
    return _case_table(rows, _OPERATOR_CASE, names, lambda row: _ratio(row, quartiles), base=(document, base))


def model_table(document: Document, *, quartiles: bool = False) -> str:
    """The whole model's times; "a / b" is relative to b instead of the baseline."""
    rows = [
        row if row["against"] == BASELINE else {**row, "candidate": f"{row['candidate']} / {row['against']}"}
        for row in document["rows"]
    ]
    names = [name for name in _names(rows) if name != BASELINE]
    return _case_table(rows, _MODEL_CASE, names, lambda row: _ratio(row, quartiles), base=(document, BASELINE))


def throughput_table(document: Document) -> str:
    """TFLOP/s by the Transformer's operations, and their share of a matrix product's, of every case but decoding."""
    rows, peaks = _with(document, "teraflops_per_second"), document.get("peak_teraflops_per_second", {})

    def cell(row: Row) -> str:
        share = f" ({row['teraflops_per_second'] / peaks[row['dtype']]:.0%})" if row["dtype"] in peaks else ""
        return f"{row['teraflops_per_second']:.0f}{share}"

    note = ", ".join(f"{dtype} {peak:.0f} TFLOP/s" for dtype, peak in peaks.items())
    table = _case_table(rows, _OPERATOR_CASE, _names(rows), cell)
    return f"{table}\n\nPeak of a matrix product: {note}." if table else ""


def tokens_table(document: Document) -> str:
    """Tokens per second of every model in every case."""
    rows = [row for row in _with(document, "tokens_per_second") if row["against"] == BASELINE]
    return _case_table(rows, _MODEL_CASE, _names(rows), lambda row: f"{row['tokens_per_second']:,.0f}")


def bandwidth_table(document: Document) -> str:
    """Bytes of the cache by time, of every decoding case."""
    rows = _with(document, "gigabytes_per_second")
    columns = {**_sizes("batch", "keys", *_width(rows)), "dtype": lambda row: row["dtype"]}
    return _case_table(rows, columns, _names(rows), lambda row: f"{row['gigabytes_per_second']:.1f}")


def one_head_table(document: Document) -> str:
    """How much faster all threads are than one, for one differential head (two of the Transformer's)."""
    fields = ("candidate", "pass", "dtype", "length", "threads")
    lines = [
        (
            *(str(part[name]) for name in fields),
            f"{part['speed_up']:.2f} [{_span(part['quartiles'])}]",
            f"{part['milliseconds']:.1f}",
        )
        for part in document["one_head"]
    ]
    return markdown_table((*fields, "speed-up", "ms on all"), lines)


def memory_table(document: Document) -> str:
    """Peak memory in MiB."""
    width = _width(document["memory"])
    lines = []
    for part in document["memory"]:
        sizes = [str(part["shape"][name]) for name in ("keys", *width)]
        measured = [part.get("reason", ""), "–", "–"]
        if "total" in part:
            measured = [f"{part['total']:.0f}", f"{part['own']:.0f}", _number(part["ratio"])]
        lines.append((part["candidate"], part["pass"], part["dtype"], *sizes, *measured))
    header = ("candidate", "pass", "dtype", "length", *width, "total", "own", f"ratio to {BASELINE}")
    return f"{markdown_table(header, lines)}\n\n{MEMORY_NOTE}" if lines else ""


def row_line(row: BenchRow) -> str:
    """One row as a line of text."""
    name = f"{row.candidate} ({row.backend})" if row.backend else row.candidate
    if row.ratio is None or row.quartiles is None:
        return f"{name:24} {row.reason}"
    error = "" if row.error is None else f"   error {row.error:.2f} of the limit"
    base = "" if row.against == BASELINE else f"   (relative to {row.against})"
    rates = {"TFLOP/s": row.teraflops_per_second, "GB/s": row.gigabytes_per_second, "tokens/s": row.tokens_per_second}
    rate = "".join(f"   {value:,.1f} {unit}" for unit, value in rates.items() if value is not None)
    return f"{name:24} {row.ratio:6.2f} [{_span(row.quartiles)}] {row.milliseconds:10.3f} ms{rate}{error}{base}"


def threshold_line(one: Threshold) -> str:
    """One threshold as a line of text."""
    verdict = {None: "not measured", True: "holds", False: "does not hold"}[one.holds]
    where = f" ({one.where})" if one.where else ""
    return f"threshold: {one.text}: {_number(one.worst)}, limit {one.limit:.2f}: {verdict}{where}"


# The columns that say which case a line is, each with its cell.
CaseColumns = Mapping[str, Callable[[Row], str]]


def _sizes(*names: str) -> CaseColumns:
    """A column for each of the named sizes."""

    def column(name: str) -> Callable[[Row], str]:
        return lambda row: str(row["shape"][name])

    return {name: column(name) for name in names}


def _all_sizes(row: Row) -> str:
    shape = row["shape"]
    return f"{shape['batch']} × {shape['heads']} × {shape['width']}, {shape['keys']}"


_PASS_AND_DTYPE: CaseColumns = {"pass": lambda row: row["pass"], "dtype": lambda row: row["dtype"]}
_OPERATOR_CASE: CaseColumns = {"batch × heads × width, length": _all_sizes, **_PASS_AND_DTYPE}
_MODEL_CASE: CaseColumns = {**_PASS_AND_DTYPE, **_sizes("length")}


def _case_table(
    rows: Sequence[Row],
    case_columns: CaseColumns,
    names: Sequence[str],
    cell: Callable[[Row], str],
    *,
    base: tuple[Document, str] | None = None,
) -> str:
    """A line for each case: its columns, a cell for each named candidate, and the milliseconds of the base."""
    cases: dict[str, Case] = {}
    for row in rows:
        cases.setdefault(f"{row['pass']} {row['dtype']} {row['shape']}", {})[row["candidate"]] = row
    lines = []
    for case in cases.values():
        first = next(iter(case.values()))
        cells = [cell(case[name]) if name in case else "–" for name in names]
        if base is not None:
            cells.append(_milliseconds(base[0], case.get(base[1])))
        lines.append((*(value(first) for value in case_columns.values()), *cells))
    header = [*case_columns, *(_title(rows, name) for name in names)]
    return markdown_table(header if base is None else [*header, f"{base[1]}, ms"], lines)


def _ratio(row: Row, quartiles: bool) -> str:
    if row["ratio"] is None:
        return "wrong" if row["reason"] == WRONG else "–"
    return f"{row['ratio']:.2f}" + (f" [{_span(row['quartiles'])}]" if quartiles else "")


def _milliseconds(document: Document, row: Row | None) -> str:
    digits = 3 if document["settings"]["device"].startswith("cuda") else 1
    return "–" if row is None or row["milliseconds"] is None else f"{row['milliseconds']:.{digits}f}"


def _with(document: Document, field: str) -> list[Row]:
    """The rows that have a field, which older files lack."""
    return [row for row in document["rows"] if row.get(field) is not None]


def _width(rows: Sequence[Row]) -> tuple[str, ...]:
    """The column of the width, where there are several."""
    return ("width",) if len({row["shape"]["width"] for row in rows}) > 1 else ()


def _names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["candidate"] for row in rows))


def _title(rows: Iterable[Row], name: str) -> str:
    """A candidate's name, with the backends that "auto" chose."""
    backends = dict.fromkeys(row["backend"] for row in rows if row["candidate"] == name and row["backend"])
    return f"{name} ({', '.join(backends)})" if backends else name


def _candidates(document: Document) -> str:
    sizes = {name: f", {size:,} parameters" for name, size in document["parameters"].items()}
    return "\n".join(f"- {name}: {about}{sizes.get(name, '')}" for name, about in document["candidates"].items())


def _reasons(rows: Iterable[Row]) -> str:
    """Each reason once, with the candidate and the number of cases that it kept from running."""
    found = Counter((row["candidate"], row["reason"]) for row in rows if row["reason"] is not None)
    return "\n".join(f"- {name}: {reason} (cases: {count})" for (name, reason), count in found.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _span(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, or nothing where there are no lines."""
    if not lines:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))


def replace_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Write each text between ``<!-- name -->`` and ``<!-- /name -->`` of a Markdown file, in place of what is there.

    Raises:
        ValueError: the file does not hold the two marks of a name exactly once.
    """
    text = path.read_text(encoding="utf-8")
    for name, content in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {start.strip()} … {end} once.")
        before, _, rest = text.partition(start)
        text = f"{before}{start}{content}\n{end}{rest.partition(end)[2]}"
    write_text(path, text)
