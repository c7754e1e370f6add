"""What a benchmark writes down: rows, and the bars that they are held to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diff_transformer.bench.timing import spread

FORWARD, BACKWARD, TRAINING, DECODE = "forward", "backward", "forward + backward", "decode"
STEP = "training step"
WRONG = "its results are wrong"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one case.

    Attributes:
        pass_: what was run, as a reader calls it.
        shape: sizes by name.
        against: whose time the ratio is to.
        backend: what "auto" stood for.
        error: the largest error as a share of what is allowed; above 1 the candidate is wrong and has no time.
        milliseconds: median time of one run.
        ratio: median over the rounds of (time / time of `against` in the same round), with quartiles and extremes.
        gigabytes_per_second: bytes of keys and values that a decoding step reads, by its median time.
        teraflops_per_second: operations of the twin in the same case, by this candidate's median time.
        tokens_per_second: of a whole model: tokens of the batch, by its median time.
        reason: why there is no time.
    """

    candidate: str
    pass_: str
    dtype: str
    shape: dict[str, int]
    against: str = "twin"
    backend: str | None = None
    error: float | None = None
    milliseconds: float | None = None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    extremes: tuple[float, float] | None = None
    rounds: int | None = None
    gigabytes_per_second: float | None = None
    teraflops_per_second: float | None = None
    tokens_per_second: float | None = None
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether the correctness check refused the candidate; not a number is wrong, too."""
        return self.error is not None and not self.error <= 1

    @property
    def sizes(self) -> str:
        """The shape in words."""
        return ", ".join(f"{name} {size}" for name, size in self.shape.items())


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A limit: the value furthest from it, where that was, and whether the limit holds (None: nothing was measured)."""

    text: str
    limit: float
    worst: float | None
    where: str | None
    holds: bool | None


class Watcher(Protocol):
    """What is told while a benchmark runs."""

    def stage(self, text: str, done: int, total: int) -> None:
        """Part `done` of `total`, counted from 0, begins."""

    def row(self, row: Row) -> None:
        """A row is finished."""


def timed_fields(times: Sequence[float], base: Sequence[float]) -> dict[str, object]:
    """The fields of a row that come from its seconds and those of what it is compared with, round by round."""
    ratios = spread([own / other for own, other in zip(times, base, strict=True)])
    return {
        "milliseconds": spread(times).median * 1e3,
        "ratio": ratios.median,
        "quartiles": ratios.quartiles,
        "extremes": ratios.extremes,
        "rounds": len(times),
    }


def ratio_bar(text: str, limit: float, rows: Sequence[Row], meets: Callable[[Row], bool]) -> Bar:
    """The bar "ratio ≤ limit" on all rows that `meets` picks; a row that should have a time and has none breaks it."""
    picked = [row for row in rows if meets(row)]
    broken = next((row for row in picked if row.ratio is None), None)
    if broken is not None:
        return Bar(text=text, limit=limit, worst=None, where=f"{broken.sizes}: {broken.reason}", holds=False)
    if not picked:
        return Bar(text=text, limit=limit, worst=None, where=None, holds=None)
    worst = max(picked, key=lambda row: row.ratio or 0.0)
    holds = worst.ratio is not None and worst.ratio <= limit
    return Bar(text=text, limit=limit, worst=worst.ratio, where=worst.sizes, holds=holds)


def refuse_wrong(rows: Sequence[Row]) -> None:
    """Raises ValueError naming every candidate that the correctness check refused."""
    wrong = [
        f"{row.candidate} ({row.pass_}, {row.dtype}, {row.sizes}: {row.error:.3g} times the allowed error)"
        for row in rows
        if row.wrong
    ]
    if wrong:
        raise ValueError(f"wrong results, which were not timed: {'; '.join(wrong)}.")
