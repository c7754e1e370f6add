"""Makes the README's table of what differential attention costs, from the results of `diff-lab bench`.

`lab/benchmarks/fill_readme.py` writes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_lab.results_files import short_commit

Document = Mapping[str, Any]
# Of the operator's and the whole model's results: the label of a row, and which ratios it holds.
OPERATOR_ROWS = (
    ("attention, forward, {} tokens", "auto", "forward", 2048),
    ("attention, forward and backward, {} tokens", "auto", "forward + backward", 2048),
)
MODEL_ROWS = (
    ("34M parameters, training step, {} tokens", "diff", "training step", 1024),
    ("34M parameters, decoding one token, {} keys", "diff", "decode", 2048),
)
DTYPES = ("float32", "bfloat16")
OTHER = "DiffLlama"


def costs(processors: Sequence[tuple[Document, Document]]) -> str:
    """Format the times relative to the Transformer's, and those of transformers' DiffLlama beside them.

    Results of a checkout with changes are left out: nobody could repeat them.

    Args:
        processors: the results of `bench operator` and `bench model` on each processor.
    """
    devices = [_device(operator) for operator, _ in processors]
    lines = [f"| | {' | '.join(devices)} | transformers' {OTHER} |", "|---|" + "---|" * (len(devices) + 1)]
    clean = [[document for document in pair if is_clean(document)] for pair in processors]
    for which, rows in enumerate((OPERATOR_ROWS, MODEL_ROWS)):
        documents = [pair[which] if pair[which] in kept else None for pair, kept in zip(processors, clean, strict=True)]
        for label, candidate, pass_, length in rows:
            ours = [_cell(document, candidate, pass_, length) for document in documents]
            others = [
                _ratio(document, OTHER, pass_, length, dtype)
                for document in documents
                if document is not None
                for dtype in DTYPES
            ]
            span = f"{min(others):.2f}–{max(others):.2f}"
            lines.append(f"| {label.format(f'{length:,}')} | {' | '.join(ours)} | {span} |")
    commits = ", ".join(dict.fromkeys(short_commit(document["commit"]) for kept in clean for document in kept))
    missing = " –: measured of a checkout with changes alone." if any(len(kept) < 2 for kept in clean) else ""
    note = (
        f"{' / '.join(DTYPES)}, lower is better. Two threads, batch 1, heads of 64; on the EPYC torch's attention "
        f"gains little from bfloat16. `diff-lab bench operator` and `bench model`, commits {commits}; "
        f"[all sizes](docs/backends.md#what-was-measured).{missing}"
    )
    return "\n".join(lines) + "\n\n" + note


def is_clean(document: Document) -> bool:
    """Tell whether a commit holds the code that measured."""
    return document["commit"] is not None and not document["commit"].endswith("-dirty")


def _device(document: Document) -> str:
    """A processor's name, without its threads and what is said of every processor."""
    return str(document["device"]).partition(",")[0].replace("(R)", "").removesuffix(" Processor")


def _cell(document: Document | None, candidate: str, pass_: str, length: int) -> str:
    if document is None:
        return "–"
    return " / ".join(f"{_ratio(document, candidate, pass_, length, dtype):.2f}" for dtype in DTYPES)


def _ratio(document: Document, candidate: str, pass_: str, length: int, dtype: str) -> float:
    found = [
        row["ratio"]
        for row in document["rows"]
        if (row["candidate"], row["pass"], row["dtype"], row["against"]) == (candidate, pass_, dtype, "softmax")
        and (row["shape"]["keys"] if "keys" in row["shape"] else row["shape"]["length"]) == length
        and row["shape"]["batch"] == 1
    ]
    (ratio,) = found
    return float(ratio)
