"""Writes the pages of training runs side by side, and of the demo with its attention maps."""

import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from diff_transformer.lab.record import AttentionExample, Baseline, Result, ResultsFile, Samples
from diff_transformer.lab.report import figures
from diff_transformer.lab.report.coordinate_figures import bands, panel_along
from diff_transformer.lab.report.documents import HTML_MARK, Table, fill_page, refuse_others
from diff_transformer.lab.report.figures import CYCLE, MUTED, THEME, Drawing, Series, variant_style
from diff_transformer.lab.report.measured_tables import LABELS, demo_table, every_number
from diff_transformer.lab.report.wording import DIVERGED, format_number, levels_text, variant_label
from diff_transformer.lab.results_files import read_record, write_text
from diff_transformer.storage.files import read_json, read_metrics
from diff_transformer.variants import ATTENTION_TYPES, lambda_init_schedule

Metrics = Sequence[Mapping[str, Any]]
# The runs of one figure: each with its label, its variant ("" where colours tell only the runs apart) and its metrics.
Logs = Sequence[tuple[str, str, Metrics]]
T = TypeVar("T")

TASKS = ("retrieval", "language")
# Key in metrics.jsonl → (title, label of the axis).
CURVES = {
    "loss": ("Training loss", "loss (nats per predicted token)"),
    "learning_rate": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "tokens_per_second": ("Speed", "tokens per second"),
}
ATTENTION_MEASURES = [name for name in LABELS if name.startswith("retrieval/attention_")]
# Attention map of a head → what its title says.
MAPS = {"A1": "A1", "A2": "A2", "difference": "A1 − λA2", "A": "A"}


def build_run_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a report of training runs side by side; a demo folder alone gives the demo's report.

    Among several folders a demo's stands for the runs inside it. Without `output` the report is `report.html` in the
    folder of a single run, `comparison.html` in the nearest folder that holds all of several. Raises FileNotFoundError
    for a folder that is missing, ValueError for one that is not a run's, FileExistsError as `refuse_others` does.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    path = run_report_path(folders, output)
    refuse_others(path, HTML_MARK)
    alone = len(folders) == 1 and is_demo(folders[0])
    return write_text(path, _demo_page(folders[0]) if alone else _runs_page(_all_runs(folders)))


def run_report_path(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The file that `build_run_report` writes. Raises as it does where a folder is missing or is not a run's."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run folder")
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"the folder of {output} does not exist")
    runs = folders if len(folders) == 1 and is_demo(folders[0]) else _all_runs(folders)
    if output is not None:
        return Path(output)
    shared = Path(os.path.commonpath([run.resolve().parent for run in runs]))
    return runs[0] / "report.html" if len(runs) == 1 else shared / "comparison.html"


def is_demo(run_dir: Path) -> bool:
    """Whether `run_dir` holds a demo, finished or not: results but no training of its own, or runs of its tasks."""
    if (run_dir / "metrics.jsonl").is_file():
        return False
    return (run_dir / "results.json").is_file() or bool(_task_runs(run_dir))


def runs_in(folder: Path) -> list[Path]:
    """The training runs that `folder` stands for: itself, or those of the demo in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the run folder {folder} does not exist")
    if (folder / "metrics.jsonl").is_file():
        return [folder]
    if runs := list(_task_runs(folder).values()):
        return runs
    raise ValueError(
        f"{folder} is not a run folder: it holds neither metrics.jsonl nor the runs of a demo, "
        "nor results of experiments, as `diff-transformer reproduce` leaves them"
    )


def names_of(runs: Sequence[Path]) -> list[str]:
    """As many of the last parts of each path as tell the runs apart."""
    paths = [run.resolve() for run in runs]
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def initial_lambdas(run_dir: Path) -> list[float] | None:
    """λ_init of each layer as the saved model's config says; None without a config that says it."""
    path = run_dir / "model" / "config.json"
    config = read_json(path) if path.is_file() else {}
    layers, initial = config.get("num_hidden_layers"), config.get("lambda_init")
    if not isinstance(layers, int):
        return None
    if initial == "schedule":
        offset = config.get("lambda_init_offset", 0)
        return [lambda_init_schedule(layer, offset) for layer in range(1, layers + 1)]
    return [float(initial)] * layers if isinstance(initial, int | float) else None


def _task_runs(run_dir: Path) -> dict[tuple[str, str], Path]:
    """The training runs that lie in a demo folder, by task and variant."""
    folders = {(task, variant): run_dir / f"{task}-{variant}" for task in TASKS for variant in ATTENTION_TYPES}
    return {key: folder for key, folder in folders.items() if (folder / "metrics.jsonl").is_file()}


