"""Reads what experiments found, and sets it out as tables: comparisons, trained variants and counts of verdicts."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diff_lab.record import OWN, Comparison, ResultsFile, Verdict
from diff_lab.report import wording
from diff_lab.report.documents import Cell, Table
from diff_lab.results_files import number_of, read_results
from diff_lab.verdicts import judge
from diff_transformer.storage.files import read_json

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
    """Whether `path` is a results file of an experiment or a folder with some, which that of a run or a demo is not."""
    is_run = (path / "metrics.jsonl").is_file() or (path / "results.json").is_file()
    return not is_run and any(True for _ in _experiment_files(path))


def read_experiments(
    paths: Sequence[Path], complete: Callable[[ResultsFile], ResultsFile] = judge
) -> list[ExperimentResults]:
    """The results in files, and in the folders that hold them directly or one level deeper.

    Where results of an experiment are of several texts, their titles say which.
    `complete` adds to the results of one file what the definition of its experiment says of them, which files of
    earlier versions lack. By default only what the file says itself is used. Raises FileNotFoundError for a path that
    does not exist, ValueError for one without results, a broken file, or two results of one experiment, preset and
    text.
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


def count_verdicts(comparisons: Sequence[Comparison]) -> dict[bool, Counter[Verdict | None]]:
    """How often each verdict came out on the paper's claims (False) and on exploratory questions (True), if any.

    Comparisons without a claim are counted with the paper's claims, or with the questions where there are no claims.
    """
    kinds = sorted({row.exploratory for row in comparisons if row.verdict is not None} or {False})
    return {
        kind: Counter(row.verdict for row in comparisons if (row.exploratory if row.verdict else kinds[0]) == kind)
        for kind in kinds
    }


def overview(all_results: Sequence[ExperimentResults]) -> Table:
    """A row for each count of verdicts. There is no sum: comparisons are not independent of each other."""
    verdicts = [wording.verdict_words(verdict).capitalize() for verdict in wording.ANSWERS]
    head = ("Experiment", "Preset", "Claims", *verdicts, "Seeds", "What it shows", "Device")
    rows = [
        (
            Cell(results.title, anchor=results.anchor),
            results.preset,
            "open questions" if exploratory else "the paper's",
            *(str(counts[verdict]) for verdict in wording.ANSWERS),
            str(len({record.seed for record in results.file.records} - {None})),
            results.file.title,
            results.file.device,
        )
        for results in all_results
        for exploratory, counts in count_verdicts(results.file.comparisons).items()
    ]
    return Table.of_rows(head, rows)


def comparison_table(comparisons: Sequence[Comparison], trained: Sequence[Mapping[str, Any]] = ()) -> Table:
    """A row for each comparison: the paper's values, where there are any, beside ours.

    Both variants stand in the headings where all rows have the same, else in a column. `trained` says what diverged.
    """
    pairs = {(row.variant, row.against) for row in comparisons}
    first, second = map(wording.variant_label, next(iter(pairs))) if len(pairs) == 1 else ("first", "second")
    columns: dict[str, list[str]] = {"Measure": [row.name + wording.unit_and_direction(row) for row in comparisons]}
    if any(row.coordinates for row in comparisons):
        columns["Part"] = [row.coordinates.label or "–" for row in comparisons]
    if len(pairs) > 1:
        columns["First − second"] = list(map(wording.pair_label, comparisons))
    if any(row.paper is not None for row in comparisons):
        papers = [row.paper or (math.nan, math.nan) for row in comparisons]
        columns[f"Paper, {first}"] = [_paper(value) for value, _ in papers]
        columns[f"Paper, {second}"] = [_paper(value) for _, value in papers]
        # Without a remainder of the subtraction.
        differences = [_paper(round(value - against, 6), "+,.6g") for value, against in papers]
        columns["Paper, difference"] = [text.replace("-", "−") for text in differences]
    words = [wording.missing_word(row, trained) for row in comparisons]
    for side, name in enumerate((first, second)):
        here = zip(comparisons, words, strict=True)
        columns[f"Here, {name}"] = [wording.format_number(row.ours[side], missing=word) for row, word in here]
    if any(map(wording.levels_of, comparisons)):
        columns["Chance"], columns["Floor"] = map(list, zip(*map(wording.level_cells, comparisons), strict=True))
    columns["Here, difference"] = [wording.format_difference(row, trained) for row in comparisons]
    columns["Seeds"] = [str(len(row.differences)) for row in comparisons]
    columns["Verdict"] = [wording.verdict_text(row, needs=False) for row in comparisons]
    if any(row.verdict == "inconclusive" for row in comparisons):
        columns["Seeds needed"] = list(map(_seeds_needed, comparisons))
    return Table.of_columns(columns)


