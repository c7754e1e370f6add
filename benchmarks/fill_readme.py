"""Copy measured numbers into README.md and docs/, so that none is typed by hand.

    make demo && python benchmarks/attention.py && python benchmarks/fill_readme.py runs/demo

Keeps the demo's results and training curves in benchmarks/ (demo.json), draws docs/demo.svg from them, and fills the
places between `<!-- name -->` and `<!-- /name -->`. Without a run it fills from what benchmarks/ holds.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from diff_transformer.report.figures import ARM_COLOURS, running_mean
from diff_transformer.results import read_json, read_metrics, read_results, write_json, write_text

HERE = Path(__file__).parent
ROOT = HERE.parent
DEMO, SPEED, FIGURE = HERE / "demo.json", HERE / "attention-cpu.json", ROOT / "docs" / "demo.svg"
ARMS = {"diff": "DIFF", "softmax": "Transformer"}
README_LENGTHS = (512, 2048)
ROWS = {
    "retrieval/accuracy": "retrieval: accuracy, all queries ↑",
    "retrieval/first_query_accuracy": "retrieval: accuracy, first query only ↑",
    "retrieval/attention_to_answer_share": "retrieval: share of attention on the answer ↑",
    "retrieval/attention_noise_share": "retrieval: share of attention on noise ↓",
    "language/bits_per_byte": "language: bits per byte, held-out text ↓",
    "retrieval/seconds": "retrieval: training time, s ↓",
    "language/seconds": "language: training time, s ↓",
    "language/parameters": "language: parameters",
}


def keep(run: Path) -> None:
    """Copy what the README needs of a demo into one small file."""
    curves = {}
    for task in ("retrieval", "language"):
        for arm in ARMS:
            lines = read_metrics(run / f"{task}-{arm}" / "metrics.jsonl")
            curves[f"{task}-{arm}"] = [[line["step"], round(line["loss"], 4)] for line in lines]
    read_results(run / "results.json")  # refuses a file that is not whole
    write_json(DEMO, {"results": read_json(run / "results.json"), "curves": curves}, indent=1)


def demo_table(results: dict[str, Any]) -> str:
    lines = ["| | DIFF | Transformer |", "|---|---|---|"]
    for name, label in ROWS.items():
        cells = []
        for arm in ARMS:
            records = [record for record in results["records"] if record["name"] == name and record["arm"] == arm]
            value = statistics.fmean(record["value"] for record in records)
            whole = name.endswith(("parameters", "seconds"))
            cell = f"{value:,.0f}" if whole else f"{value:.3f}"
            if len(records) == 1 and records[0]["interval"]:
                low, high = records[0]["interval"]
                cell += f" [{low:.3f}, {high:.3f}]"
            cells.append(cell)
        lines.append(f"| {label} | {' | '.join(cells)} |")
    versions = results["versions"]
    note = (
        f"One seed; brackets are 95 % intervals over evaluation sequences, not over seeds; shares are means over five "
        f"depths. {results['device']}, torch {versions['torch']}, float32, `{results['command']}`. With four pairs, "
        f"guessing among the values in the context gives 0.25, and leaving out those already given 0.52; the first "
        f"query cannot be answered that way."
    )
    return "\n".join(lines) + "\n\n" + note


def speed_table(document: dict[str, Any], shapes: Sequence[int] | None = None) -> str:
    backends = ("blockwise", "sdpa", "reference")
    lines = ["| batch × heads × width, length | pass | " + " | ".join(backends) + " | twin, ms |", "|" + "---|" * 6]
    for row in document["rows"]:
        shape = row["shape"]
        if shapes is not None and (shape["length"] not in shapes or shape["batch"] != 1):
            continue
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "–" for name in backends]
        size = f"{shape['batch']} × {shape['twin_heads']} × {shape['head_dim']}, {shape['length']}"
        lines.append(f"| {size} | {row['pass']} | {' | '.join(ratios)} | {row['twin_ms']:.1f} |")
    note = (
        f"{document['device']}, {document['dtype']}, causal, median of {document['rounds']} rounds in one "
        f"process, torch {document['versions']['torch']}, `python benchmarks/attention.py`. Heads are the twin's."
    )
    return "\n".join(lines) + "\n\n" + note


def draw(curves: dict[str, list[list[float]]]) -> None:
    """The training loss of both twins on both tasks."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    for place, (task, unit) in enumerate(
        {"retrieval": "loss of the answers", "language": "loss, nats per byte"}.items()
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for arm, label in ARMS.items():
            steps, losses = zip(*curves[f"{task}-{arm}"], strict=True)
            axes.plot(steps, losses, color=ARM_COLOURS[arm], linewidth=0.6, alpha=0.35)
            axes.plot(steps, running_mean(losses), color=ARM_COLOURS[arm], linewidth=1.8, label=label)
        axes.set(title=task, xlabel="training step", ylabel=unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.patch.set_facecolor("white")
    figure.savefig(FIGURE, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))


def fill(path: Path, parts: dict[str, str]) -> None:
    text = path.read_text(encoding="utf-8")
    for name, content in parts.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {start.strip()} … {end} once.")
        before, _, rest = text.partition(start)
        text = f"{before}{start}{content}\n{end}{rest.partition(end)[2]}"
    write_text(path, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="a finished demo")
    arguments = parser.parse_args()
    if arguments.run is not None:
        keep(arguments.run)
    demo, speed = read_json(DEMO), json.loads(SPEED.read_text(encoding="utf-8"))
    draw(demo["curves"])
    figure = "![Training loss of DIFF and its twin on both tasks of the demo](docs/demo.svg)"
    fill(
        ROOT / "README.md",
        {"figure": figure, "demo": demo_table(demo["results"]), "speed": speed_table(speed, shapes=README_LENGTHS)},
    )
    fill(ROOT / "docs" / "backends.md", {"speed": speed_table(speed)})


if __name__ == "__main__":
    main()
