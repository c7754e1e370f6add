"""Writes reports from the files of results alone: of experiments, of training runs, and of the demo."""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from diff_lab.learning import judge
from diff_lab.record import AttentionExample, ResultsFile, Samples
from diff_lab.report import plots, tables, wording
from diff_lab.report.documents import (
    HTML_MARK,
    MARKDOWN_MARK,
    Table,
    fill_markdown,
    fill_page,
    is_report,
    refuse_others,
)
from diff_lab.report.figures import along, experiment_figures, known_levels
from diff_lab.report.findings import (
    certainty,
    findings,
    learning_sentences,
    loss_sentences,
    name_in_report,
    read_experiments,
)
from diff_lab.report.plots import FIGURE_MARK, Drawing, Series, ends_in_words, line_plot, variant_style
from diff_lab.report.wording import DIVERGED, format_number, variant_label
from diff_lab.results_files import read_record, write_text
from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.utils.files import read_metrics

T = TypeVar("T")

DOCUMENT, METHOD = "RESULTS.md", "METHOD.md"
# Folders beside the document: figures, and where there are several experiments a page of each.
FIGURES, EXPERIMENTS = "figures", "experiments"
TASKS = ("retrieval", "language")
# Key in metrics.jsonl → (title, label of the axis).
LOGGED_CURVES = {
    "loss": ("Training loss", "loss (nats per predicted token)"),
    "learning_rate": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "tokens_per_second": ("Speed", "tokens per second"),
}


# --- Experiments ---


def build_results_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    complete: Callable[[ResultsFile], ResultsFile] = judge,
) -> tuple[Path, ...]:
    """Write the report of experiments: Markdown documents with figures, and the same as one page.

    The document has what was decided and what was not. Beside it lie a page of each experiment and one of the method;
    a single experiment stands in the document itself. Earlier ones are replaced, and figures and pages of an earlier
    report that are not in this one removed; any other file is left alone.

    Args:
        paths: results files, or folders that hold them.
        output: the document, by default RESULTS.md in the folder that holds all of the files. The page lies beside it
            with the ending .html. A path that ends in .html is the page, which is then written alone.
        complete: as `read_experiments` takes it.

    Returns:
        The document, if there is one, and the page.

    Raises:
        FileNotFoundError: there is no folder for `output`, or as `read_experiments` does.
        ValueError: as `read_experiments` does.
        FileExistsError: something else than a report lies there.
    """
    all_results = read_experiments([Path(path) for path in paths], complete)
    document = _document_path(paths, output)
    page = document.with_suffix(".html")
    refuse_others(page, HTML_MARK)
    has_experiments = not all(results.is_own for results in all_results)
    found = findings(all_results)
    sections: list[dict[str, Any]] = []
    for results in all_results:
        name = name_in_report(results, all_results)
        sections.append({"results": results, "name": name, "figures": experiment_figures(results, name)})
    values = {
        "title": "Results beside the paper's" if has_experiments else "Variants of a recipe side by side",
        "has_experiments": has_experiments,
        "found": found,
        "without": [one for one in sections if one["results"].anchor not in {named.results.anchor for named in found}],
        "certainty": certainty(all_results, found),
        "wording": wording,
        "tables": tables,
        "sections": sections,
        "is_single": len(sections) == 1,
        "page": page.name,
        "document": document.name,
    }
    html = fill_page("results.html", **values)
    if document == page:
        return (write_text(page, html),)
    folder = document.parent
    files = {document: fill_markdown("results.md", **values)}
    if not values["is_single"]:
        files[folder / METHOD] = fill_markdown("method.md", **values)
        files |= {
            folder / EXPERIMENTS / f"{section['results'].anchor}.md": fill_markdown(
                "experiment.md", **values, section=section
            )
            for section in sections
        }
    drawings = {folder / FIGURES / f"{one.name}.svg": one for section in sections for one in section["figures"]}
    files |= {path: plots.svg_file(drawing.svg, drawing.alt) for path, drawing in drawings.items()}
    for path in files:
        refuse_others(path, _mark(path))
    for path in files:
        path.parent.mkdir(exist_ok=True)
    for path in set(_parts(folder)) - files.keys():
        path.unlink()
    for path, text in files.items():
        write_text(path, text)
    return document, write_text(page, html)


