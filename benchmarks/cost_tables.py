"""Makes the README's table of what differential attention costs, from the results of `diff-transformer bench`.

`benchmarks/fill_readme.py` writes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_transformer.lab.results_files import short_commit

Document = Mapping[str, Any]
# Of the operator's and the whole model's results: what a row says, and where it stands.
OPERATOR_ROWS = (
    ("the operator, forward", "auto", "forward", 2048),
    ("the operator, forward and backward", "auto", "forward + backward", 2048),
    ("the operator, decoding", "auto", "decode", 512),
    ("the operator, decoding", "auto", "decode", 2048),
)
MODEL_ROWS = (
    ("the whole model, a training step", "diff", "training step", 1024),
    ("the whole model, decoding", "diff", "decode", 2048),
)
DTYPES = ("float32", "bfloat16")


def costs(processors: Sequence[tuple[Document, Document]]) -> str:
    """Times relative to the Transformer's.

    Args:
        processors: the results of `bench operator` and `bench model` on each processor.
    """
    devices = [_device(operator) for operator, _ in processors]
    header = [f"{device}, {dtype}" for device in devices for dtype in DTYPES]
    lines = [f"| | length | {' | '.join(header)} |", "|---|---|" + "---|" * len(header)]
    for which, rows in enumerate((OPERATOR_ROWS, MODEL_ROWS)):
        for label, candidate, pass_, length in rows:
            ratios = [_ratio(pair[which], candidate, pass_, length, dtype) for pair in processors for dtype in DTYPES]
            lines.append(f"| {label} | {length} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    commits = ", ".join(dict.fromkeys(short_commit(document["commit"]) for pair in processors for document in pair))
    note = (
        "On the EPYC torch's own attention gains nothing from bfloat16 in the forward pass, at most a third in the "
        "backward, and is slower in decoding. "
        "One sequence; 16 heads of the Transformer of width 64 (operator), hidden size 512 and 8 layers (model). "
        f"`diff-transformer bench operator` and `bench model`, commits {commits}; all of them: "
        "[backends](docs/backends.md#what-was-measured), [cost](docs/concepts/cost.md#time-of-the-whole-model)."
    )
    return "\n".join(lines) + "\n\n" + note


def _device(document: Document) -> str:
    """A processor's name, without its threads and what is said of every processor."""
    return str(document["device"]).partition(",")[0].replace("(R)", "").removesuffix(" Processor")


def _ratio(document: Document, candidate: str, pass_: str, length: int, dtype: str) -> float:
    found = [
        row["ratio"]
        for row in document["rows"]
        if (row["candidate"], row["pass"], row["dtype"]) == (candidate, pass_, dtype)
        and (row["shape"]["keys"] if "keys" in row["shape"] else row["shape"]["length"]) == length
        and row["shape"]["batch"] == 1
    ]
    (ratio,) = found
    return float(ratio)
