"""Writes the pages of training runs side by side, and of the demo with its attention maps."""

import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from diff_lab.learning import ACCURACY_CURVE
from diff_lab.record import AttentionExample, Baseline, Result, ResultsFile, Samples
from diff_lab.report import figures
from diff_lab.report.coordinate_figures import bands, panel_along
from diff_lab.report.demo_findings import (
    learning_sentences,
    loss_curves,
    loss_differences,
    loss_sentences,
    steps_table,
)
from diff_lab.report.documents import HTML_MARK, Table, fill_page, refuse_others
from diff_lab.report.figures import Drawing, Series, variant_style
from diff_lab.report.measured_tables import LABELS, demo_table, every_number
from diff_lab.report.wording import DIVERGED, format_number, levels_text, variant_label
from diff_lab.results_files import read_record, write_text
from diff_transformer.storage.files import read_json, read_metrics
from diff_transformer.variants import ATTENTION_TYPES, lambda_init_schedule

T = TypeVar("T")

TASKS = ("retrieval", "language")
# Key in metrics.jsonl → (title, label of the axis).
LOGGED_CURVES = {
    "loss": ("Training loss", "loss (nats per predicted token)"),
    "learning_rate": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "tokens_per_second": ("Speed", "tokens per second"),
}
ATTENTION_MEASURES = [name for name in LABELS if name.startswith("retrieval/attention_")]
# Attention map of a head → what its title says.
MAPS = {"A1": "A1", "λA2": "λA2", "difference": "A1 − λA2", "A": "A"}


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
        """The finite numbers of that name, each behind its step."""
        return [(line["step"], line[key]) for line in self.metrics if isinstance(line.get(key), int | float)]

    def initial_lambdas(self, layers: int) -> list[float]:
        """λ_init of each layer as the saved model's config says; empty without a config that says it."""
        path = self.folder / "model" / "config.json"
        config = read_json(path) if path.is_file() else {}
        initial, offset = config.get("lambda_init"), config.get("lambda_init_offset", 0)
        if initial == "schedule":
            return [lambda_init_schedule(layer, offset) for layer in range(1, layers + 1)]
        return [] if initial is None else [initial] * layers