def results_report_files(paths: Sequence[str | Path], output: str | Path | None = None) -> list[Path]:
    """Return the files of an earlier report that `build_results_report` would replace or remove."""
    document = _document_path(paths, output)
    if document.suffix == ".html":
        return [document] if document.exists() else []
    return [*filter(Path.exists, (document, document.with_suffix(".html"))), *_parts(document.parent)]


def _mark(path: Path) -> str:
    return FIGURE_MARK if path.suffix == ".svg" else MARKDOWN_MARK


def _parts(folder: Path) -> list[Path]:
    """Return the figures and pages of a report, which lie in the two folders beside the document."""
    found = [folder / METHOD, *folder.glob(f"{FIGURES}/*.svg"), *folder.glob(f"{EXPERIMENTS}/*.md")]
    return sorted(path for path in found if path.is_file() and is_report(path, _mark(path)))


def _document_path(paths: Sequence[str | Path], output: str | Path | None) -> Path:
    if output is None:
        folders = [path if path.is_dir() else path.parent for path in map(Path, paths)]
        shared = folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.resolve() for folder in folders]))
        document = shared / DOCUMENT
    else:
        document = Path(output)
    if document.suffix not in (".md", ".html"):
        raise ValueError(
            f"the report of experiments is a Markdown document or a page, so {str(document)!r} must end in .md or .html"
        )
    if not document.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(document)!r} does not exist")
    return document


# --- Training runs, and the demo ---


@dataclass(frozen=True)
class LoggedRun:
    """A training run of a page by its folder; of a demo's runs the attention type and the task are known."""

    folder: Path
    label: str
    variant: str = ""
    task: str = ""

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def results(self) -> ResultsFile | None:
        return _read_existing(self.folder / "results.json", ResultsFile)

    @property
    def recipe(self) -> str | None:
        path = self.folder / "recipe.yaml"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    def logged(self, key: str) -> list[tuple[int, float]]:
        """Return the finite numbers of that name, each behind its step."""
        return [(line["step"], line[key]) for line in self.metrics if isinstance(line.get(key), int | float)]


def build_run_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a report that compares training runs; a demo folder alone gives the demo's report.

    Args:
        run_dirs: folders of runs. Among several, a demo's stands for the runs inside it.
        output: the page, by default `report.html` in the folder of a single run, or `comparison.html` in the nearest
            folder that holds all of several.

    Returns:
        The page.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: a folder is not a run's.
        FileExistsError: something else than a report lies there.
    """
    path = run_report_path(run_dirs, output)
    refuse_others(path, HTML_MARK)
    runs = _all_runs(run_dirs)
    return write_text(path, _runs_page(runs) if runs else _demo_page(Path(run_dirs[0])))


def run_report_path(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Return the file that `build_run_report` writes. Raises as it does if a folder is missing or is not a run's."""
    if not run_dirs:
        raise ValueError("a report needs at least one run folder")
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"the folder of {output} does not exist")
    runs = _all_runs(run_dirs) or [Path(run_dirs[0])]
    if output is not None:
        return Path(output)
    shared = Path(os.path.commonpath([run.resolve().parent for run in runs]))
    return runs[0] / "report.html" if len(runs) == 1 else shared / "comparison.html"


