"""Markdown from the documents that the benchmarks write, and from nothing else."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

Document = dict[str, Any]


def page(document: Document) -> str:
    """The whole page of one document."""
    operator = document["title"] == "bench operator"
    base = f"the {base_of(document)}"
    parts = [
        f"# {'The operator' if operator else 'The whole model'}, relative to {base}",
        f"Each cell is a ratio of times: the median over the rounds of (time / time of {base} in the same round), and "
        f"in brackets the quartiles. All candidates run once a round, in one process. Below 1 is faster than {base}.",
        provenance(document),
        *document.get("notes", ()),
        "## Bars\n\n" + bars_table(document),
    ]
    if operator:
        parts.append("## Times\n\n" + ratio_table(document, quartiles=True))
        parts.append("## TFLOP/s, and the share of the peak\n\n" + throughput_table(document))
        parts.append("## Decoding: GB/s of keys and values\n\n" + bandwidth_table(document))
        parts.append("## One differential head on all threads\n\n" + one_head_table(document))
        parts.append("## Peak memory\n\n" + memory_table(document))
    else:
        parts.append("## Times\n\n" + model_table(document, quartiles=True))
        parts.append("## Tokens a second\n\n" + tokens_table(document))
    parts.append("## Candidates\n\n" + _candidates(document))
    parts.append("## Not measured\n\n" + _reasons(document["rows"]))
    return "\n\n".join(part for part in parts if not part.endswith("\n\n")) + "\n"


def base_of(document: Document) -> str:
    """What the operator's ratios are to in most cases: on CUDA the twin's flash, elsewhere the twin."""
    names = [row["against"] for row in document["rows"] if row["candidate"] == row["against"]]
    return max(dict.fromkeys(names), key=names.count, default="twin")


def provenance(document: Document) -> str:
    """Device, versions, command, commit and time of a document, in one line."""
    versions = ", ".join(f"{name} {document['versions'][name]}" for name in ("torch", "transformers", "python"))
    commit = ""
    if document["commit"]:  # an installed package has none
        commit = f", commit {document['commit'][:12]}" + ("-dirty" if document["commit"].endswith("-dirty") else "")
    return f"{document['device']}, {versions}{commit}, {document['created'][:10]}, `{document['command']}`."


def bars_table(document: Document) -> str:
    """Each limit, the value furthest from it, and whether it holds."""
    lines = []
    for bar in document["bars"]:
        holds = {None: "not measured", True: "yes", False: "**no**"}[bar["holds"]]
        lines.append((bar["text"], f"{bar['limit']:.2f}", _number(bar["worst"]), bar["where"] or "–", holds))
    return _table(("bar", "limit", "measured", "where", "holds"), lines)


def ratio_table(
    document: Document,
    *,
    lengths: Collection[int] | None = None,
    batches: Collection[int] | None = None,
    candidates: Collection[str] | None = None,
    quartiles: bool = False,
) -> str:
    """The operator's times: a line for each case, a column for each candidate; optionally a selection of them."""

    def wanted(shape: Document) -> bool:
        return (lengths is None or shape["keys"] in lengths) and (batches is None or shape["batch"] in batches)

    rows, base = [row for row in document["rows"] if wanted(row["shape"])], base_of(document)
    # A backend that no case here can run has no column; its reason is on the page.
    shown = _names(row for row in rows if row["ratio"] is not None or row["reason"] == "its results are wrong")
    names = [name for name in shown if name != base and (candidates is None or name in candidates)]
    lines = []
    for case in _cases(rows):
        cells = [_cell(case, name, quartiles) for name in names]
        lines.append((*_case(case), *cells, _milliseconds(document, case.get(base))))
    return _table((*_CASE, *(_title(rows, name) for name in names), f"{base}, ms"), lines)


