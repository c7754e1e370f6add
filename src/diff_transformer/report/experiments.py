"""The report of experiments: RESULTS.md with its figures beside it, and the same as one self-contained page."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diff_transformer.report import markdown, markup
from diff_transformer.report.experiment_figures import Drawn, figures_of, overview_figure
from diff_transformer.report.experiment_files import ExperimentResults, read_experiments
from diff_transformer.report.experiment_tables import (
    CHANGED,
    READING,
    RULE,
    Table,
    arm_table,
    comparison_table,
    interval_methods,
    overview,
    tallies,
    unknown,
    verdict_counts,
)
from diff_transformer.report.head_counts import few_heads
from diff_transformer.report.shared import origin
from diff_transformer.report.svg_files import GENERATOR, svg_file
from diff_transformer.report.verdicts import LEVELS
from diff_transformer.results import ResultsFile, judge, write_text

TITLE = "Results beside the paper's"
ABOUT = (
    "Every experiment that was run is here with all of its comparisons, in the order in which they were made, whatever "
    "came out. The models are far smaller than the paper's, so values differ; what is compared is on which side of "
    "each other the arms come out."
)
FIGURES = "figures"
DOCUMENT = "RESULTS.md"
# Pixels: two figures stand side by side where a code host shows the document.
_HALF = 410
# Longer cells of the page's tables take several lines.
_LONGEST = 26


@dataclass(frozen=True)
class _Section:
    """An experiment, ready to be set."""

    results: ExperimentResults
    figures: list[Drawn]
    comparisons: Table | None
    arms: Table | None


def build_results_report(
    paths: Sequence[str | Path],
    output: str | Path | None = None,
    complete: Callable[[ResultsFile], ResultsFile] = judge,
) -> tuple[Path, Path]:
    """Write the report of experiments from their results files, or the folders that hold them.

    Args:
        paths: files as `diff-transformer reproduce` writes them, or folders with such.
        output: the Markdown document; by default RESULTS.md in the folder that holds all of the files. The page lies
            beside it with the ending .html, figures in the folder "figures" beside it.
        complete: as `read_experiments` takes it.

    Returns:
        The document and the page. Earlier ones are replaced, and figures of an earlier report that are not in this one
        removed; any other file is left alone.

    Raises:
        FileNotFoundError, ValueError: as `read_experiments`; or no folder for `output`.
        FileExistsError: something else than a report is in the way.
    """
    given = [Path(path) for path in paths]
    all_results = read_experiments(given, complete)
    document = _document_path(given, output)
    page = document.with_suffix(".html")
    _refuse_others(document, markdown.GENERATOR)
    _refuse_others(page, markup.GENERATOR)
    often = Counter(results.name for results in all_results)
    sections = [
        _Section(
            results,
            figures_of(results, results.heading if often[results.name] > 1 else results.title),
            comparison_table(results.file.comparisons, results.arms) if results.file.comparisons else None,
            arm_table(results) if results.arms else None,
        )
        for results in all_results
    ]
    summary = overview_figure(all_results)
    drawn = [summary, *(drawn for section in sections for drawn in section.figures)]
    _write_figures(document.parent / FIGURES, drawn)
    write_text(page, markup.page(TITLE, _page(sections, summary)))
    write_text(document, "\n\n".join(_document(sections, summary, page.name)) + "\n")
    return document, page


def results_report_files(paths: Sequence[str | Path], output: str | Path | None = None) -> list[Path]:
    """The files of an earlier report that `build_results_report` would replace or remove. Raises as it does where there
    is no place for the document.
    """
    document = _document_path([Path(path) for path in paths], output)
    figures = sorted((document.parent / FIGURES).glob("*.svg"))
    ours = [path for path in figures if GENERATOR in path.read_text(encoding="utf-8", errors="replace")]
    return [path for path in (document, document.with_suffix(".html")) if path.exists()] + ours


def _document_path(paths: Sequence[Path], output: str | Path | None) -> Path:
    if output is None:
        places = [path if path.is_dir() else path.parent for path in paths]
        shared = Path(os.path.commonpath([place.resolve() for place in places]))
        document = (places[0] if len(places) == 1 else shared) / DOCUMENT
    else:
        document = Path(output)
    if document.suffix != ".md":
        raise ValueError(f"the report of experiments is a Markdown document, so {str(document)!r} must end in .md")
    if not document.parent.is_dir():
        raise FileNotFoundError(f"the folder of {str(document)!r} does not exist")
    return document


def _refuse_others(path: Path, mark: str) -> None:
    if path.is_dir() or (path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace")):
        raise FileExistsError(f"{str(path)!r} exists and is not a report of ours, so it is left as it is")


def _write_figures(folder: Path, figures: Sequence[Drawn]) -> None:
    files = {folder / f"{drawn.name}.svg": drawn for drawn in figures}
    for path in files:
        _refuse_others(path, GENERATOR)
    folder.mkdir(exist_ok=True)
    for path, drawn in files.items():
        write_text(path, svg_file(drawn.svg, drawn.alt, width=None if drawn.wide else _HALF))
    for path in set(folder.glob("*.svg")) - files.keys():
        if GENERATOR in path.read_text(encoding="utf-8", errors="replace"):
            path.unlink()


def _origin(file: ResultsFile) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in file.versions.items())
    seconds = file.settings.get("seconds")
    took = [] if not isinstance(seconds, int | float) else [("Time taken", f"{seconds / 60:.1f} min")]
    return [
        ("Device", file.device),
        ("Commit", file.commit or "not from a git checkout"),
        ("Versions", versions),
        *took,
    ]


def _document(sections: Sequence[_Section], summary: Drawn, page: str) -> Iterator[str]:
    """The blocks of the Markdown document."""
    yield markdown.GENERATOR
    yield f"# {TITLE}"
    yield f"{markdown.text(ABOUT)} The same with all figures in one file: [{page}]({page})."
    for words in (RULE, LEVELS, CHANGED, READING):
        yield markdown.text(words)
    yield "## Overview"
    yield markdown.figure(f"{FIGURES}/{summary.name}.svg", summary.title)
    counted = tallies([section.results for section in sections])
    yield markdown.table(overview(counted), [tally.results.anchor for tally in counted])
    for section in sections:
        file = section.results.file
        yield f'<a id="{section.results.anchor}"></a>'
        yield f"## {markdown.text(section.results.heading)}"
        yield markdown.text(_sentence(file.title))
        yield f"**{verdict_counts(file.comparisons)}**"
        for drawn in section.figures:
            if drawn.wide:
                yield markdown.figure(f"{FIGURES}/{drawn.name}.svg", drawn.title)
        if section.comparisons is not None:
            yield markdown.table(section.comparisons)
            if methods := interval_methods(file.comparisons):
                yield markdown.text(methods)
            if reasons := unknown(file.comparisons):
                yield markdown.text(reasons)
        # Side by side where there is room: images of one paragraph.
        narrow = [
            markdown.figure(f"{FIGURES}/{drawn.name}.svg", drawn.title) for drawn in section.figures if not drawn.wide
        ]
        if narrow:
            yield "\n".join(narrow)
        captions = dict.fromkeys(drawn.caption for drawn in section.figures)
        if captions:
            yield markdown.text("Figures: " + " ".join(captions))
        if section.arms is not None:
            yield "What was trained:"
            yield markdown.table(section.arms)
            if few := few_heads(section.results.arms):
                yield markdown.text(few)
        if file.notes:
            yield "Notes:"
            yield markdown.bullets(file.notes)
        rows = [f"- {name}: {markdown.text(value)}" for name, value in _origin(file)]
        yield "\n".join([f"- Command: {markdown.code(file.command)}", *rows, f"- Date: {markdown.text(file.created)}"])


def _page(sections: Sequence[_Section], summary: Drawn) -> Iterator[str]:
    """The parts of the page: the same as the document's, in the same order."""
    yield markup.header(TITLE, *map(markup.paragraph, (ABOUT, RULE, LEVELS, CHANGED, READING)))
    names = [(section.results.heading, section.results.anchor) for section in sections]
    yield markup.section(
        "Overview",
        markup.framed(summary.svg, summary.alt, wide=True),
        _table(overview(tallies([section.results for section in sections]))),
        markup.links(names),
    )
    for section in sections:
        file = section.results.file
        wide = [
            markup.framed(drawn.svg, drawn.alt, drawn.caption, wide=True) for drawn in section.figures if drawn.wide
        ]
        narrow = [markup.framed(drawn.svg, drawn.alt, drawn.caption) for drawn in section.figures if not drawn.wide]
        yield markup.section(
            section.results.heading,
            markup.paragraph(_sentence(file.title)),
            markup.strong(verdict_counts(file.comparisons)),
            *wide,
            _table(section.comparisons) if section.comparisons is not None else "",
            markup.small(interval_methods(file.comparisons)),
            markup.small(unknown(file.comparisons)),
            markup.grid(*narrow) if narrow else "",
            *([markup.heading("What was trained"), _table(section.arms)] if section.arms is not None else []),
            markup.small(few_heads(section.results.arms)),
            *([markup.heading("Notes"), *map(markup.paragraph, file.notes)] if file.notes else []),
            origin(file),
            anchor=section.results.anchor,
        )


def _table(content: Table) -> str:
    return markup.table(
        content.head, [markup.row(row[0], row[1:], longest=_LONGEST) for row in content.rows], dense=True
    )


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + "."