def build_run_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a report of training runs side by side; a demo folder alone gives the demo's report.

    Among several folders a demo's stands for the runs inside it. Without `output` the report is `report.html` in the
    folder of a single run, `comparison.html` in the nearest folder that holds all of several. Raises FileNotFoundError
    for a folder that is missing, ValueError for one that is not a run's, FileExistsError as `refuse_others` does.
    """
    path = run_report_path(run_dirs, output)
    refuse_others(path, HTML_MARK)
    runs = _all_runs(run_dirs)
    return write_text(path, _runs_page(runs) if runs else _demo_page(Path(run_dirs[0])))


def run_report_path(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The file that `build_run_report` writes. Raises as it does where a folder is missing or is not a run's."""
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
    """The training runs that `folder` stands for: itself, or those of the demo in it."""
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
    """As many of the last parts of each path as tell the runs apart."""
    paths = [run.resolve() for run in runs]
    for count in itertools.count(1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _demo_runs(run_dir: Path) -> list[LoggedRun]:
    """The training runs that lie in a demo folder."""
    runs = [
        LoggedRun(run_dir / f"{task}-{variant}", variant_label(variant), variant, task)
        for task in TASKS
        for variant in ATTENTION_TYPES
    ]
    return [run for run in runs if (run.folder / "metrics.jsonl").is_file()]


def _all_runs(run_dirs: Sequence[str | Path]) -> list[Path]:
    """The runs in folders, each once; none of a demo, finished or not, that stands alone."""
    first, *others = map(Path, run_dirs)
    is_run, has_results = ((first / name).is_file() for name in ("metrics.jsonl", "results.json"))
    if not others and not is_run and (has_results or _demo_runs(first)):
        return []
    return list({run.resolve(): run for folder in (first, *others) for run in runs_in(folder)}.values())


def _runs_page(folders: Sequence[Path]) -> str:
    runs = [LoggedRun(folder, label) for folder, label in zip(folders, names_of(folders), strict=True)]
    return fill_page(
        "runs.html",
        title=f"Training of {runs[0].label}" if len(runs) == 1 else f"Training of {len(runs)} runs",
        summary=_summary(runs),
        demo_table=demo_table,
        curves=list(_run_curves(runs)),
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


def _run_curves(runs: Sequence[LoggedRun]) -> Iterator[Drawing]:
    for key, (title, label) in LOGGED_CURVES.items():
        if lines := _series(runs, key):
            figure = figures.curves(lines, title=title, ylabel=label, noisy=key != "learning_rate")
            yield Drawing(figure, f"{title}: {_ends_in_words(lines)}.")
    for key, checks in _validation(runs):
        title = f"Validation: {key.partition('/')[2]}"
        yield Drawing(figures.curves([], checks=checks, title=title, ylabel=key), f"{title}: {_ends_in_words(checks)}.")


def _demo_page(run_dir: Path) -> str:
    results = _read_existing(run_dir / "results.json", ResultsFile)
    example = _read_existing(run_dir / "attention.json", AttentionExample)
    records, baselines = (results.records, results.baselines) if results else ((), ())
    runs = _demo_runs(run_dir)
    tokens_per_step = _tokens_per_step(results.settings.get("language")) if results else None
    maps = {
        f"{variant_label(variant)}: {words}": of_variant[name]
        for variant in ATTENTION_TYPES
        for of_variant in [_maps_of(example, variant)]
        for name, words in MAPS.items()
        if name in of_variant
    }
    asked = figures.asked_positions(example) if example else []
    of_queries = (weight for rows in maps.values() for position in asked for weight in rows[position])
    sizes = [abs(weight) for weight in of_queries if math.isfinite(weight)]
    largest = max(sizes, default=0.0)
    accuracy = _by_depth(records, baselines, "retrieval/accuracy_by_depth", "Accuracy")
    weights = [_by_depth(records, baselines, name, LABELS[name].capitalize()) for name in ATTENTION_MEASURES]
    return fill_page(
        "demo.html",
        title=results.title if results else f"The demo in {run_dir.name}",
        results=results,
        demo_table=demo_table,
        every_number=every_number,
        one_seed=len({record.seed for record in records} - {None}) <= 1,
        example=example,
        query_rows=list(_row_figures(example)) if example else [],
        steps=steps_table(records, baselines),
        learning=learning_sentences(records, baselines),
        losses=loss_sentences(records, tokens_per_step),
        types=ATTENTION_TYPES,
        maps=[_map_figure(example, rows, name, largest or 1.0) for name, rows in maps.items() if example],
        largest=largest,
        retrieval=[*_task_curves("retrieval", runs, baselines), *accuracy],
        language=[*_loss_difference(records, tokens_per_step), *_task_curves("language", runs)],
        weights=list(itertools.chain(*weights)),
        explorer=_explorer(run_dir / "explorer.html"),
        samples=_read_existing(run_dir / "samples.json", Samples),
        lambdas=[figure for run in runs for figure in _lambda_figures(run, f"λ, {run.task}")],
    )


def _explorer(file: Path) -> dict[str, str] | None:
    """The explorer's page and the hash of its script, which its policy names; None where there is no such page."""
    page = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    script = re.search(r"script-src '(sha256-[\w+/=]+)'", page)
    return {"page": page, "script_hash": script[1]} if script else None


def _read_existing(path: Path, kind: type[T]) -> T | None:
    return read_record(path, kind) if path.is_file() else None


def _maps_of(example: AttentionExample | None, variant: str) -> dict[str, list[list[float]]]:
    """The maps of a variant's head by name, with λA2 in place of A2."""
    maps = dict(example.maps.get(variant, {})) if example else {}
    if example and "A2" in maps:
        maps["λA2"] = [[example.lambda_ * weight for weight in row] for row in maps.pop("A2")]
    return maps


def _tokens_per_step(recipe: Any) -> int | None:
    """The tokens of a step by a recipe among the settings of results; None where they have none."""
    data = recipe.get("data") if isinstance(recipe, dict) else None
    if not isinstance(data, dict):
        return None
    count, length = data.get("batch_size"), data.get("length")
    return count * length if isinstance(count, int) and isinstance(length, int) else None


def _loss_difference(records: Sequence[Result], tokens_per_step: int | None) -> Iterator[Drawing]:
    """DIFF's validation loss less the Transformer's over training."""
    if (curves := loss_curves(records)) is None:
        return
    steps, differences = loss_differences(*curves)
    if len(steps) < 2:
        return
    title, unit = "DIFF's validation loss less the Transformer's", "nats per token"
    x: Sequence[float] = [step * tokens_per_step / 1e6 for step in steps] if tokens_per_step else steps
    line = Series("DIFF − Transformer", x, differences, **variant_style("diff"))
    figure = figures.curves(
        [],
        checks=[line],
        levels={"equal": 0.0},
        title=title,
        ylabel=f"difference ({unit})",
        xlabel="million tokens" if tokens_per_step else "training step",
    )
    yield Drawing(
        figure,
        f"{title}, in {unit}, over training: {_ends_in_words([line])}.",
        "Above the line the Transformer is better, below it DIFF.",
    )


def _task_curves(task: str, demo_runs: Sequence[LoggedRun], baselines: Sequence[Baseline] = ()) -> Iterator[Drawing]:
    """The curves of a task: its validation first, beside the accuracies that need no learning, then its losses."""
    runs = [run for run in demo_runs if run.task == task]
    levels = {
        f"{name} {format_number(value)}": value
        for one in baselines
        if one.name == ACCURACY_CURVE
        for name, value in one.levels().items()
    }
    for key, checks in _validation(runs):
        if key != "validation/loss":
            name = key.removeprefix("validation/").replace("_", " ")
            shown = levels if name == "accuracy" else {}
            figure = figures.curves([], checks=checks, levels=shown, title=f"Validation: {name}", ylabel=name)
            words = "; ".join([_ends_in_words(checks), *shown])
            yield Drawing(figure, f"{name} of the {task} task over training: {words}.")
    loss, checks = _series(runs, "loss"), _series(runs, "validation/loss", ", validation")
    if loss or checks:
        faint = any(len(line.x) > figures.MANY for line in loss)
        yield Drawing(
            figures.curves(loss, checks=checks, title="Loss", ylabel=LOGGED_CURVES["loss"][1]),
            f"Loss of the {task} task over training: {_ends_in_words([*loss, *checks])}.",
            "Training loss: faint as logged, bold its running mean." if faint else "Training loss as logged.",
        )


def _by_depth(records: Sequence[Result], baselines: Sequence[Baseline], name: str, title: str) -> Iterator[Drawing]:
    by_depth = [record for record in records if record.name == name and "depth" in record.coordinates]
    if not by_depth:
        return
    panel = panel_along("depth", by_depth, baselines=baselines)
    texts = dict(zip(panel.numbers, panel.texts, strict=True))
    words = [
        f"{line.label} " + ", ".join(f"depth {texts[x]}: {y:.3g}" for x, y in zip(line.x, line.y, strict=True))
        for line in panel.lines
    ]
    # The same at every depth.
    words += [levels_text(baseline) for baseline in baselines if baseline.name == name][:1]
    methods = dict.fromkeys(record.method for record in by_depth if record.interval and record.method)
    yield Drawing(
        bands(panel, title=title, from_zero=True),
        f"{title} by depth of the answer: {'; '.join(words)}.",
        f"Bands: 95 % intervals, {'; '.join(methods)}." if methods else "",
    )


def _map_figure(example: AttentionExample, rows: list[list[float]], title: str, largest: float) -> Drawing:
    at_answer = ", ".join(f"{rows[example.query_position][position]:.2f}" for position in example.answer_positions)
    figure = figures.attention_map(rows, example, title=title, largest=largest)
    return Drawing(figure, f"{title}: every query's weights; the marked query gives the answer {at_answer}.")


def _row_figures(example: AttentionExample) -> Iterator[Drawing]:
    """The marked query's row of each map as lines, both models on one scale."""
    seen = example.query_position + 1
    diff, softmax = (
        {name: rows[example.query_position][:seen] for name, rows in _maps_of(example, variant).items()}
        for variant in ("diff", "softmax")
    )
    lines: dict[str, dict[str, list[float]]] = {}
    if {"A1", "λA2", "difference"} <= diff.keys():
        lines["DIFF"] = {MAPS[name]: diff[name] for name in ("A1", "λA2", "difference")}
    if "A" in softmax:
        lines["Transformer"] = {"A": softmax["A"]}
    weights = [weight for maps in lines.values() for row in maps.values() for weight in row]
    limits = (1.1 * min(0.0, *weights), 1.1 * max(weights)) if weights else (0.0, 1.0)
    for label, maps in lines.items():
        title = f"{label}: the marked query's weights"
        figure = figures.attention_row(maps, example, title=title, limits=limits)
        *_, last = maps.values()
        largest = max(range(seen), key=last.__getitem__)
        yield Drawing(figure, f"{title} over the positions up to it; largest at position {largest}.")


def _lambda_figures(run: LoggedRun, title: str) -> Iterator[Drawing]:
    """λ by layer where all were finite, as one figure over training; none for a run that logged none."""
    logged = [line for line in run.metrics if line.get("lambdas") and None not in line["lambdas"]]
    if not logged:
        return
    layers = list(zip(*(line["lambdas"] for line in logged), strict=True))
    initial = run.initial_lambdas(len(layers))
    ends = "; ".join(f"layer {number} ends at {values[-1]:.2f}" for number, values in enumerate(layers, start=1))
    caption = "One line per layer; triangles at the left edge mark λ_init." if initial else "One line per layer."
    figure = figures.lambdas([line["step"] for line in logged], layers, initial, title=title)
    yield Drawing(figure, f"{title} by layer over training: {ends}.", caption)


def _series(runs: Sequence[LoggedRun], key: str, suffix: str = "") -> list[Series]:
    """The values of `key` over steps, where they were logged, of each run that logged any."""
    lines = []
    for run in runs:
        if points := run.logged(key):
            steps, values = zip(*points, strict=True)
            lines.append(Series(run.label + suffix, steps, values, **variant_style(run.variant)))
    return lines


def _validation(runs: Sequence[LoggedRun]) -> Iterator[tuple[str, list[Series]]]:
    """What evaluations during training measured, as logged; one evaluation, at the end, is no curve."""
    for key in dict.fromkeys(key for run in runs for line in run.metrics for key in line):
        lines = _series(runs, key) if key.startswith("validation/") else []
        if any(len(line.x) > 1 for line in lines):
            yield key, lines


def _ends_in_words(lines: Sequence[Series]) -> str:
    """The ends of curves, for those who do not see them."""
    return "; ".join(f"{line.label} goes from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)
