"""Holds a table of text once, for its three forms: HTML, Markdown and the terminal."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Cell:
    """Text of one cell, with an optional mark: `strong` sets it in bold, `anchor` makes it a link in its document."""

    text: str
    strong: bool = False
    anchor: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns with a heading each, and rows of cells.

    Attributes:
        head: the columns' headings.
        rows: as many cells as there are columns, or a single one: a heading for the rows below it.
        title, caption: what stands above and below the table in the terminal; a page has its own headings and notes.
        right: the columns that are aligned to the right in the terminal.
        one_line: the columns whose cells are not wrapped there.

    `macros.html` has the HTML form.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    title: str = ""
    caption: str = ""
    right: tuple[str, ...] = ()
    one_line: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert all(len(row) in (1, len(self.head)) for row in self.rows)

    @classmethod
    def of_rows(cls, head: Sequence[str], rows: Sequence[Sequence[str | Cell]], **more: Any) -> "Table":
        """A table from rows of text or cells; `more` are the other attributes."""
        cells = tuple(tuple(Cell(cell) if isinstance(cell, str) else cell for cell in row) for row in rows)
        return cls(head=tuple(head), rows=cells, **more)

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[str | Cell]], **more: Any) -> "Table":
        """A table from columns by heading, each with a text or cell for every row."""
        return cls.of_rows(tuple(columns), list(zip(*columns.values(), strict=True)), **more)

    def column(self, name: str) -> list[str]:
        """The texts of a column, without headings between rows."""
        place = self.head.index(name)
        return [row[place].text for row in self.rows if len(row) > 1]

    def markdown(self) -> str:
        """The table for a Markdown document, everything in it escaped."""
        rows = [[*map(_markdown_cell, row), *[""] * (len(self.head) - len(row))] for row in self.rows]
        lines = [[escape_markdown(cell) for cell in self.head], ["---"] * len(self.head), *rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def __rich__(self) -> "RichTable":
        """The table for a terminal, as rich prints it."""
        from rich.table import Table as RichTable
        from rich.text import Text

        caption = Text(self.caption) if self.caption else None
        table = RichTable(title=Text(self.title), title_justify="left", caption=caption, caption_justify="left")
        for name in self.head:
            whole = name in self.one_line
            table.add_column(
                Text(name), no_wrap=whole, overflow="fold", justify="right" if name in self.right else "left"
            )
        for row in self.rows:
            if len(row) == 1:
                table.add_section()
            table.add_row(*(Text(cell.text, style="bold" if cell.strong or len(row) == 1 else "") for cell in row))
        return table


def escape_markdown(text: str) -> str:
    """Text that means nothing to Markdown or HTML, on one line."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]<>|#~$])", r"\\\1", flat.replace("&", "&amp;"))


def markdown_code(text: str) -> str:
    """Text as it is typed, between more backticks than it holds."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    flat = " ".join(text.split())
    return f"{fence} {flat} {fence}" if "`" in flat else f"{fence}{flat}{fence}"


def _markdown_cell(cell: Cell) -> str:
    text = escape_markdown(cell.text)
    text = f"**{text}**" if cell.strong else text
    return f"[{text}](#{cell.anchor})" if cell.anchor else text
