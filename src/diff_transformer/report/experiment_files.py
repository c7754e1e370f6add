"""Results files of experiments: which files are some, what each is called, and their order in a report."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.results import Comparison, ResultsFile, judge, read_json, read_results

_KINDS = {"table": "Table", "fig": "Figure", "appendix": "Appendix"}


@dataclass(frozen=True)
class ExperimentResults:
    """What an experiment found with one preset.

    Attributes:
        name: the experiment's.
        preset: "cpu" or "gpu".
        file: everything that was measured, compared and noted.
    """

    name: str
    preset: str
    file: ResultsFile

    @property
    def anchor(self) -> str:
        """A name for links and files, the only one of a report."""
        return slug(f"{self.name}-{self.preset}")

    @property
    def title(self) -> str:
        """As the paper calls it: "Table 6"; where it has no such thing, the experiment's own name."""
        found = _of_the_paper(self.name)
        if found is not None:
            return f"{_KINDS[found[0]]} {found[1].upper()}"
        first, *others = self.name.split("_")
        return " ".join([first.upper() if len(first) <= 2 else first.capitalize(), *others])

    @property
    def heading(self) -> str:
        """The title with the preset."""
        return f"{self.title}, preset {self.preset}"

    @property
    def headline(self) -> Comparison | None:
        """The comparison that stands for the experiment in an overview; None where it judges none.

        It is the one that the results name. Where they name none, or were asked for without it: the first one with a
        verdict that the paper has values of, else the first with a verdict.
        """
        judged = [row for row in self.file.comparisons if row.verdict is not None]
        named = [row for row in judged if self.file.headline is not None and self.file.headline.names(row)]
        return next((row for rows in (named, [r for r in judged if r.paper], judged) for row in rows), None)

    @property
    def arms(self) -> list[dict[str, Any]]:
        """What was trained; empty for an experiment that trains nothing."""
        return list(self.file.settings.get("arms", []))

    @property
    def seeds(self) -> int:
        """Over how many seeds an arm was measured, at most."""
        return len({record.seed for record in self.file.records} - {None})


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def holds_experiments(path: Path) -> bool:
    """Whether `path` is a results file of an experiment, or a folder with some; the folder of a run or a demo is none.

    Raises ValueError for broken JSON.
    """
    if (path / "metrics.jsonl").is_file() or (path / "results.json").is_file():
        return False
    return any(map(_is_experiment, [path] if path.is_file() else _candidates(path)))


def read_experiments(
    paths: Sequence[Path], complete: Callable[[ResultsFile], ResultsFile] = judge
) -> list[ExperimentResults]:
    """The results in files, and in the folders that hold them directly or one level deeper.

    Args:
        paths: files, or folders with some.
        complete: adds to the results of one file what the definition of its experiment says of them, which files of
            earlier versions lack. By default only what the file says itself is used.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: one without results of an experiment, a broken file, or two results of one experiment and preset.
    """
    found: dict[Path, ResultsFile] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{str(path)!r} does not exist")
        files = [file for file in ([path] if path.is_file() else _candidates(path)) if _is_experiment(file)]
        if not files:
            raise ValueError(f"{str(path)!r} holds no results of an experiment, as `diff-transformer reproduce` leaves")
        found.update({file.resolve(): read_results(file) for file in files})
    named: dict[tuple[str, str], Path] = {}
    results = []
    for place, file in found.items():
        asked = file.settings["asked"]
        key = (asked["experiment"], asked["preset"])
        if key in named:
            raise ValueError(
                f"{str(named[key])!r} and {str(place)!r} are both results of {key[0]!r} with the preset {key[1]!r}; "
                "give one of them."
            )
        named[key] = place
        results.append(ExperimentResults(*key, complete(file)))
    return sorted(results, key=_order)


def _candidates(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.json"), *folder.glob("*/*.json")])


def _is_experiment(path: Path) -> bool:
    """Whether the content is that of an experiment: it says which one was asked for."""
    data = read_json(path)
    settings = data.get("settings") if isinstance(data, dict) else None
    asked = settings.get("asked") if isinstance(settings, dict) else None
    return isinstance(asked, dict) and all(isinstance(asked.get(key), str) for key in ("experiment", "preset"))


def _of_the_paper(name: str) -> tuple[str, str] | None:
    """The kind and the number of a table, a figure or an appendix."""
    found = re.fullmatch(rf"({'|'.join(_KINDS)})_?(\d+|[a-z])", name)
    return None if found is None else (found[1], found[2])


def _order(results: ExperimentResults) -> tuple[int, int, str, str]:
    """Tables, figures, appendices, and then what is beyond the paper; each by number."""
    kind, number = _of_the_paper(results.name) or ("", results.name)
    place = list(_KINDS).index(kind) if kind else len(_KINDS)
    return place, int(number) if number.isdigit() else 0, number, results.preset
