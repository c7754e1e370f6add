"""The table that a run ends with in the terminal."""

from rich.table import Table
from rich.text import Text

from diff_transformer.report.rows import UNCLEAR, arm_label, arms_of, lines_of
from diff_transformer.results import ResultsFile

NOTE = "↑ higher is better, ↓ lower is better. [low, high]: 95 % interval"


def demo_table(results: ResultsFile) -> Table:
    """All measures, twins side by side; a measure taken in groups (depths) is one row with the range over them."""
    arms = arms_of(results.records)
    twins = len(arms) > 1
    note = f"{NOTE}; where they overlap, “{UNCLEAR}”." if twins else f"{NOTE}."
    caption = Text(f"{note}\nMeasured on {results.device}.")
    table = Table(title=Text(results.title), title_justify="left", caption=caption, caption_justify="left")
    table.add_column("measure", overflow="fold")
    for arm in arms:
        table.add_column(arm_label(arm), no_wrap=True)
    if twins:
        table.add_column("better", overflow="fold")
    section = None
    for line in lines_of(results.records):
        if line.section != section:
            table.add_section()
            table.add_row(Text(line.section, style="bold"))
            section = line.section
        cells = [Text(line.cells[arm], style="bold" if arm == line.verdict.arm else "") for arm in arms]
        table.add_row(Text(line.label), *cells, *([Text(line.verdict.text)] if twins else []))
    return table