def _all_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs in folders; one that is named twice, be it by two paths, once."""
    return list({run.resolve(): run for folder in folders for run in runs_in(folder)}.values())


def _runs_page(runs: Sequence[Path]) -> str:
    folders = dict(zip(names_of(runs), runs, strict=True))
    logs: dict[str, Metrics] = {label: read_metrics(run / "metrics.jsonl") for label, run in folders.items()}
    return fill_page(
        "runs.html",
        title=f"Training of {next(iter(folders))}" if len(runs) == 1 else f"Training of {len(runs)} runs",
        summary=_summary(logs),
        demo_table=demo_table,
        curves=list(_run_curves(logs)),
        lambdas=[one for label, run in folders.items() for one in _lambda_figure(logs[label], run, f"λ, {label}")],
        runs=[_own_values(label, run) for label, run in folders.items()],
    )


def _own_values(label: str, run: Path) -> dict[str, Any]:
    """What only this run has: its results, if something was measured, and its recipe."""
    recipe = run / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else None
    return {"label": label, "results": _if_there(run / "results.json", ResultsFile), "recipe": text}


def _summary(logs: Mapping[str, Metrics]) -> Table:
    rows = []
    for label, metrics in logs.items():
        loss, validation, speed = (
            [line[key] for line in metrics if isinstance(line.get(key), int | float)]
            for key in ("loss", "validation/loss", "tokens_per_second")
        )
        numbers = (loss[-1:], [min(validation)] if validation else [], [median(speed)] if speed else [])
        cells = [format_number(one[0], missing=DIVERGED) if one else "–" for one in numbers]
        rows.append([label, str(metrics[-1]["step"]) if metrics else "–", *cells])
    head = ["Run", "Last step", "Last loss", "Best validation loss", "Tokens per second (median)"]
    return Table.of_rows(head, rows)


def _run_curves(logs: Mapping[str, Metrics]) -> Iterator[Drawing]:
    named = [(label, "", metrics) for label, metrics in logs.items()]
    for key, (title, label) in CURVES.items():
        if lines := _series(named, key):
            figure = figures.curves(lines, title=title, ylabel=label, noisy=key != "learning_rate")
            yield figures.drawing(figure, f"{title}: {_ends_in_words(lines)}.")
    for key, checks in _validation(named):
        title = f"Validation: {key.partition('/')[2]}"
        figure = figures.curves([], checks=checks, title=title, ylabel=key)
        yield figures.drawing(figure, f"{title}: {_ends_in_words(checks)}.")


def _demo_page(run_dir: Path) -> str:
    results = _if_there(run_dir / "results.json", ResultsFile)
    example = _if_there(run_dir / "attention.json", AttentionExample)
    records, baselines = (results.records, results.baselines) if results else ((), ())
    folders = _task_runs(run_dir)
    runs: dict[tuple[str, str], Metrics] = {key: read_metrics(run / "metrics.jsonl") for key, run in folders.items()}
    maps = {
        f"{variant_label(variant)}: {words}": example.maps[variant][name]
        for variant in ATTENTION_TYPES
        for name, words in MAPS.items()
        if example is not None and name in example.maps.get(variant, {})
    }
    sizes = [abs(weight) for rows in maps.values() for row in rows for weight in row if math.isfinite(weight)]
    largest = max(sizes, default=0.0)
    accuracy = _depth_figure(records, "retrieval/accuracy_by_depth", "Accuracy", baselines)
    weights = [_depth_figure(records, name, LABELS[name].capitalize()) for name in ATTENTION_MEASURES]
    return fill_page(
        "demo.html",
        title=results.title if results else f"The demo in {run_dir.name}",
        results=results,
        demo_table=demo_table,
        every_number=every_number,
        one_seed=len({record.seed for record in records} - {None}) <= 1,
        example=example,
        query_rows=[] if example is None else _row_figures(example),
        types=ATTENTION_TYPES,
        maps=[_map_figure(example, rows, name, largest or 1.0) for name, rows in maps.items() if example],
        largest=largest,
        retrieval=[*_task_curves("retrieval", runs), *accuracy],
        language=list(_task_curves("language", runs)),
        weights=[*itertools.chain(*weights)],
        samples=_if_there(run_dir / "samples.json", Samples),
        lambdas=[one for key, run in folders.items() for one in _lambda_figure(runs[key], run, f"λ, {key[0]}")],
    )


def _if_there(path: Path, kind: type[T]) -> T | None:
    return read_record(path, kind) if path.is_file() else None


def _task_curves(task: str, runs: Mapping[tuple[str, str], Metrics]) -> Iterator[Drawing]:
    logs = [(variant_label(variant), variant, metrics) for (name, variant), metrics in runs.items() if name == task]
    loss, checks = _series(logs, "loss"), _series(logs, "validation/loss", ", validation")
    if loss or checks:
        faint = any(len(line.x) > figures.MANY for line in loss)
        yield figures.drawing(
            figures.curves(loss, checks=checks, title="Loss", ylabel=CURVES["loss"][1]),
            f"Loss of the {task} task over training: {_ends_in_words([*loss, *checks])}.",
            "Training loss: faint as logged, bold its running mean." if faint else "Training loss as logged.",
        )
    for key, checks in _validation(logs):
        if key != "validation/loss":
            name = key.removeprefix("validation/").replace("_", " ")
            figure = figures.curves([], checks=checks, title=f"Validation: {name}", ylabel=name)
            yield figures.drawing(figure, f"{name} of the {task} task over training: {_ends_in_words(checks)}.")


def _depth_figure(
    records: Sequence[Result], name: str, title: str, baselines: Sequence[Baseline] = ()
) -> Iterator[Drawing]:
    own = [one for one in records if one.name == name and not isinstance(one.coordinates.get("depth", ""), str)]
    if not own:
        return
    panel = panel_along("depth", own, baselines=baselines)
    texts = dict(zip(panel.numbers, panel.texts, strict=True))
    words = [
        f"{line.label} " + ", ".join(f"depth {texts[x]}: {y:.3g}" for x, y in zip(line.x, line.y, strict=True))
        for line in panel.lines
    ]
    # The same at every depth.
    words += [levels_text(one) for one in baselines if one.name == name][:1]
    methods = dict.fromkeys(one.method for one in own if one.interval and one.method)
    yield figures.drawing(
        bands(panel, title=title, from_zero=True),
        f"{title} by depth of the answer: {'; '.join(words)}.",
        f"Bands: 95 % intervals, {'; '.join(methods)}." if methods else "",
    )


def _map_figure(example: AttentionExample, rows: list[list[float]], title: str, largest: float) -> Drawing:
    at_answer = ", ".join(f"{rows[example.query_position][position]:.2f}" for position in example.answer_positions)
    figure = figures.attention_map(rows, example, title=title, largest=largest)
    return figures.drawing(figure, f"{title}: every query's weights; the marked query gives the answer {at_answer}.")


def _row_figures(example: AttentionExample) -> list[Drawing]:
    """The marked query's row of each map as lines, both models on one scale."""
    seen = example.query_position + 1
    diff, transformer = (
        {name: rows[example.query_position][:seen] for name, rows in example.maps.get(variant, {}).items()}
        for variant in ("diff", "softmax")
    )
    lines: dict[str, tuple[dict[str, list[float]], tuple[str, ...]]] = {}
    if {"A1", "A2", "difference"} <= diff.keys():
        subtracted = [example.lambda_ * weight for weight in diff["A2"]]
        lines["DIFF"] = (
            {"A1": diff["A1"], "λA2": subtracted, "A1 − λA2": diff["difference"]},
            (MUTED, CYCLE[3], THEME["diff"][0]),
        )
    if "A" in transformer:
        lines["Transformer"] = ({"A": transformer["A"]}, (THEME["softmax"][0],))
    weights = [weight for maps, _ in lines.values() for row in maps.values() for weight in row]
    limits = (1.1 * min(0.0, *weights), 1.1 * max(weights)) if weights else (0.0, 1.0)
    drawings = []
    for label, (maps, colours) in lines.items():
        title = f"{label}: the marked query's weights"
        figure = figures.attention_row(maps, colours, example, title=title, limits=limits)
        *_, last = maps.values()
        largest = max(range(seen), key=last.__getitem__)
        alt = f"{title} over the positions up to it; largest at position {largest}."
        drawings.append(figures.drawing(figure, alt))
    return drawings


