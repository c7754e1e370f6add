"""Copy measured numbers into README.md and docs/, so that none is typed by hand.

    diff-transformer reproduce all --output results/cpu --resume
    diff-transformer report results/cpu --output results/RESULTS.md
    diff-transformer bench operator && diff-transformer bench model
    python benchmarks/fill_readme.py

Fills the places between `<!-- name -->` and `<!-- /name -->` from what results/ and benchmarks/ hold. Where there are
results of a GPU too (`bench … --device cuda`), the places named "cuda …" are filled as well.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diff_transformer.bench.tables import (
    bandwidth_table,
    bars_table,
    base_of,
    memory_table,
    model_table,
    one_head_table,
    provenance,
    ratio_table,
    throughput_table,
    tokens_table,
)
from diff_transformer.report.experiment_files import ExperimentResults, read_experiments
from diff_transformer.report.figures import svg
from diff_transformer.report.forest import ForestRow, forest
from diff_transformer.report.rows import format_number
from diff_transformer.report.svg_files import svg_file
from diff_transformer.report.verdicts import format_difference, measure_label, verdict_text
from diff_transformer.results import Comparison, read_json, write_text

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, FIGURE = ROOT / "results" / "cpu", ROOT / "docs" / "results.svg"
OPERATOR, MODEL = HERE / "operator-cpu.json", HERE / "model-cpu.json"
CUDA_OPERATOR, CUDA_MODEL = HERE / "operator-cuda.json", HERE / "model-cuda.json"
README, BACKENDS_PAGE = ROOT / "README.md", ROOT / "docs" / "backends.md"
TWINS = ("diff", "softmax")
ALT = "DIFF's advantage over the Transformer in each experiment, with 95 % intervals and the paper's"
# What the README shows of the operator's times.
SELECTION = {
    "lengths": (512, 2048),
    "batches": (1,),
    "candidates": ("auto", "blockwise", "pieces", "DiffLlama", "reference"),
}
CUDA_SELECTION = {
    "lengths": (4096, 16384),
    "candidates": ("auto", "twin cuDNN", "wide cuDNN", "pieces flash", "flex", "DiffLlama"),
}


def headline(results: ExperimentResults) -> Comparison | None:
    """The experiment's first judged comparison of DIFF with the Transformer that the paper has a value of; else its
    first judged one of these two. The rule chooses, nobody else; None where the experiment judges nothing."""
    judged = [row for row in results.file.comparisons if row.verdict is not None and (row.arm, row.against) == TWINS]
    return next((row for row in judged if row.paper is not None), judged[0] if judged else None)


def results_table(experiments: Sequence[ExperimentResults]) -> str:
    """One row for each experiment that judges DIFF against the Transformer."""
    lines = [
        "| | measure | paper: DIFF, Transformer | here: DIFF, Transformer | difference | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for results in experiments:
        row = headline(results)
        if row is not None:
            paper = "–" if row.paper is None else _pair(row.paper)
            here = f"{_pair(row.ours)} | {format_difference(row)} | {verdict_text(row)}"
            lines.append(f"| {results.title} | {measure_label(row)} | {paper} | {here} |")
    files = [results.file for results in experiments]
    commits = ", ".join(dict.fromkeys(str(file.commit)[:12] for file in files))
    devices = ", ".join(dict.fromkeys(file.device for file in files))
    note = (
        "Of each experiment the first comparison of the two that has a verdict, those before others that the paper has "
        f"a value of; all of them, with figures: [results](results/RESULTS.md). {devices}, torch "
        f"{files[0].versions['torch']}, commit {commits}, `diff-transformer reproduce all --output results/cpu`."
    )
    return "\n".join(lines) + "\n\n" + note


def headline_rows(experiments: Sequence[ExperimentResults]) -> list[ForestRow]:
    """The same rows for a figure: DIFF's advantage in per cent of the Transformer's value, which puts all on one axis.

    One whose values are not above 0, such as a variance that chance explains, has no such share and is left out.
    """
    rows = []
    for results in experiments:
        row = headline(results)
        if row is None or min(row.ours) <= 0:
            continue
        share = (100 if row.better == "higher" else -100) / row.ours[1]
        ends = None if row.interval is None else sorted(share * end for end in row.interval)
        paper = row.paper
        rows.append(
            ForestRow(
                label=f"{results.title}: {row.name.split('/')[-1].replace('_', ' ')}",
                difference=share * row.difference,
                interval=None if ends is None else (ends[0], ends[1]),
                verdict=row.verdict,
                claimed_by=row.claimed_by,
                paper=None if paper is None else abs(share) / share * 100 * (paper[0] - paper[1]) / abs(paper[1]),
            )
        )
    return rows


def draw(experiments: Sequence[ExperimentResults]) -> None:
    """DIFF against the Transformer, a row of each experiment."""
    figure = forest(
        headline_rows(experiments),
        title="DIFF against its twin on two cores",
        xlabel="DIFF is better by, in % of the Transformer's value; shaded: better",
        better="higher",
    )
    write_text(FIGURE, svg_file(svg(figure), ALT))


def _pair(values: tuple[float, float]) -> str:
    return ", ".join(format_number(value) for value in values)


def speed_table(document: dict[str, Any], **selection: Any) -> str:
    """The operator's times: all of them, or what is named of "lengths", "batches" and "candidates"."""
    table = ratio_table(document, **selection)
    base = f"the {base_of(document)}'s"
    note = f"Ratios to {base} time in the same round, median of the rounds; causal; heads are the twin's. "
    return f"{table}\n\n{note}{provenance(document)}"


