"""What the reports of demos and of single runs have in common: the table of results and where they come from."""

import json
from collections.abc import Sequence

from diff_transformer.report import markup
from diff_transformer.report.rows import arm_label, arms_of, format_result, lines_of, rows_of
from diff_transformer.results import Baseline, Result, ResultsFile


def results_table(records: Sequence[Result], baselines: Sequence[Baseline] = ()) -> str:
    """All measures, one row each, twins side by side; `baselines` are of their accuracies."""
    if not records:
        return markup.note("results.json holds no results.")
    arms = arms_of(records)
    rows: list[markup.Row] = []
    section = None
    for line in lines_of(records, baselines):
        if line.section != section:
            rows.append(markup.section_row(line.section.capitalize(), len(arms) + 2))
            section = line.section
        cells = [line.cells[arm] for arm in arms]
        rows.append(
            markup.row(line.label, [*cells, line.verdict.text], [arm == line.verdict.arm for arm in [*arms, ""]])
        )
    return markup.table(["Measure", *map(arm_label, arms), "Better"], rows)


def origin(results: ResultsFile) -> str:
    """Command, device, versions, time and commit of a results file."""
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    commit = f"commit {results.commit}" if results.commit else "not from a git checkout"
    return markup.command_line(results.command, results.device, results.created.replace("T", " "), versions, commit)


def all_numbers(results: ResultsFile) -> str:
    """Every record and the settings, folded."""
    arms = arms_of(results.records)
    rows = []
    for row in rows_of(results.records):
        verdict = row.verdict()
        any_result = next(iter(row.cells.values()))
        cells = [format_result(row.cells[arm]) if arm in row.cells else "–" for arm in arms]
        counts = ", ".join(dict.fromkeys(str(result.n) for result in row.cells.values() if result.n is not None))
        details = [row.group or "", *cells, verdict.text, counts, any_result.method]
        marks = [False, *(arm == verdict.arm for arm in arms), False, False, False]
        rows.append(markup.row(f"{row.section}: {row.label}", details, marks))
    head = ["Measure", "Depth or part", *map(arm_label, arms), "Better", "n", "Interval by"]
    settings = json.dumps(results.settings, indent=2, ensure_ascii=False)
    return markup.section(
        "All numbers",
        markup.details("Every measurement", markup.table(head, rows)),
        markup.details("Settings", markup.code_block(settings)),
    )