def runs_in(folder: Path) -> list[Path]:
    """Return the training runs that `folder` stands for: itself, or those of the demo in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the run folder {folder} does not exist")
    if (folder / "metrics.jsonl").is_file():
        return [folder]
    if runs := [run.folder for run in _demo_runs(folder)]:
        return runs
    raise ValueError(
        f"{folder} is not a run folder: it holds neither metrics.jsonl nor the runs of a demo, "
        "nor results of experiments, as `diff-lab reproduce` leaves them"
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """Return as many of the last parts of each path as tell the runs apart."""
    paths = [run.resolve() for run in runs]
    for count in itertools.count(1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _demo_runs(run_dir: Path) -> list[LoggedRun]:
    """Return the training runs that lie in a demo folder."""
    runs = [
        LoggedRun(run_dir / f"{task}-{variant}", variant_label(variant), variant, task)
        for task in TASKS
        for variant in ATTENTION_TYPES
    ]
    return [run for run in runs if (run.folder / "metrics.jsonl").is_file()]


def _all_runs(run_dirs: Sequence[str | Path]) -> list[Path]:
    """Return the runs in folders, each once; none of a demo, finished or not, that stands alone."""
    first, *others = map(Path, run_dirs)
    is_run, has_results = ((first / name).is_file() for name in ("metrics.jsonl", "results.json"))
    if not others and not is_run and (has_results or _demo_runs(first)):
        return []
    return list({run.resolve(): run for folder in (first, *others) for run in runs_in(folder)}.values())


def _runs_page(folders: Sequence[Path]) -> str:
    runs = [LoggedRun(folder, label) for folder, label in zip(folders, names_of(folders), strict=True)]
    curves = [
        _drawing(lines, title=title, ylabel=label)
        for key, (title, label) in LOGGED_CURVES.items()
        if (lines := _series(runs, key))
    ]
    curves += [_drawing(lines, title=f"Validation: {name}", ylabel=name) for name, lines in _validation(runs)]
    return fill_page(
        "runs.html",
        title=f"Training of {runs[0].label}" if len(runs) == 1 else f"Training of {len(runs)} runs",
        summary=_summary(runs),
        demo_table=tables.demo_table,
        curves=curves,
        lambdas=[figure for run in runs for figure in _lambda_figures(run, f"λ, {run.label}")],
        runs=runs,
    )


def _summary(runs: Sequence[LoggedRun]) -> Table:
    rows = []
    for run in runs:
        loss, validation, speed = (
            [number for _, number in run.logged(key)] for key in ("loss", "validation/loss", "tokens_per_second")
        )
        numbers = (loss[-1:], [min(validation)] if validation else [], [median(speed)] if speed else [])
        cells = [format_number(number[0], missing=DIVERGED) if number else "–" for number in numbers]
        rows.append([run.label, str(run.metrics[-1]["step"]) if run.metrics else "–", *cells])
    head = ["Run", "Last step", "Last loss", "Best validation loss", "Tokens per second (median)"]
    return Table.of_rows(head, rows)


def _drawing(lines: Sequence[Series], *, title: str, caption: str = "", **how: Any) -> Drawing:
    alt = "; ".join([*map(ends_in_words, lines), *how.get("levels", ())])
    return Drawing(line_plot(lines, title=title, **how), f"{title}: {alt}.", caption)


def _demo_page(run_dir: Path) -> str:
    results = _read_existing(run_dir / "results.json", ResultsFile)
    example = _read_existing(run_dir / "attention.json", AttentionExample)
    records, baselines = (results.records, results.baselines) if results else ((), ())
    runs = _demo_runs(run_dir)
    maps = list(plots.shown_maps(example)) if example else []
    asked = plots.asked_positions(example) if example else []
    of_queries = (weight for _, rows in maps for position in asked for weight in rows[position])
    largest = max((abs(weight) for weight in of_queries if math.isfinite(weight)), default=0.0)
    by_depth = {
        name: [record for record in records if record.name == name and "depth" in record.coordinates]
        for name in tables.STANDARD
    }
    drawn = {
        name: along("depth", of_measure, wording.measure_words(name).capitalize(), baselines=baselines)
        for name, of_measure in by_depth.items()
        if of_measure
    }
    accuracy = drawn.pop("retrieval/accuracy_by_depth", None)
    return fill_page(
        "demo.html",
        title=results.title if results else f"The demo in {run_dir.name}",
        results=results,
        tables=tables,
        one_seed=len({record.seed for record in records} - {None}) <= 1,
        example=example,
        ends=tables.ends_table(results) if results else None,
        learning=learning_sentences(records, baselines),
        losses=loss_sentences(records),
        types=ATTENTION_TYPES,
        maps=[plots.map_drawing(example, rows, name, largest or 1.0) for name, rows in maps if example],
        largest=largest,
        retrieval=[
            *_task_curves("retrieval", runs, known_levels(baselines)),
            *([accuracy] if accuracy else []),
        ],
        language=list(_task_curves("language", runs, {})),
        weights=list(drawn.values()),
        explorer=_explorer(run_dir / "explorer.html"),
        samples=_read_existing(run_dir / "samples.json", Samples),
        lambdas=[figure for run in runs for figure in _lambda_figures(run, f"λ, {run.task}")],
    )


def _explorer(file: Path) -> dict[str, str] | None:
    """Return the explorer's page and the hash of its script, which its policy names; None without such a page."""
    page = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    script = re.search(r"script-src '(sha256-[\w+/=]+)'", page)
    return {"page": page, "script_hash": script[1]} if script else None