def whole_model_table(document: dict[str, Any]) -> str:
    """The whole model's times, and its size."""
    shapes = [row["shape"] for row in document["rows"]]
    hidden, layers, batch = (
        " and ".join(map(str, dict.fromkeys(shape[name] for shape in shapes))) for name in ("hidden", "layers", "batch")
    )
    note = (
        f"Ratios to the twin's time in the same round; a / b is relative to b. Hidden size {hidden}, "
        f"{layers} layers, batch {batch}. "
    )
    return f"{model_table(document)}\n\n{note}{provenance(document)}"


def backends_parts(operator: dict[str, Any]) -> dict[str, str]:
    """What docs/backends.md shows of the operator's results."""
    return {
        "speed": speed_table(operator),
        "bars": bars_table(operator),
        "heads": one_head_table(operator) or "Not measured.",
        "memory": memory_table(operator) or "Not measured.",
    }


def cuda_parts(operator: dict[str, Any] | None, model: dict[str, Any] | None) -> dict[Path, dict[str, str]]:
    """What each page shows of a GPU's results: nothing of what was not measured."""
    readme, backends = {}, {}
    if operator is not None:
        notes = "\n\n".join(operator["notes"])
        readme["cuda speed"] = speed_table(operator, **CUDA_SELECTION)
        backends["cuda speed"] = f"{speed_table(operator)}\n\n{notes}"
        backends["cuda throughput"] = throughput_table(operator) or "Not measured."
        backends["cuda decode"] = bandwidth_table(operator) or "Not measured."
        backends["cuda memory"] = memory_table(operator) or "Not measured."
    if model is not None:
        notes = "\n\n".join(model["notes"])
        readme["cuda model"] = f"{whole_model_table(model)}\n\n{tokens_table(model)}\n\n{notes}"
    bars = [bar for document in (operator, model) if document is not None for bar in document["bars"]]
    if bars:
        backends["cuda bars"] = bars_table({"bars": bars})
    return {README: readme, BACKENDS_PAGE: backends}


def measured_on_cuda() -> dict[Path, dict[str, str]]:
    """The same of the files that are there."""
    found = (read_json(path) if path.is_file() else None for path in (CUDA_OPERATOR, CUDA_MODEL))
    return cuda_parts(*found)


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
    operator, model = read_json(OPERATOR), read_json(MODEL)
    experiments = read_experiments([RESULTS])
    draw(experiments)
    readme = {
        "figure": f"![{ALT}]({FIGURE.relative_to(ROOT)})",
        "results": results_table(experiments),
        "speed": speed_table(operator, **SELECTION),
        "model": whole_model_table(model),
    }
    fill(README, readme)
    fill(BACKENDS_PAGE, backends_parts(operator))
    for path, parts in measured_on_cuda().items():
        fill(path, parts)


if __name__ == "__main__":
    main()
