"""The tables that a demo and a measurement end with in the terminal."""

from rich.table import Table
from rich.text import Text

from diff_transformer.report.rows import UNCLEAR, arm_label, arms_of, format_number, lines_of
from diff_transformer.report.verdicts import ARROWS, LEVELS
from diff_transformer.results import Result, ResultsFile

NOTE = "↑ higher is better, ↓ lower is better. [low, high]: 95 % interval"


def demo_table(results: ResultsFile) -> Table:
    """All measures, twins side by side; a measure taken in groups (depths) is one row with the range over them."""
    arms = arms_of(results.records)
    twins = len(arms) > 1
    note = f"{NOTE}; where they overlap, “{UNCLEAR}”." if twins else f"{NOTE}."
    levels = f"\n{LEVELS}" if results.baselines else ""
    caption = Text(f"{note}{levels}\nMeasured on {results.device}.")
    table = Table(title=Text(results.title), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("measure", overflow="fold")
    for arm in arms:
        table.add_column(arm_label(arm), no_wrap=True)
    if twins:
        table.add_column("better", overflow="fold")
    section = None
    for line in lines_of(results.records, results.baselines):
        if line.section != section:
            table.add_section()
            table.add_row(Text(line.section, style="bold"))
            section = line.section
        cells = [Text(line.cells[arm], style="bold" if arm == line.verdict.arm else "") for arm in arms]
        table.add_row(Text(line.label), *cells, *([Text(line.verdict.text)] if twins else []))
    return table


def measure_table(results: ResultsFile) -> Table:
    """Every record in a row of its own: what was measured of which part, its value and interval, of how many."""
    caption = Text(f"{NOTE}.\nMeasured on {results.device}.")
    table = Table(title=Text(results.title), title_justify="left", caption=caption, caption_justify="left")
    arms = arms_of(results.records)
    value = arm_label(arms[0]) if len(arms) == 1 else "value"
    columns: dict[str, list[str]] = {
        "measure": [record.name + ARROWS[record.better] for record in results.records],
        "part": [record.group or "" for record in results.records],
        "arm": [arm_label(record.arm) for record in results.records] if len(arms) > 1 else [],
        value: [_value(record) for record in results.records],
        "unit": [record.unit for record in results.records],
        "n": ["" if record.n is None else f"{record.n:,}" for record in results.records],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        number = name in (value, "n")
        table.add_column(name, no_wrap=number, overflow="fold", justify="right" if name == "n" else "left")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*(Text(cell or "–") for cell in row))
    return table


def _value(record: Result) -> str:
    value = format_number(record.value)
    return value if record.interval is None else f"{value} [{', '.join(map(format_number, record.interval))}]"