def _read_existing(path: Path, kind: type[T]) -> T | None:
    return read_record(path, kind) if path.is_file() else None


def _task_curves(task: str, demo_runs: Sequence[LoggedRun], levels: dict[str, float]) -> Iterator[Drawing]:
    """Yield the curves of a task: its validation, beside the accuracies that need no learning, then its losses."""
    runs = [run for run in demo_runs if run.task == task]
    for name, lines in _validation(runs):
        if name != "loss":
            shown = levels if name == "accuracy" else {}
            yield _drawing(lines, levels=shown, title=f"Validation: {name} of the {task} task", ylabel=name)
    loss = [*_series(runs, "loss"), *_series(runs, "validation/loss", ", validation")]
    if loss:
        is_faint = any(len(line.x) > plots.MANY for line in loss)
        caption = "Training loss: faint as logged, bold its running mean." if is_faint else "Training loss as logged."
        yield _drawing(loss, title=f"Loss of the {task} task", caption=caption, ylabel=LOGGED_CURVES["loss"][1])


def _series(runs: Sequence[LoggedRun], key: str, suffix: str = "") -> list[Series]:
    """Return the logged values of `key` over steps, of each run that logged any."""
    lines = []
    for run in runs:
        if points := run.logged(key):
            steps, values = zip(*points, strict=True)
            lines.append(Series(run.label + suffix, steps, values, **variant_style(run.variant)))
    return lines


def _validation(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, list[Series]]]:
    """Yield the logged measures of evaluations during training; one evaluation, at the end, is no curve."""
    for key in dict.fromkeys(key for run in runs for line in run.metrics for key in line):
        lines = _series(runs, key) if key.startswith("validation/") else []
        if any(len(line.x) > 1 for line in lines):
            yield key.removeprefix("validation/").replace("_", " "), lines


def _lambda_figures(run: LoggedRun, title: str) -> Iterator[Drawing]:
    """Yield λ by layer, at the steps with finite ones, as one figure over training; none for a run that logged none."""
    logged = [line for line in run.metrics if line.get("lambdas") and None not in line["lambdas"]]
    if not logged:
        return
    steps = [line["step"] for line in logged]
    layers = list(zip(*(line["lambdas"] for line in logged), strict=True))
    # Every layer has a line; where they are many, the legend names some of them, and the colours tell the others.
    each, last = math.ceil(len(layers) / 8), max(1, len(layers) - 1)
    lines = [
        Series(
            f"{'_' if number % each else ''}layer {number + 1}", steps, values, plots.layer_colour(number / last), ""
        )
        for number, values in enumerate(layers)
    ]
    ends = "; ".join(f"layer {number} ends at {values[-1]:.2f}" for number, values in enumerate(layers, start=1))
    alt = f"{title} by layer over training: {ends}."
    yield Drawing(line_plot(lines, title=title, ylabel="λ"), alt, "One line per layer.")
