"""Reads the cells of a report's table."""

from markdown_it import MarkdownIt

from diff_lab.report.documents import Table


def column(table: Table, name: str) -> list[str]:
    """The texts of a column, without headings between rows."""
    index = table.head.index(name)
    return [row[index] for row in table.rows if len(row) > 1]


def tables(text: str) -> list[list[list[str]]]:
    """All tables of a Markdown text, each with its head, as somebody else's reader of Markdown sees them."""
    parsed: list[list[list[str]]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            parsed.append([])
        elif token.type == "tr_open":
            parsed[-1].append([])
        elif token.type == "inline" and token.level >= 4 and parsed:
            parsed[-1][-1].append("".join(part.content for part in token.children or ()))
    return parsed
