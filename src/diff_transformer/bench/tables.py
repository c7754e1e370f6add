"""Markdown from the documents that the benchmarks write, and from nothing else."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

Document = dict[str, Any]


def page(document: Document) -> str:
    """The whole page of one document."""
    operator = document["title"] == "bench operator"
    parts = [
        f"# {'The operator' if operator else 'The whole model'}, relative to the twin",
        "Each cell is a ratio of times: the median over the rounds of (time / time of the twin in the same round), and "
        "in brackets the quartiles. All candidates run once a round, in one process. Below 1 is faster than the twin.",
        provenance(document),
        "## Bars\n\n" + bars_table(document),
    ]
    if operator:
        parts.append("## Times\n\n" + ratio_table(document, quartiles=True))
        parts.append("## Decoding: GB/s of keys and values\n\n" + bandwidth_table(document))
        parts.append("## One differential head on all threads\n\n" + one_head_table(document))
        parts.append("## Peak memory\n\n" + memory_table(document))
    else:
        parts.append("## Times\n\n" + model_table(document, quartiles=True))
    parts.append("## Candidates\n\n" + _candidates(document))
    parts.append("## Not measured\n\n" + _reasons(document["rows"]))
    return "\n\n".join(part for part in parts if not part.endswith("\n\n")) + "\n"


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

    rows = [row for row in document["rows"] if wanted(row["shape"])]
    names = [name for name in _names(rows) if name != "twin" and (candidates is None or name in candidates)]
    lines = []
    for case in _cases(rows):
        cells = [_cell(case, name, quartiles) for name in names]
        shape = case["twin"]["shape"]
        size = f"{shape['batch']} × {shape['heads']} × {shape['width']}, {shape['keys']}"
        what = (size, case["twin"]["pass"], case["twin"]["dtype"])
        lines.append((*what, *cells, f"{case['twin']['milliseconds']:.1f}"))
    header = ("batch × heads × width, length", "pass", "dtype", *(_title(rows, name) for name in names), "twin, ms")
    return _table(header, lines)


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
        lines.append((twin["pass"], twin["dtype"], str(twin["shape"]["length"]), *cells, f"{twin['milliseconds']:.1f}"))
    return _table(("pass", "dtype", "length", *(_title(rows, name) for name in names), "twin, ms"), lines)


def bandwidth_table(document: Document) -> str:
    """Bytes of the cache by time, of every decoding case."""
    rows = [row for row in document["rows"] if row["gigabytes_per_second"] is not None]
    names = _names(rows)
    lines = []
    for case in _cases(rows):
        shape = case["twin"]["shape"]
        cells = [f"{case[name]['gigabytes_per_second']:.1f}" if name in case else "–" for name in names]
        lines.append((str(shape["batch"]), str(shape["keys"]), case["twin"]["dtype"], *cells))
    return _table(("batch", "keys", "dtype", *(_title(rows, name) for name in names)), lines)


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
    lines = []
    for part in document["memory"]:
        what = (part["candidate"], part["pass"], part["dtype"], str(part["shape"]["keys"]))
        if "total" not in part:
            lines.append((*what, part["reason"], "–", "–"))
            continue
        lines.append((*what, f"{part['total']:.0f}", f"{part['own']:.0f}", _number(part["ratio"])))
    note = (
        "\n\nMiB in a process of its own, above what it held before the inputs. Total: the peak with inputs, output "
        "and gradients. Own: the peak above the inputs. The ratio is of the totals."
    )
    header = ("candidate", "pass", "dtype", "length", "total", "own", "ratio to the twin")
    return _table(header, lines) + note if lines else ""


def row_line(row: Any) -> str:
    """One row as a line of text."""
    name = f"{row.candidate} ({row.backend})" if row.backend else row.candidate
    if row.ratio is None:
        return f"{name:20} {row.reason}"
    error = "" if row.error is None else f"   error {row.error:.2f} of the limit"
    base = "" if row.against == "twin" else f"   (relative to {row.against})"
    return f"{name:20} {row.ratio:6.2f} [{_span(row.quartiles)}] {row.milliseconds:10.2f} ms{error}{base}"


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
