"""Writes what was measured into pages of the repository."""

from collections.abc import Mapping
from pathlib import Path

from diff_lab.results_files import write_text


def replace_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Write each text between ``<!-- name -->`` and ``<!-- /name -->`` of a Markdown file, in place of the old one."""
    text = path.read_text(encoding="utf-8")
    for name, content in sections.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{path} must hold {start.strip()} … {end} once.")
        before, _, behind = text.partition(start)
        text = f"{before}{start}{content}\n{end}{behind.partition(end)[2]}"
    write_text(path, text)