def throughput_table(document: Document) -> str:
    """TFLOP/s by the twin's operations, and their share of a matrix product's, of every case but decoding."""
    rows, peaks = _with(document, "teraflops_per_second"), document.get("peak_teraflops_per_second", {})
    names = _names(rows)
    lines = []
    for case in _cases(rows):
        cells = []
        for name in names:
            rate = case[name]["teraflops_per_second"] if name in case else None
            share = f" ({rate / peaks[case[name]['dtype']]:.0%})" if rate is not None else ""
            cells.append("–" if rate is None else f"{rate:.0f}{share}")
        lines.append((*_case(case), *cells))
    note = ", ".join(f"{dtype} {peak:.0f} TFLOP/s" for dtype, peak in peaks.items())
    table = _table((*_CASE, *(_title(rows, name) for name in names)), lines)
    return f"{table}\n\nPeak of a matrix product: {note}." if lines else ""


def model_table(document: Document, *, quartiles: bool = False) -> str:
    """The whole model's times; "a / b" is relative to b instead of the twin."""
    rows = [
        row if row["against"] == "twin" else {**row, "candidate": f"{row['candidate']} / {row['against']}"}
        for row in document["rows"]
    ]
    names = [name for name in _names(rows) if name != "twin"]
    lines = []
    for case in _cases(rows):
        cells = [_cell(case, name, quartiles) for name in names]
        twin = case["twin"]
        lines.append((twin["pass"], twin["dtype"], str(twin["shape"]["length"]), *cells, _milliseconds(document, twin)))
    return _table(("pass", "dtype", "length", *(_title(rows, name) for name in names), "twin, ms"), lines)


def tokens_table(document: Document) -> str:
    """Tokens a second of every model in every case."""
    rows = [row for row in _with(document, "tokens_per_second") if row["against"] == "twin"]
    names = _names(rows)
    lines = []
    for case in _cases(rows):
        first = next(iter(case.values()))
        cells = [f"{case[name]['tokens_per_second']:,.0f}" if name in case else "–" for name in names]
        lines.append((first["pass"], first["dtype"], str(first["shape"]["length"]), *cells))
    return _table(("pass", "dtype", "length", *names), lines)


def bandwidth_table(document: Document) -> str:
    """Bytes of the cache by time, of every decoding case."""
    rows = _with(document, "gigabytes_per_second")
    names, width = _names(rows), _several_widths(rows)
    lines = []
    for case in _cases(rows):
        first = next(iter(case.values()))
        shape = first["shape"]
        cells = [f"{case[name]['gigabytes_per_second']:.1f}" if name in case else "–" for name in names]
        what = (str(shape["batch"]), str(shape["keys"]), *([str(shape["width"])] if width else ()), first["dtype"])
        lines.append((*what, *cells))
    header = ("batch", "keys", *(["width"] if width else ()), "dtype", *(_title(rows, name) for name in names))
    return _table(header, lines)


def one_head_table(document: Document) -> str:
    """How much faster all threads are than one, for one differential head (two of the twin's)."""
    lines = [
        (
            part["candidate"],
            part["pass"],
            part["dtype"],
            str(part["length"]),
            str(part["threads"]),
            f"{part['speed_up']:.2f} [{_span(part['quartiles'])}]",
            f"{part['milliseconds']:.1f}",
        )
        for part in document["one_head"]
    ]
    return _table(("candidate", "pass", "dtype", "length", "threads", "speed-up", "ms on all"), lines)


def memory_table(document: Document) -> str:
    """Peak memory in MiB."""
    lines, width = [], _several_widths(document["memory"])
    for part in document["memory"]:
        size = (str(part["shape"]["keys"]), *([str(part["shape"]["width"])] if width else ()))
        what = (part["candidate"], part["pass"], part["dtype"], *size)
        if "total" not in part:
            lines.append((*what, part["reason"], "–", "–"))
            continue
        lines.append((*what, f"{part['total']:.0f}", f"{part['own']:.0f}", _number(part["ratio"])))
    note = (
        "\n\nMiB in a process of its own, above what it held before the inputs. Total: the peak with inputs, output "
        "and gradients. Own: the peak above the inputs. The ratio is of the totals."
    )
    header = ("candidate", "pass", "dtype", "length", *(["width"] if width else ()))
    header += ("total", "own", "ratio to the twin")
    return _table(header, lines) + note if lines else ""