def verdict_table(results: ResultsFile) -> Table:
    """The comparisons of an experiment in few columns, for a terminal; every verdict is shown in the same way."""
    comparisons = results.comparisons
    trained = results.settings.get("variants", ())
    columns: dict[str, list[str | Cell]] = {
        "measure": list(map(wording.measure_label, comparisons)),
        "variants": [wording.pair_label(row, " / ") for row in comparisons],
        "paper": ["–" if row.paper is None else _pair(row.paper, "–") for row in comparisons],
        "here": [_pair(row.ours, wording.missing_word(row, trained)) for row in comparisons],
        "chance / floor": [" / ".join(wording.level_cells(row)) for row in comparisons],
        "difference": [wording.format_difference(row, trained) for row in comparisons],
        "verdict": [
            Cell(wording.verdict_text(row), strong=row.verdict in ("reproduced", "contrary")) for row in comparisons
        ],
    }
    caption = [
        f"{wording.DIRECTIONS} Difference: first − second, the mean over paired seeds, with its 95 % interval. The "
        "claim is reproduced when the whole interval lies on its side of 0, contrary when it lies on the other side, "
        f"else inconclusive; a question that the paper leaves open is answered with yes or no. {wording.UNCORRECTED}"
    ]
    if any(map(wording.levels_of, comparisons)):
        caption.append(wording.LEVELS)
    else:
        del columns["chance / floor"]
    if comparisons and all(row.paper is None for row in comparisons):
        del columns["paper"]
    if any(row.verdict == "still learning" for row in comparisons):
        caption.append(wording.STILL_LEARNING)
    text = "\n".join([*caption, f"Measured on {results.device}."])
    return Table.of_columns(columns, title=results.title, caption=text, one_line=("paper", "here", "difference"))


def variants_table(settings: Mapping[str, Any]) -> Table:
    """The trained variants that the settings of a results file describe: their sizes, their learning rates, and the
    validation, a loss or an accuracy, of the rates tried.
    """
    trained = settings["variants"]
    columns = {
        "Variant": list(map(wording.trained_label, trained)),
        "Parameters": [f"{variant['parameters']:,}" for variant in trained],
        "Without λ and norms": [f"{variant['shared_parameters']:,}" for variant in trained],
        # Results of early versions do not tell the heads.
        "Heads × d": [
            f"{variant['heads']} × {variant['head_dim']}" if "heads" in variant else "–" for variant in trained
        ],
        "Learning rate": [f"{variant['learning_rate']:g}" for variant in trained],
        "Validation at the rates tried": [_tried(variant["tried"]) for variant in trained],
        "Diverged seeds": [", ".join(map(str, variant["diverged"])) or "none" for variant in trained],
    }
    return Table.of_columns(columns, caption=wording.few_heads(trained))


def verdict_counts(comparisons: Sequence[Comparison]) -> str:
    """How often each verdict came out, including those that never did."""
    if not comparisons:
        return "Nothing could be compared."
    kinds = count_verdicts(comparisons)
    parts = []
    for exploratory, counts in kinds.items():
        names = {verdict: wording.verdict_words(verdict, [exploratory]) for verdict in wording.ANSWERS if verdict}
        for rare in ("still learning", "not comparable"):
            if not counts[rare]:
                del names[rare]
        words = ", ".join(f"{counts[verdict]} {name}" for verdict, name in names.items())
        parts.append(f"to open questions {words}" if exploratory else words)
    if unclaimed := sum(counts[None] for counts in kinds.values()):
        parts.append(f"{unclaimed} {wording.ANSWERS[None]}")
    return f"Of {len(comparisons)} comparisons: {('; ' if True in kinds else ', ').join(parts)}."


def interval_methods(comparisons: Sequence[Comparison]) -> str:
    """The methods of the intervals, the most frequent first; "" where there are no intervals."""
    counts = Counter(row.method for row in comparisons if row.interval is not None and row.method)
    methods = [f"{method} ({count})" if len(counts) > 1 else method for method, count in counts.most_common()]
    return f"Intervals by: {'; '.join(methods)}." if methods else ""


def reasons_unknown(comparisons: Sequence[Comparison]) -> str:
    """Why differences are not known, other than that a run diverged; "" where all are known."""
    lost = [row for row in comparisons if row.reason]
    reasons = [", ".join(filter(None, (row.name, row.coordinates.label))) + f": {row.reason}" for row in lost]
    return f"Not known: {'; '.join(reasons)}." if reasons else ""


def _tried(rates: Mapping[str, float | None]) -> str:
    values = {rate: wording.format_number(number_of(value), missing=wording.DIVERGED) for rate, value in rates.items()}
    return "; ".join(f"{rate}: {value}" for rate, value in values.items()) or "–"


def _pair(values: tuple[float, float], missing: str) -> str:
    return " / ".join(wording.format_number(value, missing=missing) for value in values)


def _paper(value: float, form: str = ",.6g") -> str:
    """A number of the paper's with its own digits."""
    return f"{value:{form}}" if math.isfinite(value) else "–"


def _seeds_needed(row: Comparison) -> str:
    if row.verdict != "inconclusive":
        return "–"
    if len(row.differences) < 2:
        return "not known from one seed"
    if row.documents_needed:
        return "more documents"
    return wording.NOT_KNOWN if row.seeds_needed is None else f"{row.seeds_needed:,}"
