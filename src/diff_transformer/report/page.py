"""Reports as single files: of a demo (twins side by side) and of any training runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from diff_transformer.report import demo, markup, runs
from diff_transformer.results import write_text


def build_demo_report(run_dir: str | Path) -> Path:
    """Write `run_dir/report.html` from the result files in `run_dir`; parts that are missing leave a note.

    Raises FileNotFoundError where `run_dir` holds nothing of a demo, ValueError where a file is not what it should be.
    """
    run_dir = Path(run_dir)
    if not demo.is_demo(run_dir):
        raise FileNotFoundError(f"{run_dir} holds no demo: neither results.json nor a run such as retrieval-diff")
    return _write_page(run_dir / "report.html", markup.page(*demo.page_of(run_dir)))


def build_run_report(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write a report of training runs side by side; a demo folder alone gives the demo's report.

    Among several folders a demo's stands for the runs inside it. Without `output` the report is `report.html` in the
    folder of a single run, `comparison.html` in the nearest folder that holds all of several.
    An earlier report is replaced, any other file is not.
    Raises FileNotFoundError for a folder that is missing, ValueError for one that is not a run's, FileExistsError where
    something else than a report is in the way.
    """
    folders = [Path(run_dir) for run_dir in run_dirs]
    path = run_report_path(folders, output)
    is_demo = len(folders) == 1 and demo.is_demo(folders[0])
    content = demo.page_of(folders[0]) if is_demo else runs.page_of(_runs_in(folders))
    return _write_page(path, markup.page(*content))


def run_report_path(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """The file that `build_run_report` writes. Raises as it does where a folder is none of a run, or missing."""
    folders = [Path(run_dir) for run_dir in run_dirs]
    if not folders:
        raise ValueError("a report needs at least one run folder")
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"the folder of {output} does not exist")
    is_demo = len(folders) == 1 and demo.is_demo(folders[0])
    found = folders if is_demo else _runs_in(folders)
    if output is not None:
        return Path(output)
    shared = Path(os.path.commonpath([run.resolve().parent for run in found]))
    return found[0] / "report.html" if len(found) == 1 else shared / "comparison.html"


def _runs_in(folders: Sequence[Path]) -> list[Path]:
    """The runs in folders; one that is named twice, be it by two paths, once."""
    return list({run.resolve(): run for folder in folders for run in runs.runs_in(folder)}.values())


def _write_page(path: Path, text: str) -> Path:
    if path.is_dir():
        raise FileExistsError(
            f"{str(path)!r} is a folder; a report is a file in one, such as {str(path / 'report.html')!r}"
        )
    if path.exists() and markup.GENERATOR not in path.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{str(path)!r} exists and is not a report of ours, so it is left as it is")
    return write_text(path, text)
