"""Reads the cells of a report's table."""

from diff_lab.report.documents import Table


def column(table: Table, name: str) -> list[str]:
    """The texts of a column, without headings between rows."""
    index = table.head.index(name)
    return [row[index] for row in table.rows if len(row) > 1]
