"""Reads what experiments found: results files with the titles, links and order that a report gives them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diff_lab.record import OWN, Comparison, ResultsFile
from diff_lab.results_files import read_results
from diff_lab.verdicts import judge
from diff_transformer.utils.files import read_json

_KINDS = {"table": "Table", "fig": "Figure", "appendix": "Appendix"}
# The kind and the number of what the paper has, in an experiment's name.
_IN_PAPER = re.compile(rf"({'|'.join(_KINDS)})_?(\d+|[a-z])")


@dataclass(frozen=True)
class ExperimentResults:
    """What an experiment found with one preset and one text: everything that was measured, compared and noted.

    `says_standard` has the title say that the text is Python's standard library, where the user named none.
    """

    name: str
    preset: str
    file: ResultsFile
    says_standard: bool = False

    @property
    def anchor(self) -> str:
        """A name for links and files, the only one of a report."""
        return slug(f"{self.name}-{self.preset}-{self.text}")

    @property
    def text(self) -> str:
        """The files and folders of text that the user named in place of the standard library's source, if any."""
        request = self.file.settings.get("request", {})
        return ", ".join(Path(path).name for path in request.get("text") or ())

    @property
    def title(self) -> str:
        """As the paper calls it: "Table 6"; where it has no such thing, the experiment's own name. With a text of the
        user's: "Language on novels"; beside such results, "Language on Python code".
        """
        if match := _IN_PAPER.fullmatch(self.name):
            title = f"{_KINDS[match[1]]} {match[2].upper()}"
        else:
            first, *others = self.name.split("_")
            title = " ".join([first.upper() if len(first) <= 2 else first.capitalize(), *others])
        text = self.text or "Python code" * self.says_standard
        return f"{title} on {text}" if text else title

    @property
    def is_own(self) -> bool:
        """Whether a recipe of the user's was compared, and not an experiment of this project carried out."""
        return self.preset == OWN

    @property
    def heading(self) -> str:
        """The title with the preset, of which a recipe of the user's has one alone."""
        return self.title if self.is_own else f"{self.title}, preset {self.preset}"

    @property
    def summary(self) -> str:
        """What the experiment shows, as a sentence."""
        return f"{self.file.title[:1].upper()}{self.file.title[1:]}."

    @property
    def headline(self) -> Comparison | None:
        """The first comparison with a verdict: the one that the results name, else one with the paper's numbers."""
        judged = [row for row in self.file.comparisons if row.verdict is not None]
        named = self.file.headline
        return min(judged, key=lambda row: (named is None or not named.names(row), row.paper is None), default=None)

    @property
    def variants(self) -> list[dict[str, Any]]:
        """The trained variants; empty for an experiment that trains nothing."""
        return list(self.file.settings.get("variants", []))


def slug(text: str) -> str:
    """Lower-case letters, of any alphabet, digits and hyphens."""
    return re.sub(r"[^\w.]+|_+", "-", text.lower()).strip("-")


def holds_experiments(path: Path) -> bool:
    """Tell whether `path` is a results file of an experiment or a folder with some, and not of a run or a demo."""
    is_run = (path / "metrics.jsonl").is_file() or (path / "results.json").is_file()
    return not is_run and any(True for _ in _experiment_files(path))


def read_experiments(
    paths: Sequence[Path], complete: Callable[[ResultsFile], ResultsFile] = judge
) -> list[ExperimentResults]:
    """Read the results in files, and in the folders that hold them directly or one level deeper.

    Args:
        paths: files and folders.
        complete: adds what the definition of its experiment says of the results of one file, which files of earlier
            versions lack. By default only what the file says itself is used.

    Returns:
        The results in the order of a report. Where those of an experiment are of several texts, their titles say which.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a path has no results, a file is broken, or two hold one experiment, preset and text.
    """
    files: dict[Path, ResultsFile] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{str(path)!r} does not exist")
        inside = list(_experiment_files(path))
        if not inside:
            raise ValueError(
                f"{str(path)!r} holds no results of an experiment, as `diff-lab reproduce` and `diff-lab compare` leave"
            )
        files.update({file.resolve(): read_results(file) for file in inside})
    read: dict[str, Path] = {}
    all_results = []
    for path, file in files.items():
        request = file.settings["request"]
        results = ExperimentResults(request["experiment"], request["preset"], complete(file))
        other = read.setdefault(results.anchor, path)
        if other != path:
            on_text = f" on {results.text}" if results.text else ""
            raise ValueError(
                f"{str(other)!r} and {str(path)!r} are both results of {results.name!r} with the preset "
                f"{results.preset!r}{on_text}; give one of them."
            )
        all_results.append(results)
    on_texts = {results.name for results in all_results if results.text}
    told = [replace(results, says_standard=results.name in on_texts) for results in all_results]
    return sorted(told, key=_order)


def name_in_report(results: ExperimentResults, all_results: Sequence[ExperimentResults]) -> str:
    """The title, with the preset where other results of the report have the same title."""
    return results.heading if sum(one.title == results.title for one in all_results) > 1 else results.title


def _experiment_files(path: Path) -> Iterator[Path]:
    """The file, or the files in a folder, whose settings say which experiment was requested."""
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*/*.json")]):
        content = read_json(file)
        for key in ("settings", "request"):
            content = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, dict) and all(isinstance(content.get(key), str) for key in ("experiment", "preset")):
            yield file


def _order(results: ExperimentResults) -> tuple[int, int, str, str, str]:
    """Tables, figures, appendices, and then what is beyond the paper; each by number."""
    match = _IN_PAPER.fullmatch(results.name)
    rank, number = (list(_KINDS).index(match[1]), match[2]) if match else (len(_KINDS), results.name)
    return rank, int(number) if number.isdigit() else 0, number, results.preset, results.text
