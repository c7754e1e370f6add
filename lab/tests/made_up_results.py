"""Results files of experiments that nobody carried out."""

from collections.abc import Mapping, Sequence
from typing import Any

from diff_lab.record import Comparison, Result, ResultsFile


def trained(*names: str, at: Mapping[str, Any] | None = None, **more: Any) -> list[dict[str, Any]]:
    """Variants as the settings of a results file hold them."""
    sizes = {"parameters": 812_825, "shared_parameters": 812_345, "learning_rate": 0.003}
    tried: dict[str, Any] = {"tried": {"0.003": 1.5, "0.006": None}, "diverged": [2]}
    return [{"name": name, "coordinates": dict(at or {}), **sizes, **tried, **more} for name in names]


def measured(name: str, values: Mapping[str, Sequence[float]], **more: Any) -> list[Result]:
    """A measure of variants that have a value for each seed."""
    return [
        Result(name=name, variant=variant, value=value, seed=seed, **more)
        for variant, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def made_up(
    name: str,
    measured: Sequence[Result],
    compared: Sequence[Comparison],
    variants: Sequence[Mapping[str, Any]] = (),
    *,
    preset: str = "cpu",
    notes: Sequence[str] = (),
    **request: Any,
) -> ResultsFile:
    """The results of an experiment with a preset."""
    settings = {"request": {"experiment": name, "preset": preset, **request}, "variants": variants, "seconds": 90.0}
    return ResultsFile(
        command=f"diff-lab reproduce {name}",
        device="AMD EPYC 7763, 2 threads",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        commit="0123456789abcdef0123456789abcdef01234567",
        created="2026-01-01T12:00:00+00:00",
        title=f"what {name} shows",
        settings=settings,
        records=tuple(measured),
        comparisons=tuple(compared),
        notes=tuple(notes),
    )
