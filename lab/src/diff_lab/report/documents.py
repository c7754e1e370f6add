"""Holds tables of text for a terminal and for Markdown, and fills the templates of pages, documents and messages."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from rich.filesize import decimal

if TYPE_CHECKING:
    from rich.table import Table as RichTable

# What tells a report of this package from another file of the same name.
HTML_MARK = '<meta name="generator" content="diff-transformer">'
MARKDOWN_MARK = "<!-- Written by diff-lab report; it is replaced as a whole. -->"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with a heading each, and rows of texts, or of a single one: a heading for the rows below it.

    In the terminal `title` and `caption` stand above and below, `right` names columns that are aligned to the right,
    and `one_line` those whose cells are not wrapped.
    """

    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    title: str = ""
    caption: str = ""
    right: tuple[str, ...] = ()
    one_line: tuple[str, ...] = ()

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[str]], **more: Any) -> "Table":
        """Make a table from columns by heading, each with a text for every row; `more` are the other attributes."""
        return cls(head=tuple(columns), rows=list(zip(*columns.values(), strict=True)), **more)

    def markdown(self) -> str:
        """Return the table for a Markdown document, everything in it escaped."""
        rows = [[*map(escape_markdown, row), *[""] * (len(self.head) - len(row))] for row in self.rows]
        lines = [list(map(escape_markdown, self.head)), ["---"] * len(self.head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def __rich__(self) -> "RichTable":
        """Return the table for a terminal, as rich prints it."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(self.title), caption=Text(self.caption))
        table.title_justify = table.caption_justify = "left"
        for name in self.head:
            justify: Literal["left", "right"] = "right" if name in self.right else "left"
            table.add_column(Text(name), no_wrap=name in self.one_line, overflow="fold", justify=justify)
        for row in self.rows:
            if len(row) == 1:
                table.add_section()
            table.add_row(*(Text(cell, style="bold" if len(row) == 1 else "") for cell in row))
        return table


def escape_markdown(text: str) -> str:
    """Escape text so that it means nothing to Markdown or HTML, on one line."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", flat.replace("&", "&amp;"))


_ENVIRONMENT = Environment(
    loader=PackageLoader("diff_lab.report"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "md": escape_markdown,
    "thousands": "{:,.0f}".format,
    "digits": "{:.3g}".format,
    "percent": "{:.0%}".format,
    "bytes": decimal,
    "quoted": lambda path: shlex.quote(str(path)),
    "duration": lambda days: timedelta(seconds=round(days * 24 * 60 * 60)),
}
_ENVIRONMENT.globals |= {"html_mark": HTML_MARK, "markdown_mark": MARKDOWN_MARK}


def fill(template: str, **values: Any) -> str:
    """Fill a page, every value escaped, or a text, with one blank line where its template left more."""
    text = _ENVIRONMENT.get_template(template).render(values)
    return text if template.endswith(".html") else re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def refuse_others(path: Path, mark: str) -> None:
    """Raise FileExistsError if something else than a report lies at `path`: a file without the mark of one, which in
    0.2.0 had the library's name.
    """
    if path.is_dir():
        raise FileExistsError(f"{str(path)!r} is a folder; a report is a file in one, such as report.html")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else mark
    if mark not in text.replace("diff-transformer report", "diff-lab report"):
        raise FileExistsError(f"{str(path)!r} exists and is not a report of ours, so it is left as it is")
