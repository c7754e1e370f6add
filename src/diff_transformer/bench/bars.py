"""The limits that `bench operator` is held to, on the CPU and on CUDA."""

import math
from collections.abc import Callable, Iterable, Sequence

from diff_transformer.bench.candidates import AUTO, COMPOSITIONS, TWIN, TWIN_FLASH
from diff_transformer.bench.records import DECODE, FORWARD, TRAINING, Bar, Row, ratio_bar
from diff_transformer.bench.settings import DTYPES

Case = dict[str, Row]
# Both widths are held to the CUDA bars at these lengths.
CUDA_WIDTHS, CUDA_LENGTHS = (64, 128), range(4096, 16384 + 1)


def cpu_bars(rows: Sequence[Row]) -> list[Bar]:
    """The limits of the time of "auto" relative to the twin's."""

    def meets(pass_: str, dtype: str, low: float = 0, high: float = math.inf) -> Callable[[Row], bool]:
        return lambda row: (
            (row.candidate, row.pass_, row.dtype) == (AUTO, pass_, dtype) and low <= row.shape["keys"] <= high
        )

    bars = []
    for pass_, limit in ((FORWARD, 1.0), (TRAINING, 0.95)):
        text = f"{pass_}, float32, N 512 to 2048"
        bars.append(ratio_bar(text, limit, rows, meets(pass_, "float32", 512, 2048)))
    for dtype in DTYPES:
        for pass_, limit in ((FORWARD, 1.1), (TRAINING, 1.1), (DECODE, 1.05)):
            bars.append(ratio_bar(f"{pass_}, {dtype}, all lengths", limit, rows, meets(pass_, dtype)))
    return [bar for bar in bars if bar.holds is not None]


def cuda_bars(rows: Iterable[Row]) -> list[Bar]:
    """The limits of "auto" in bfloat16, for each width: to the twin's flash, to the best composition, when decoding."""
    cases: dict[tuple[str, str], Case] = {}
    for row in rows:
        if row.dtype == "bfloat16":
            cases.setdefault((row.pass_, row.sizes), {})[row.candidate] = row
    bars = []
    for width in CUDA_WIDTHS:
        picked = [case for case in cases.values() if AUTO in case and case[AUTO].shape["width"] == width]
        long = [c for c in picked if c[AUTO].pass_ == TRAINING and c[AUTO].shape["keys"] in CUDA_LENGTHS]
        decoding = [case for case in picked if case[AUTO].pass_ == DECODE]
        span = f"{TRAINING}, d {width}, N {CUDA_LENGTHS[0]} to {CUDA_LENGTHS[-1]}"
        bars.append(_at_most(f"{span}, relative to the twin's flash", 1.25, long, _slower_than(TWIN_FLASH)))
        bars.append(_at_least(f"{span}, times faster than the best composition, at least", 1.4, long, _gain))
        bars.append(_at_most(f"{DECODE}, d {width}, relative to the twin", 1.1, decoding, _slower_than(TWIN)))
    return bars


def _slower_than(base: str) -> Callable[[Case], float | None]:
    def ratio(case: Case) -> float | None:
        return _quotient(case[AUTO], case.get(base))

    return ratio


def _gain(case: Case) -> float | None:
    """How many times as long the fastest of the compositions takes as "auto"."""
    gains = [_quotient(case[name], case[AUTO]) for name in COMPOSITIONS if name in case]
    return min((gain for gain in gains if gain is not None), default=None)


def _quotient(row: Row, base: Row | None) -> float | None:
    """Of two ratios to the same third candidate, in which a drift of the machine is gone."""
    if base is None or row.ratio is None or base.ratio is None:
        return None
    return row.ratio / base.ratio


def _at_most(text: str, limit: float, cases: Sequence[Case], value: Callable[[Case], float | None]) -> Bar:
    return _bar(text, limit, cases, value, 1)


def _at_least(text: str, limit: float, cases: Sequence[Case], value: Callable[[Case], float | None]) -> Bar:
    return _bar(text, limit, cases, value, -1)


def _bar(text: str, limit: float, cases: Sequence[Case], value: Callable[[Case], float | None], sign: int) -> Bar:
    """The value furthest towards `sign`; a case in which "auto" should have a time and has none breaks the bar."""
    broken = next((case[AUTO] for case in cases if case[AUTO].ratio is None), None)
    if broken is not None:
        return Bar(text=text, limit=limit, worst=None, where=f"{broken.sizes}: {broken.reason}", holds=False)
    found = [(number, case[AUTO].sizes) for case in cases if (number := value(case)) is not None]
    if not found:
        return Bar(text=text, limit=limit, worst=None, where=None, holds=None)
    worst, where = max(found, key=lambda pair: sign * pair[0])
    return Bar(text=text, limit=limit, worst=worst, where=where, holds=sign * worst <= sign * limit)