def _lambda_figure(metrics: Metrics, run: Path, title: str) -> list[Drawing]:
    """λ by layer over training as one figure; none for a run that logged none (any but a DIFF's).

    Lines with a λ that was not finite (null) are left out.
    """
    logged = [line for line in metrics if line.get("lambdas") and None not in line["lambdas"]]
    if not logged:
        return []
    layers = list(zip(*(line["lambdas"] for line in logged), strict=True))
    initial = initial_lambdas(run)
    initial = initial if initial is not None and len(initial) == len(layers) else None
    ends = "; ".join(f"layer {number} ends at {values[-1]:.2f}" for number, values in enumerate(layers, start=1))
    caption = "One line per layer; triangles at the left edge mark λ_init." if initial else "One line per layer."
    figure = figures.lambdas([line["step"] for line in logged], layers, initial, title=title)
    return [figures.drawing(figure, f"{title} by layer over training: {ends}.", caption)]


def _series(logs: Logs, key: str, suffix: str = "") -> list[Series]:
    """The values of `key` over steps, where they were logged, of each run that logged any."""
    lines = []
    for label, variant, metrics in logs:
        points = [(line["step"], line[key]) for line in metrics if isinstance(line.get(key), int | float)]
        if points:
            steps, values = zip(*points, strict=True)
            lines.append(Series(label + suffix, steps, values, **variant_style(variant)))
    return lines


def _validation(logs: Logs) -> Iterator[tuple[str, list[Series]]]:
    """What evaluations during training measured, as logged; one evaluation, at the end, is no curve."""
    for key in dict.fromkeys(key for *_, metrics in logs for line in metrics for key in line):
        lines = _series(logs, key) if key.startswith("validation/") else []
        if any(len(line.x) > 1 for line in lines):
            yield key, lines


def _ends_in_words(lines: Sequence[Series]) -> str:
    """The ends of curves, for those who do not see them."""
    return "; ".join(f"{line.label} goes from {line.y[0]:.3g} to {line.y[-1]:.3g}" for line in lines)
