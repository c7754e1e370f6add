"""Writes reports from the files of results alone: of experiments, and of training runs, a demo's among them."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diff_lab import learning
from diff_lab.files import read_metrics
from diff_lab.record import ResultsFile
from diff_lab.report import tables, wording
from diff_lab.report.documents import HTML_MARK, MARKDOWN_MARK, fill, refuse_others
from diff_lab.report.figures import (
    FIGURE_MARK,
    MANY,
    Drawing,
    Series,
    demo_figures,
    experiment_figures,
    known_levels,
    line_plot,
    variant_style,
)
from diff_lab.report.findings import certainty, findings, name_in_report, read_experiments
from diff_lab.results_files import read_results, write_text
from diff_transformer.attention_types import ATTENTION_TYPES

DOCUMENT, METHOD = "RESULTS.md", "METHOD.md"
# Folders beside the document: figures, and where there are several experiments a page of each.
FIGURES, EXPERIMENTS = "figures", "experiments"
_MARKS = {".md": MARKDOWN_MARK, ".svg": FIGURE_MARK, ".html": HTML_MARK}


# --- Experiments ---


def build_results_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    complete: Callable[[ResultsFile], ResultsFile] = learning.judge,
) -> Path:
    """Write the report of experiments: Markdown documents with figures.

    The document has what was decided and what was not. Beside it lie a page of each experiment and one of the method;
    a single experiment stands in the document itself. Earlier ones are replaced; any other file is left alone.

    Args:
        paths: results files, or folders that hold them.
        output: the document, by default RESULTS.md in the folder that holds all of the files.
        complete: as `read_experiments` takes it.

    Returns:
        The document.

    Raises:
        FileNotFoundError: there is no folder for `output`, or as `read_experiments` does.
        ValueError: as `read_experiments` does.
        FileExistsError: something else than a report lies there.
    """
    all_results = read_experiments([Path(path) for path in paths], complete)
    document = results_report_path(paths, output)
    folder = document.parent
    found = findings(all_results)
    sections: list[dict[str, Any]] = [{"results": one, "name": name_in_report(one, all_results)} for one in all_results]
    for section in sections:
        section["figures"] = experiment_figures(section["results"], section["name"])
    values = {
        "has_experiments": not all(results.is_own for results in all_results),
        "found": found,
        "without": [one for one in sections if one["results"] not in [named.results for named in found]],
        "certainty": certainty(all_results, found),
        "learning": learning,
        "tables": tables,
        "wording": wording,
        "sections": sections,
        "is_single": len(sections) == 1,
        "document": document.name,
    }
    files = {document: fill("results.md", **values)}
    if not values["is_single"]:
        files[folder / METHOD] = fill("method.md", **values)
        for section in sections:
            page = folder / EXPERIMENTS / f"{section['results'].anchor}.md"
            files[page] = fill("experiment.md", **values, section=section)
    files |= {folder / FIGURES / f"{one.name}.svg": one.svg for section in sections for one in section["figures"]}
    for path in files:
        refuse_others(path, _MARKS[path.suffix])
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        write_text(path, text)
    return document


def results_report_path(paths: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Return the document that `build_results_report` writes. Raises as it does if it cannot be written there."""
    if output is None:
        folders = [path if path.is_dir() else path.parent for path in map(Path, paths)]
        shared = folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.resolve() for folder in folders]))
        return shared / DOCUMENT
    document = Path(output)
    if document.suffix != ".md":
        raise ValueError(f"the report of experiments is a Markdown document, so {str(document)!r} must end in .md")
    if not document.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(document)!r} does not exist")
    return document


# --- Training runs, and the demo ---