def row_line(row: Any) -> str:
    """One row as a line of text."""
    name = f"{row.candidate} ({row.backend})" if row.backend else row.candidate
    if row.ratio is None:
        return f"{name:20} {row.reason}"
    error = "" if row.error is None else f"   error {row.error:.2f} of the limit"
    base = "" if row.against == "twin" else f"   (relative to {row.against})"
    rates = {
        "TFLOP/s": row.teraflops_per_second,
        "GB/s": row.gigabytes_per_second,
        "tokens/s": row.tokens_per_second,
    }
    rate = "".join(f"   {value:,.1f} {unit}" for unit, value in rates.items() if value is not None)
    return f"{name:20} {row.ratio:6.2f} [{_span(row.quartiles)}] {row.milliseconds:10.3f} ms{rate}{error}{base}"


def bar_line(bar: Any) -> str:
    """One bar as a line of text."""
    verdict = {None: "not measured", True: "holds", False: "does not hold"}[bar.holds]
    where = f" ({bar.where})" if bar.where else ""
    return f"bar: {bar.text}: {_number(bar.worst)}, limit {bar.limit:.2f}: {verdict}{where}"


def _cases(rows: Iterable[Document]) -> list[dict[str, Document]]:
    """Rows by case, in their order; in a case by candidate."""
    cases: dict[str, dict[str, Document]] = {}
    for row in rows:
        place = f"{row['pass']} {row['dtype']} {row['shape']}"
        cases.setdefault(place, {})[row["candidate"]] = row
    return list(cases.values())


# The columns that say which of the operator's cases a line is.
_CASE = ("batch × heads × width, length", "pass", "dtype")


def _case(case: dict[str, Document]) -> tuple[str, str, str]:
    first = next(iter(case.values()))
    shape = first["shape"]
    size = f"{shape['batch']} × {shape['heads']} × {shape['width']}, {shape['keys']}"
    return size, first["pass"], first["dtype"]


def _milliseconds(document: Document, row: Document | None) -> str:
    digits = 3 if document["settings"]["device"].startswith("cuda") else 1
    return "–" if row is None or row["milliseconds"] is None else f"{row['milliseconds']:.{digits}f}"


def _with(document: Document, field: str) -> list[Document]:
    """The rows that have a field, which older files lack."""
    return [row for row in document["rows"] if row.get(field) is not None]


def _several_widths(parts: Sequence[Document]) -> bool:
    return len({part["shape"]["width"] for part in parts}) > 1


def _names(rows: Iterable[Document]) -> list[str]:
    return list(dict.fromkeys(row["candidate"] for row in rows))


def _title(rows: Iterable[Document], name: str) -> str:
    """A candidate's name, with the backends that "auto" stood for."""
    backends = dict.fromkeys(row["backend"] for row in rows if row["candidate"] == name and row["backend"])
    return f"{name} ({', '.join(backends)})" if backends else name


def _cell(case: dict[str, Document], name: str, quartiles: bool) -> str:
    row = case.get(name)
    if row is None or row["ratio"] is None:
        return "wrong" if row is not None and row["reason"] == "its results are wrong" else "–"
    return f"{row['ratio']:.2f}" + (f" [{_span(row['quartiles'])}]" if quartiles else "")


def _candidates(document: Document) -> str:
    sizes = {name: f", {size:,} parameters" for name, size in document.get("parameters", {}).items()}
    return "\n".join(f"- {name}: {about}{sizes.get(name, '')}" for name, about in document["candidates"].items())


def _reasons(rows: Iterable[Document]) -> str:
    """Each reason once, with the candidate and in how many cases it kept that from running."""
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["reason"] is not None:
            found[row["candidate"], row["reason"]] = found.get((row["candidate"], row["reason"]), 0) + 1
    return "\n".join(f"- {name}: {reason} (cases: {count})" for (name, reason), count in found.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _span(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, or nothing where there are no lines."""
    if not lines:
        return ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines))
