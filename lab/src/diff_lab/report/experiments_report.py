"""Writes the report of experiments: RESULTS.md with its figures beside it, and the same as one self-contained page."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diff_lab.record import ResultsFile
from diff_lab.report import experiment_tables, learning_tables, wording
from diff_lab.report.coordinate_figures import line_figures
from diff_lab.report.documents import HTML_MARK, MARKDOWN_MARK, fill_markdown, fill_page, is_marked, refuse_others
from diff_lab.report.figures import FIGURE_MARK, svg_file
from diff_lab.report.forest_figures import forest_figures, overview_figure
from diff_lab.report.learning_figures import learning_figures
from diff_lab.report.summary import certainty, summary
from diff_lab.results_files import write_text
from diff_lab.verdicts import judge

FIGURES = "figures"
DOCUMENT = "RESULTS.md"
_FEW = 3  # experiments, each of which the opening of a report says a sentence of
# Pixels: two figures stand side by side where a code host shows the document.
_HALF_WIDTH = 410


def build_results_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    complete: Callable[[ResultsFile], ResultsFile] = judge,
) -> tuple[Path, ...]:
    """Write the report of experiments from their results files, or the folders that hold them.

    `output` is the Markdown document, by default RESULTS.md in the folder that holds all of the files. The page lies
    beside it with the ending .html, figures in the folder "figures" beside it; a path that ends in .html is the page,
    which is then written alone. Returns the document, if there is one, and the page.

    Earlier ones are replaced, and figures of an earlier report that are not in this one removed; any other file is left
    alone. Raises as `read_experiments` and `refuse_others` do, and FileNotFoundError without a folder for `output`.
    """
    all_results = experiment_tables.read_experiments([Path(path) for path in paths], complete)
    document = _document_path(paths, output)
    page = document.with_suffix(".html")
    if document != page:
        refuse_others(document, MARKDOWN_MARK)
    refuse_others(page, HTML_MARK)
    overview = overview_figure(all_results)
    has_experiments = not all(results.is_own for results in all_results)
    sections: list[dict[str, Any]] = []
    for results in all_results:
        name = experiment_tables.name_in_report(results, all_results)
        wide, narrow = list(forest_figures(results, name)), list(line_figures(results, name))
        learning = list(learning_figures(results, name))
        sections.append({"results": results, "wide": wide, "narrow": narrow, "learning": learning})
    values = {
        "title": "Results beside the paper's" if has_experiments else "Variants of a recipe side by side",
        "has_experiments": has_experiments,
        "findings": summary(all_results),
        # The opening of a report of many experiments is half a page: what is decided, and the names of the rest.
        "is_brief": len(all_results) > _FEW,
        "certainty": certainty(all_results),
        "wording": wording,
        "tables": experiment_tables,
        "learning": learning_tables,
        "overview": overview,
        "verdicts": experiment_tables.overview(all_results),
        "sections": sections,
    }
    if document == page:
        return (write_text(page, fill_page("results.html", **values)),)
    kinds = ("learning", "wide", "narrow")
    figures = [overview, *(figure for section in sections for kind in kinds for figure in section[kind])]
    folder = document.parent / FIGURES
    files = {folder / f"{figure.name}.svg": figure for figure in figures}
    for path in files:
        refuse_others(path, FIGURE_MARK)
    folder.mkdir(exist_ok=True)
    for path, figure in files.items():
        write_text(path, svg_file(figure.svg, figure.alt, width=None if figure.wide else _HALF_WIDTH))
    for path in filter(_is_figure, set(folder.glob("*.svg")) - files.keys()):
        path.unlink()
    write_text(page, fill_page("results.html", **values))
    write_text(document, fill_markdown("results.md", **values, page=page.name, folder=FIGURES))
    return document, page


def results_report_files(paths: Sequence[str | Path], output: str | Path | None = None) -> list[Path]:
    """The files of an earlier report that `build_results_report` would replace or remove."""
    document = _document_path(paths, output)
    if document.suffix == ".html":
        return [document] if document.exists() else []
    figures = sorted((document.parent / FIGURES).glob("*.svg"))
    return [*filter(Path.exists, (document, document.with_suffix(".html"))), *filter(_is_figure, figures)]


def _document_path(paths: Sequence[str | Path], output: str | Path | None) -> Path:
    if output is None:
        folders = [path if path.is_dir() else path.parent for path in map(Path, paths)]
        shared = folders[0] if len(folders) == 1 else Path(os.path.commonpath([folder.resolve() for folder in folders]))
        document = shared / DOCUMENT
    else:
        document = Path(output)
    if document.suffix not in (".md", ".html"):
        raise ValueError(
            f"the report of experiments is a Markdown document or a page, so {str(document)!r} must end in .md or .html"
        )
    if not document.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(document)!r} does not exist")
    return document


def _is_figure(path: Path) -> bool:
    """Whether a file is a figure of an earlier report."""
    return is_marked(path, FIGURE_MARK)
