"""Reads what experiments found, and says it by one rule, whichever variant is ahead."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diff_lab.learning import judge
from diff_lab.record import OWN, Comparison, ResultsFile
from diff_lab.report import wording
from diff_lab.results_files import read_results
from diff_lab.statistics import holm, p_value
from diff_transformer.utils.files import read_json

_KINDS = {"table": "Table", "fig": "Figure", "appendix": "Appendix"}
# The kind and the number of what the paper has, in an experiment's name.
_IN_PAPER = re.compile(rf"({'|'.join(_KINDS)})_?(\d+|[a-z])")


@dataclass(frozen=True)
class ExperimentResults:
    """The results of an experiment with one preset and one text. `says_standard` has the title say that the text is
    Python's standard library, if the user named none.
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
        """The paper's name, "Table 6", or the experiment's own; with a text of the user's, "Language on novels"."""
        if match := _IN_PAPER.fullmatch(self.name):
            title = f"{_KINDS[match[1]]} {match[2].upper()}"
        else:
            first, *others = self.name.split("_")
            title = " ".join([first.upper() if len(first) <= 2 else first.capitalize(), *others])
        text = self.text or "Python code" * self.says_standard
        return f"{title} on {text}" if text else title

    @property
    def is_own(self) -> bool:
        """Whether a recipe of the user's was compared."""
        return self.preset == OWN

    @property
    def heading(self) -> str:
        """The title with the preset, of which a recipe of the user's has one alone."""
        return self.title if self.is_own else f"{self.title}, preset {self.preset}"

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
    """Reduce a text to lower-case letters, of any alphabet, digits and hyphens."""
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
        complete: completes the results of one file by the definition of its experiment, for files of earlier versions.
            By default a file stands for itself.

    Returns:
        The results in the order of a report. If those of an experiment are of several texts, their titles say which.

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
    kinds = [(results.name, str(results.file.settings["request"].get("recipe"))) for results in all_results]
    on_texts = {kind for kind, results in zip(kinds, all_results, strict=True) if results.text}
    told = [replace(results, says_standard=kind in on_texts) for kind, results in zip(kinds, all_results, strict=True)]
    return sorted(told, key=_order)


def name_in_report(results: ExperimentResults, all_results: Sequence[ExperimentResults]) -> str:
    """Return the title, with the preset if other results of the report have the same title."""
    return results.heading if sum(one.title == results.title for one in all_results) > 1 else results.title


def _experiment_files(path: Path) -> Iterator[Path]:
    """Yield the file, or the files in a folder, whose settings say which experiment was requested."""
    for file in [path] if path.is_file() else sorted([*path.glob("*.json"), *path.glob("*/*.json")]):
        content = read_json(file)
        for key in ("settings", "request"):
            content = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, dict) and all(isinstance(content.get(key), str) for key in ("experiment", "preset")):
            yield file


def _order(results: ExperimentResults) -> tuple[int, int, str, str, str]:
    """Return the key of the order: tables, figures, appendices, and then results beyond the paper; each by number."""
    match = _IN_PAPER.fullmatch(results.name)
    rank, number = (list(_KINDS).index(match[1]), match[2]) if match else (len(_KINDS), results.name)
    return rank, int(number) if number.isdigit() else 0, number, results.preset, results.text


LEVEL = 0.05  # of a test


@dataclass(frozen=True)
class Finding:
    """The comparison that an experiment is about, with the experiment's name in the report."""

    results: ExperimentResults
    name: str
    row: Comparison
    p: float | None  # of no difference, after Holm's correction over all findings; None where no spread is known

    @property
    def is_decided(self) -> bool:
        """Whether the interval over seeds says which variant is ahead, whichever it is."""
        low, high = self.row.interval or (math.nan, math.nan)
        return len(self.row.differences) > 1 and (low > 0 or high < 0)

    @property
    def claim(self) -> str:
        """What the experiment claims, in words."""
        headline, row = self.results.file.headline, self.row
        if headline is not None and headline.claim and headline.names(row):
            return headline.claim
        part = f", {row.coordinates.label}" if row.coordinates else ""
        number = f"a {row.better or 'different'} {wording.measure_words(row.name)}{part}"
        return f"{wording.variant_label(row.variant)} has {number} than {wording.with_article(row.against)}"

    @property
    def values(self) -> str:
        """Both values, the first variant's first."""
        return f"{' against '.join(map(wording.format_number, self.row.ours))} {self.row.unit}".strip()

    @property
    def sentence(self) -> str:
        """The claim, both values, their difference, and what limits it."""
        seeds = f"{len(self.row.differences)} seeds" if len(self.row.differences) > 1 else ""
        limits = "; ".join(filter(None, (seeds, wording.remarks(self.row))))
        return f"{self.claim}: {self.values}, {wording.format_difference(self.row)} ({limits})."


def findings(all_results: Sequence[ExperimentResults]) -> list[Finding]:
    """Find the comparison that each experiment names as what it is about, the decided ones first, by their p."""
    named = [results for results in all_results if results.file.headline is not None]
    rows = [(results, row) for results in named if (row := results.headline) is not None]
    all_p = [p_value(row) for _, row in rows]
    corrected = iter(holm([p for p in all_p if p is not None]))
    found = [
        Finding(results, name_in_report(results, all_results), row, None if p is None else next(corrected))
        for (results, row), p in zip(rows, all_p, strict=True)
    ]
    return sorted(found, key=lambda one: (not one.is_decided, one.p or 0.0 if one.is_decided else 0.0))


def certainty(all_results: Sequence[ExperimentResults], found: Sequence[Finding]) -> str:
    """How large the models are, how many seeds the findings have, and what is left of them after the correction."""
    sizes = [variant["parameters"] for results in all_results for variant in results.variants]
    seeds = [len(one.row.differences) for one in found if one.row.differences]
    if not sizes or not seeds:
        return ""
    tested = [one.p for one in found if one.p is not None]
    left = sum(p < LEVEL for p in tested)
    corrected = f" After Holm's correction for these {len(tested)}, p is below {LEVEL} for {left}." if tested else ""
    return (
        f"The models have {_range(sizes)} parameters and the comparisons {_range(seeds)} seeds, so they say nothing of "
        f"large models.{corrected}"
    )


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,} to {most:,}" if least != most else f"{least:,}"
