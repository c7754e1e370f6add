"""The page of any training runs: their curves in the same axes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from diff_transformer.report import curves, demo, figures, markup
from diff_transformer.report.rows import DIVERGED, format_number
from diff_transformer.report.shared import origin, results_table
from diff_transformer.results import read_metrics, read_results

# Key in metrics.jsonl → (title, label of the axis).
CURVES = {
    "loss": ("Training loss", "loss (nats per predicted token)"),
    "learning_rate": ("Learning rate", "learning rate"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "tokens_per_second": ("Speed", "tokens per second"),
}


def runs_in(folder: Path) -> list[Path]:
    """The training runs that `folder` stands for: itself, or those of the demo in it."""
    if not folder.is_dir():
        raise FileNotFoundError(f"the run folder {folder} does not exist")
    if (folder / "metrics.jsonl").is_file():
        return [folder]
    if found := list(demo.task_runs(folder).values()):
        return found
    raise ValueError(
        f"{folder} is not a run folder: it holds neither metrics.jsonl nor the runs of a demo, "
        "nor results of experiments, as `diff-transformer reproduce` leaves them"
    )


def page_of(runs: Sequence[Path]) -> tuple[str, list[str]]:
    """The page's title and its sections, for run folders that `runs_in` has found."""
    folders = dict(zip(names_of(runs), runs, strict=True))
    logs = {label: read_metrics(run / "metrics.jsonl") for label, run in folders.items()}
    title = f"Training of {next(iter(folders))}" if len(runs) == 1 else f"Training of {len(runs)} runs"
    drawn = [*_curve_figures(logs)]
    lambdas = [
        text
        for label, metrics in logs.items()
        for text in curves.lambda_figure(metrics, curves.initial_lambdas(folders[label]), title=f"λ, {label}")
    ]
    return title, [
        markup.header(title, _summary(logs)),
        markup.section("Curves", markup.grid(*drawn) if drawn else markup.note("Nothing has been logged yet.")),
        markup.section("λ", markup.grid(*lambdas)) if lambdas else "",
        *(_own_section(label, run) for label, run in folders.items()),
    ]


def names_of(runs: Sequence[Path]) -> list[str]:
    """As many of the last parts of each path as tell the runs apart."""
    paths = [run.resolve() for run in runs]
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _summary(logs: Mapping[str, curves.Metrics]) -> str:
    def number(value: float | None) -> str:
        return "–" if value is None else format_number(value, missing=DIVERGED)

    rows = []
    for label, metrics in logs.items():
        loss, check, speed = (
            curves.series(metrics, key, label) for key in ("loss", "validation/loss", "tokens_per_second")
        )
        cells = [
            str(metrics[-1]["step"]) if metrics else "–",
            number(loss.y[-1] if loss else None),
            number(min(check.y) if check else None),
            number(median(speed.y) if speed else None),
        ]
        rows.append(markup.row(label, cells))
    return markup.table(["Run", "Last step", "Last loss", "Best validation loss", "Tokens per second (median)"], rows)


def _curve_figures(logs: Mapping[str, curves.Metrics]) -> Iterator[str]:
    checks = {key: ("Validation: " + key.partition("/")[2], key) for key in curves.validation_keys(list(logs.values()))}
    for key, (title, label) in {**CURVES, **checks}.items():
        found = [line for name, metrics in logs.items() if (line := curves.series(metrics, key, name))]
        # One evaluation, at the end, is no curve.
        if found and (key in CURVES or any(len(line.x) > 1 for line in found)):
            drawing = (
                figures.curves([], checks=found, title=title, ylabel=label)
                if key in checks
                else figures.curves(found, title=title, ylabel=label, noisy=key != "learning_rate")
            )
            yield markup.figure(drawing, f"{title}: {curves.in_words(found)}.")


def _own_section(label: str, run: Path) -> str:
    """What only this run has: its results, if something was measured, and its recipe."""
    parts = []
    if (run / "results.json").is_file():
        results = read_results(run / "results.json")
        parts += [origin(results), results_table(results.records)]
    if (run / "recipe.yaml").is_file():
        recipe = (run / "recipe.yaml").read_text(encoding="utf-8", errors="replace")
        parts.append(markup.details("Recipe", markup.code_block(recipe)))
    return markup.section(label, *(parts or [markup.note("recipe.yaml is missing.")]))
