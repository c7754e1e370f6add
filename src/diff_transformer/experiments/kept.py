"""Results that are there already: whether they are in the way, kept, or of another question."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diff_transformer.experiments.asked import Asked
from diff_transformer.results import read_results

_SHOWN = 60  # characters of a setting that are told where it differs


def results_path(output: Path, name: str) -> Path:
    """Where an experiment's results are written."""
    return output / f"{name}.json"


def check_results(path: Path, asked: Asked, *, resume: bool, overwrite: bool) -> None:
    """Say why an experiment's results cannot be written to `path` or kept there, if so. Raises as `run_experiment`."""
    if resume and overwrite:
        raise ValueError("Results are either kept (--resume) or replaced (--overwrite), not both.")
    if path.exists() and not (resume or overwrite):
        raise FileExistsError(
            f"There are results in {str(path)!r} already; choose another --output, keep them with --resume, or replace "
            "them with --overwrite, which trains nothing twice."
        )
    if resume and path.exists():
        differs = _differences(read_results(path).settings.get("asked"), asked.settings())
        if differs:
            raise FileExistsError(
                f"The results in {str(path)!r} were asked for otherwise ({differs}), and --resume would lose them; "
                "ask for the same, choose another --output, or replace them with --overwrite, which trains nothing "
                "twice."
            )


def _differences(before: object, now: Mapping[str, Any], within: str = "") -> str:
    """What was asked for otherwise: "seeds: 10 there, 3 asked for; options.sequences: …"; empty where nothing was."""
    if not isinstance(before, Mapping):
        return "they do not tell how"
    told = []
    for name in dict.fromkeys((*before, *now)):
        there, here = (side[name] if name in side else _Absent() for side in (before, now))
        if there == here:
            continue
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            told.append(_differences(there, here, f"{within}{name}."))
            continue
        shown = [str(there), str(here)]
        values = "" if max(map(len, shown)) > _SHOWN else f": {shown[0]} there, {shown[1]} asked for"
        told.append(f"{within}{name}{values}")
    return "; ".join(told)


class _Absent:
    """In place of a setting that is not there; None is a value that one may have."""

    def __str__(self) -> str:
        return "none"
