"""Fills the templates of pages and Markdown documents, and writes them where nothing else lies."""

import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from diff_transformer.lab.report.figures import DARK, LIGHT
from diff_transformer.lab.report.table import escape_markdown, markdown_code
from diff_transformer.lab.results_files import write_text

# What tells a report of this package from another file of the same name.
HTML_MARK = '<meta name="generator" content="diff-transformer">'
MARKDOWN_MARK = "<!-- Written by diff-transformer report; it is replaced as a whole. -->"

_ENVIRONMENT = Environment(
    loader=PackageLoader("diff_transformer.lab.report"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "md": escape_markdown,
    "code": markdown_code,
    "pretty": functools.partial(json.dumps, indent=2, ensure_ascii=False),
}
_ENVIRONMENT.globals |= {"light": LIGHT, "dark": DARK, "html_mark": HTML_MARK, "markdown_mark": MARKDOWN_MARK}


def fill(template: str, **values: Any) -> str:
    """The text of a template of this package; in HTML, every value is escaped."""
    return _ENVIRONMENT.get_template(template).render(values)


def fill_page(template: str, **values: Any) -> str:
    """A page whose figures have ids of their own: figures that are drawn alike name their parts alike."""
    numbers = itertools.count(1)

    def renamed(drawing: re.Match[str]) -> str:
        prefix = f"figure{next(numbers)}-"
        return re.sub(r'( id="| href="#|url\(#)', lambda found: found[1] + prefix, drawing[0])

    return re.sub(r"<svg .*?</svg>", renamed, fill(template, **values), flags=re.DOTALL)


def fill_markdown(template: str, **values: Any) -> str:
    """A Markdown document: blocks with one blank line between them, whatever its template left out."""
    return re.sub(r"\n{3,}", "\n\n", fill(template, **values)).strip() + "\n"


def refuse_others(path: Path, mark: str) -> None:
    """Raises FileExistsError where something else than a report lies at `path`: a file without the mark of one."""
    if path.is_dir():
        inside = str(path / "report.html")
        raise FileExistsError(f"{str(path)!r} is a folder; a report is a file in one, such as {inside!r}")
    if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{str(path)!r} exists and is not a report of ours, so it is left as it is")


def write_page(path: Path, page: str) -> Path:
    """Write a page in the place of an earlier one. Raises FileExistsError as `refuse_others` does."""
    refuse_others(path, HTML_MARK)
    return write_text(path, page)
