"""The demo's page, for a reader who has not read the paper."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from diff_transformer.report import attention, curves, figures, markup
from diff_transformer.report.figures import ARM_COLOURS, ARM_MARKERS, Series
from diff_transformer.report.rows import ARMS, UNCLEAR, Row, arm_label, arms_of, levels_text, rows_of
from diff_transformer.report.shared import all_numbers, origin, results_table
from diff_transformer.report.verdicts import LEVELS
from diff_transformer.results import Baseline, Result, ResultsFile, read_metrics, read_results, read_samples

TASKS = {
    "retrieval": "Key–value pairs lie hidden among noise tokens; then keys are asked for, and the model must answer "
    "each with the value that stood beside it. Accuracy is the share of answers that are right; depth is where in the "
    "context the pair lay, 0 % being its beginning. Every pair is asked for once and the answers stay in view, so a "
    "model can do better than guessing without knowing which value belongs to which key: by leaving out those already "
    "given. The first query cannot be answered that way.",
    "language": "The model reads real text and predicts each next token from those before it. Validation loss is the "
    "mean surprise on text that was kept out of training; in bits per byte it does not depend on how text is cut into "
    "tokens.",
}
ABOUT = (
    "A Transformer reads through attention: each position spreads a weight of 1 over the positions up to it, and part "
    "of that weight falls on what does not matter. A Differential Transformer (DIFF) computes two such maps, A1 and "
    "A2, and attends with their difference, A1 − λA2, where λ is learned: what both maps have in common cancels, much "
    "as noise-cancelling headphones subtract the noise that two microphones hear.",
    "Here a DIFF stands beside its twin, an ordinary Transformer of the same depth and widths, trained for as many "
    "steps on the same data in the same order. Only the attention differs. Every row is shown as it came out, whoever "
    "is ahead.",
)
ATTENTION_MEASURES = {
    "retrieval/attention_to_answer_signed": "Attention to the answer, signed",
    "retrieval/attention_to_answer_share": "Attention to the answer, share",
    "retrieval/attention_noise_signed": "Attention noise, signed",
    "retrieval/attention_noise_share": "Attention noise, share",
}


def is_demo(run_dir: Path) -> bool:
    """Whether `run_dir` holds a demo, be it half of one: results but no training of its own, or runs of its tasks."""
    if (run_dir / "metrics.jsonl").is_file():
        return False
    return (run_dir / "results.json").is_file() or bool(task_runs(run_dir))


def task_runs(run_dir: Path) -> dict[tuple[str, str], Path]:
    """The training runs that lie in a demo folder, by task and arm."""
    folders = {(task, arm): run_dir / f"{task}-{arm}" for task in TASKS for arm in ARMS}
    return {key: folder for key, folder in folders.items() if (folder / "metrics.jsonl").is_file()}


def page_of(run_dir: Path) -> tuple[str, list[str]]:
    """The page's title and its sections."""
    found = (run_dir / "results.json").is_file()
    results = read_results(run_dir / "results.json") if found else None
    records = results.records if results else ()
    title = results.title if results else f"The demo in {run_dir.name}"
    runs = {key: read_metrics(folder / "metrics.jsonl") for key, folder in task_runs(run_dir).items()}
    retrieval = [
        *_training_curves("retrieval", runs),
        *_depth_figure(records, "retrieval/accuracy_by_depth", "Accuracy", results.baselines if results else ()),
    ]
    return title, [
        markup.header(title, *map(markup.paragraph, ABOUT), origin(results) if results else ""),
        attention.query_section(run_dir / "attention.json"),
        _results(results),
        markup.section("Retrieval", markup.paragraph(TASKS["retrieval"]), _grid(retrieval)),
        _where_weight_goes(records),
        attention.example_section(run_dir / "attention.json"),
        markup.section(
            "Language",
            markup.paragraph(TASKS["language"]),
            _grid([*_training_curves("language", runs)]),
            _samples(run_dir / "samples.json"),
        ),
        _lambdas(run_dir, runs),
        all_numbers(results) if results else "",
    ]


def _grid(drawn: Sequence[str]) -> str:
    return markup.grid(*drawn) if drawn else markup.note("There is no metrics.jsonl: no curves to draw.")


def _results(results: ResultsFile | None) -> str:
    if results is None:
        return markup.section("Results", markup.note("results.json is missing: the demo has not come to its end."))
    one_seed = len({record.seed for record in results.records} - {None}) <= 1
    return markup.section(
        "Results",
        results_table(results.records, results.baselines),
        markup.paragraph(
            "↑ higher is better, ↓ lower is better. Brackets hold 95 % intervals. Where the twins' intervals overlap, "
            f"the last column says “{UNCLEAR}”. A measure taken at several depths shows the range over them."
            + (f" {LEVELS}" if results.baselines else "")
        ),
        markup.paragraph(
            "Each model was trained once, from one seed: an interval tells how well these two models were measured, "
            "not how much another seed would change them."
        )
        if one_seed
        else "",
    )


