"""The pieces of a page: text, tables, figures and the frame around them. Everything that is not markup is escaped."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.figure import Figure

from diff_transformer.report.figures import DARK, LIGHT, svg

_STYLE = f"""
:root {{ color-scheme: light dark; --panel: #f4f6f8; {LIGHT}}}
@media (prefers-color-scheme: dark) {{ :root {{ --panel: #1d2229; {DARK}}} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; overflow-wrap: break-word; }}
h1 {{ font-size: 1.7rem; line-height: 1.2; margin: 0 0 .5rem; }}
h2 {{ font-size: 1.25rem; margin: 2.75rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; margin: 1.5rem 0 .25rem; }}
p {{ max-width: 46rem; margin: .5rem 0; }}
.small, figcaption, .note {{ color: var(--muted); font-size: .875rem; }}
.note {{ border-left: 3px solid var(--rule); padding-left: .75rem; }}
code, pre {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .875em; }}
pre {{ background: var(--panel); padding: .75rem; border-radius: 6px; white-space: pre-wrap; margin: .25rem 0; }}
p.small code {{ font-size: 1em; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; margin: .75rem 0; }}
th, td {{ text-align: left; padding: .3rem 1.1rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }}
td.number {{ white-space: nowrap; }}
td.words {{ min-width: 9rem; }}
.dense table {{ font-size: .8125rem; line-height: 1.4; }}
.dense th, .dense td {{ padding-right: .5rem; }}
.dense tbody th {{ min-width: 8.5rem; overflow-wrap: anywhere; }}
th {{ font-weight: 600; }}
tbody th {{ font-weight: 400; min-width: 9rem; }}
tr.section th {{ font-weight: 600; padding-top: 1rem; }}
td.better {{ font-weight: 600; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 1rem 1.75rem; }}
.grid > * {{ min-width: 0; max-width: 31rem; }}
figure {{ margin: .75rem 0; }}
figure.wide {{ max-width: 34rem; }}
a {{ color: inherit; }}
svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: inherit !important; }}
summary {{ cursor: pointer; margin: .75rem 0; }}
@media (max-width: 40rem) {{
  thead {{ display: none; }}
  table, tbody, tr, tbody th, td {{ display: block; }}
  tbody tr {{ border-bottom: 1px solid var(--rule); padding: .5rem 0; }}
  tbody th, td, .dense tbody th, .dense td {{ border: 0; padding: .1rem 0; min-width: 0; }}
  tbody th {{ font-weight: 600; }}
  td, td.number {{ white-space: normal; display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; }}
  td::before {{ content: attr(data-head); color: var(--muted); }}
}}
@media print {{ body {{ max-width: none; }} .scroll {{ overflow: visible; }} .dense table {{ font-size: .65rem; }}
  figure, tr {{ break-inside: avoid; }} }}
dt {{ font-weight: 600; }}
dd {{ margin: 0 0 .5rem; max-width: 46rem; }}
"""


# Tells a report of ours from somebody's file of the same name.
GENERATOR = '<meta name="generator" content="diff-transformer">'


def page(title: str, sections: Iterable[str]) -> str:
    """A whole page. Its policy forbids scripts and every load, so that no text in a results file can cause one."""
    body = _with_own_ids("".join(sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
{body}</body>
</html>
"""


def _with_own_ids(body: str) -> str:
    """The page with ids in its figures that no other figure has: figures drawn alike name their parts alike."""
    numbers = itertools.count(1)

    def renamed(drawing: re.Match[str]) -> str:
        prefix = f"figure{next(numbers)}-"
        return re.sub(r'( id="| href="#|url\(#)', lambda found: found[1] + prefix, drawing[0])

    return re.sub(r"<svg .*?</svg>", renamed, body, flags=re.DOTALL)


def section(heading: str, *parts: str, anchor: str | None = None) -> str:
    """A part of the page; `anchor` is a name for links to it, the only one of the page."""
    named = "" if anchor is None else f' id="{escape(anchor)}"'
    return f"<section{named}>\n<h2>{escape(heading)}</h2>\n{''.join(parts)}</section>\n"


def header(title: str, *parts: str) -> str:
    return f"<header>\n<h1>{escape(title)}</h1>\n{''.join(parts)}</header>\n"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>\n"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>\n"


def small(text: str) -> str:
    """A sentence in small print; nothing where there is none."""
    return f'<p class="small">{escape(text)}</p>\n' if text else ""


def strong(text: str) -> str:
    return f"<p><strong>{escape(text)}</strong></p>\n"


def links(sections: Iterable[tuple[str, str]]) -> str:
    """Links to sections of the page: what each says, and its anchor."""
    named = (f'<a href="#{escape(anchor)}">{escape(text)}</a>' for text, anchor in sections)
    return f"<p>{' · '.join(named)}</p>\n"


def note(text: str) -> str:
    """Says what a page could not show."""
    return f'<p class="note">{escape(text)}</p>\n'


def code_block(text: str) -> str:
    return f"<pre>{escape(text)}</pre>\n"


def continued(title: str, prompt: str, text: str) -> str:
    """A titled sample of text: the prompt in bold, and how it goes on."""
    return f"<div>\n<h3>{escape(title)}</h3>\n<pre><b>{escape(prompt)}</b>{escape(text)}</pre>\n</div>\n"


def details(summary: str, *parts: str) -> str:
    """Folded until asked for."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{''.join(parts)}</details>\n"


def grid(*parts: str) -> str:
    """Parts side by side where the screen is wide enough, else below each other."""
    return f'<div class="grid">\n{"".join(parts)}</div>\n'


def figure(drawing: Figure, alt: str, caption: str = "") -> str:
    """A drawing with what it shows in words (`alt`), for those who do not see it."""
    return framed(svg(drawing), alt, caption)


def framed(drawn: str, alt: str, caption: str = "", *, wide: bool = False) -> str:
    """An <svg> element as `figure` sets it; a `wide` one stands alone."""
    below = f"<figcaption>{escape(caption)}</figcaption>\n" if caption else ""
    opening = '<figure class="wide">' if wide else "<figure>"
    return f'{opening}\n<div role="img" aria-label="{escape(alt)}">{drawn}</div>\n{below}</figure>\n'


def command_line(command: str, *remarks: str) -> str:
    """What was run, and what there is to say of it, in small print."""
    return f'<p class="small"><code>{escape(command)}</code><br>{escape(" · ".join(remarks))}</p>\n'


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>\n" + "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>\n" for term, text in pairs) + "</dl>\n"


@dataclass(frozen=True)
class Row:
    """A row of a table, see `row` and `section_row`."""

    head: str
    cells: tuple[str, ...] = ()
    better: tuple[bool, ...] = ()
    longest: int | None = None
    columns: int | None = None

    def html(self, heads: Sequence[str]) -> str:
        """The row under these heads of columns; its cells name theirs for a screen that shows them below each other."""
        if self.columns is not None:
            span = f'scope="colgroup" colspan="{self.columns}"'
            return f'<tr class="section"><th {span}>{escape(self.head)}</th></tr>\n'
        filled = "".join(
            f'<td data-head="{escape(head)}" class="{self._kind(cell)}{" better" if mark else ""}">{escape(cell)}</td>'
            for head, cell, mark in zip(heads[1:], self.cells, self.better, strict=True)
        )
        return f'<tr><th scope="row">{escape(self.head)}</th>{filled}</tr>\n'

    def _kind(self, cell: str) -> str:
        return "words" if self.longest and len(cell) > self.longest else "number"


def table(head: Sequence[str], rows: Iterable[Row], *, dense: bool = False) -> str:
    """A table; where the screen is narrow, the cells of a row stand below each other, each with its column's head.

    A `dense` one is for many columns: smaller, with less between them.
    """
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    inner = f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(row.html(head) for row in rows)}</tbody>"
    return f'<div class="scroll{" dense" if dense else ""}"><table>\n{inner}</table></div>\n'


def section_row(text: str, columns: int) -> Row:
    """A heading over the rows below it."""
    return Row(text, columns=columns)


def row(head: str, cells: Sequence[str], better: Sequence[bool] = (), longest: int | None = None) -> Row:
    """A row: its head, then its cells; those that `better` marks are set in semibold, whoever's they are.

    A cell is one line, unless it has more than `longest` characters.
    """
    return Row(head, tuple(cells), tuple(better or [False] * len(cells)), longest)