def build_run_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a page that compares training runs; of a demo's folder alone it has the demo's results, too.

    Args:
        run_dirs: folders of runs. A demo's stands for the runs inside it.
        output: the page, by default `report.html` in the folder of a single run or demo, or `comparison.html` in the
            nearest folder that holds all of several.

    Returns:
        The page.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: a folder is not a run's.
        FileExistsError: something else than a report lies there.
    """
    path = run_report_path(run_dirs, output)
    refuse_others(path, HTML_MARK)
    folders, demo = _all_runs(run_dirs), Path(run_dirs[0])
    shared = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    metrics = {str(folder.resolve().relative_to(shared)): read_metrics(folder / "metrics.jsonl") for folder in folders}
    title = f"Training of {len(metrics)} runs" if len(metrics) > 1 else f"Training of {next(iter(metrics))}"
    shown: dict[str, Any] = {"title": title, "results": None, "explorer": None}
    if len(run_dirs) == 1 and folders != [demo] and (demo / "results.json").is_file():
        results = read_results(demo / "results.json")
        shown = {"title": results.title, "results": results, "table": tables.demo_table(results, apart=True)}
        shown |= {"by_lambda": demo_figures(results), "explorer": _explorer(demo / "explorer.html")}
    levels = known_levels(shown["results"].baselines) if shown["results"] else {}
    return write_text(path, fill("runs.html", curves=list(_curves(metrics, levels)), **shown))


def run_report_path(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Return the file that `build_run_report` writes. Raises as it does if a folder is missing or is not a run's."""
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"the folder of {output} does not exist")
    runs = _all_runs(run_dirs)
    if output is not None:
        return Path(output)
    if len(run_dirs) == 1 or len(runs) == 1:
        return Path(run_dirs[0]) / "report.html"
    return Path(os.path.commonpath([run.resolve().parent for run in runs])) / "comparison.html"


def _all_runs(run_dirs: Sequence[str | Path]) -> list[Path]:
    """Return the runs in folders, each once; a folder stands for itself, or for the runs of the demo in it."""
    found: dict[Path, Path] = {}
    for folder in map(Path, run_dirs):
        if not folder.is_dir():
            raise FileNotFoundError(f"the run folder {folder} does not exist")
        demo = [folder / variant for variant in ATTENTION_TYPES]
        runs = [run for run in (folder, *demo) if (run / "metrics.jsonl").is_file()]
        if not runs:
            raise ValueError(
                f"{folder} is not a run folder: it holds neither metrics.jsonl nor the runs of a demo, "
                "nor results of experiments, as `diff-lab reproduce` leaves them"
            )
        found |= {run.resolve(): run for run in runs}
    return list(found.values())


def _explorer(file: Path) -> dict[str, str] | None:
    """Return the explorer's page and the hash of its script, which its policy names; None without such a page."""
    page = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    script = re.search(r"script-src '(sha256-[\w+/=]+)'", page)
    return {"page": page, "script_hash": script[1]} if script else None


def _curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], levels: Mapping[str, float]) -> Iterator[Drawing]:
    """Yield a figure of each loss and accuracy in the lines of metrics by run, with levels beside an accuracy, and one
    of λ in some layers for each run. One evaluation, at the end, is no curve.
    """
    validation = (key for lines in runs.values() for line in lines for key in line if key.startswith("validation/"))
    for key in dict.fromkeys(("loss", *validation)):
        title = f"Validation: {key.removeprefix('validation/').replace('_', ' ')}" if key != "loss" else "Training loss"
        curves = []
        for label, lines in runs.items():
            # A number that was not finite is null.
            points = {line["step"]: line[key] for line in lines if isinstance(line.get(key), int | float)}
            name, style = wording.variant_label(label), variant_style(label.rpartition("-")[2])
            curves += [Series(name, list(points), list(points.values()), **style)] if points else []
        if any(len(curve.x) > 1 for curve in curves):
            shown = levels if key == "validation/accuracy" else {}
            figure = line_plot(curves, title=title, ylabel=title.rpartition(": ")[2], levels=shown)
            caption = "Faint as logged, bold its running mean." * any(len(curve.x) > MANY for curve in curves)
            yield Drawing(figure, f"{title}: {'; '.join([*map(str, curves), *shown])}.", caption)
    for label, logged in runs.items():
        lambdas = {line["step"]: line["lambdas"] for line in logged if None not in (line.get("lambdas") or [None])}
        if lambdas:
            layers = list(zip(*lambdas.values(), strict=True))
            some = sorted({0, len(layers) // 2, len(layers) - 1})
            name, style = wording.variant_label(label), variant_style(label.rpartition("-")[2])
            curves = [Series(f"layer {number + 1}", list(lambdas), layers[number], **style) for number in some]
            figure = line_plot(curves, title=f"λ, {name}", ylabel="λ")
            yield Drawing(figure, f"λ of {name}: {'; '.join(map(str, curves))}.")