def _training_curves(task: str, runs: dict[tuple[str, str], list[dict]]) -> Iterator[str]:
    logs = {arm: metrics for (of, arm), metrics in runs.items() if of == task}

    def lines(key: str, suffix: str = "") -> list[Series]:
        label = {arm: arm_label(arm) + suffix for arm in logs}
        found = [curves.series(logs[arm], key, label[arm], ARM_COLOURS[arm], ARM_MARKERS[arm]) for arm in logs]
        return [line for line in found if line is not None]

    loss, checks = lines("loss"), lines("validation/loss", ", validation")
    if loss or checks:
        faint = any(len(line.x) > figures.MANY for line in loss)
        yield markup.figure(
            figures.curves(loss, checks=checks, title="Loss", ylabel="loss (nats per predicted token)"),
            f"Loss of the {task} task over training: {curves.in_words([*loss, *checks])}.",
            "Training loss: faint as logged, bold its running mean." if faint else "Training loss as logged.",
        )
    for key in curves.validation_keys(list(logs.values())):
        name = key.removeprefix("validation/").replace("_", " ")
        found = lines(key)
        # One evaluation, at the end, is no curve: the table has it.
        if key != "validation/loss" and any(len(line.x) > 1 for line in found):
            yield markup.figure(
                figures.curves([], checks=found, title=f"Validation: {name}", ylabel=name),
                f"{name} of the {task} task over training: {curves.in_words(found)}.",
            )


def _depth_figure(
    records: Sequence[Result], name: str, title: str, baselines: Sequence[Baseline] = ()
) -> Iterator[str]:
    rows = [row for row in rows_of(records) if row.name == name and row.group is not None]
    if not rows:
        return
    groups = list(dict.fromkeys(str(row.group) for row in rows))
    series, said = [], []
    for arm in arms_of([result for row in rows for result in row.cells.values()]):
        results = {str(row.group): row.cells[arm] for row in rows if arm in row.cells}
        series.append(
            Series(
                arm_label(arm),
                [groups.index(group) for group in results],
                [result.value for result in results.values()],
                colour=ARM_COLOURS.get(arm),
                marker=ARM_MARKERS.get(arm, "D"),
                intervals=[result.interval for result in results.values()],
            )
        )
        values = ", ".join(f"{group}: {result.value:.3g}" for group, result in results.items())
        said.append(f"{arm_label(arm)} {values}")
    # The same at every depth.
    baseline = next((one for one in baselines if one.name == name), None)
    levels: dict[str, float] = {}
    if baseline is not None:
        levels = {"chance": baseline.chance, "floor": baseline.floor}
        if baseline.by_elimination is not None:
            levels["by elimination"] = baseline.by_elimination
        said.append(levels_text(baseline))
    yield markup.figure(
        figures.by_group(series, groups, levels, title=title, xlabel="depth of the answer in the context"),
        f"{title} by depth of the answer: {'; '.join(said)}.",
        _bars(rows),
    )


def _bars(rows: Sequence[Row]) -> str:
    results = [result for row in rows for result in row.cells.values() if result.interval is not None]
    methods = "; ".join(dict.fromkeys(result.method for result in results if result.method))
    return f"Bars: 95 % intervals{', ' if methods else ''}{methods}." if results else ""


def _where_weight_goes(records: Sequence[Result]) -> str:
    heading = "Where attention goes"
    drawn = [text for name, title in ATTENTION_MEASURES.items() for text in _depth_figure(records, name, title)]
    if not drawn:
        return markup.section(heading, markup.note("The results hold no measures of attention by depth."))
    return markup.section(
        heading,
        markup.paragraph("The paper's Table 3, averaged over all heads and layers of each model."),
        markup.definitions(attention.DEFINITIONS),
        markup.grid(*drawn),
    )


def _samples(path: Path) -> str:
    if not path.is_file():
        return markup.note("samples.json is missing: there is no text to show.")
    samples = read_samples(path)
    written = [
        markup.continued(arm_label(arm), samples.prompt, text.removeprefix(samples.prompt))
        for arm, text in (("diff", samples.diff), ("softmax", samples.softmax))
    ]
    return markup.heading("How each goes on from the same prompt (bold)") + markup.grid(*written)


def _lambdas(run_dir: Path, runs: dict[tuple[str, str], list[dict]]) -> str:
    drawn = []
    for (task, arm), metrics in runs.items():
        initial = curves.initial_lambdas(run_dir / f"{task}-{arm}")
        drawn += curves.lambda_figure(metrics, initial, title=f"λ, {task}")
    return markup.section(
        "How much of the second map is subtracted",
        markup.paragraph(
            "λ says how much of A2 is taken from A1. It is learned, one for each layer, and starts near a constant "
            "λ_init, which by default grows from the first layer to the last."
        ),
        markup.grid(*drawn) if drawn else markup.note("No run has logged λ."),
    )
