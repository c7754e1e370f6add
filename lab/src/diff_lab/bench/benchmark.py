"""Defines common parts of both benchmarks: settings and their checks, rows of results, clocks, timing of a case.

Candidates are timed in alternation: each runs once a round, so that a drift of the machine affects all of them alike.
"""

import gc
import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch

from diff_lab.results_files import capture_environment
from diff_transformer.utils.environment import check_device, installed_version

FORWARD, BACKWARD, TRAINING, DECODE = "forward", "backward", "forward + backward", "decode"
STEP = "training step"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The Transformer with the same parameters, whose time the ratios are to.
BASELINE = "softmax"
WRONG = "its results are wrong"

Run = Callable[[], object]
# (run, repeats) → seconds of one run.
Clock = Callable[[Run, int], float]

NO_MEMORY = "it does not fit in the device's memory"

# Memory that is read before each run, in sizes of the second-level cache, and that size where torch does not know it.
FLUSH, USUAL_CACHE = 4, 64 << 20
# The device's queue holds about a thousand launches; so many runs at a time fit into it.
BURST = 50
# The host's head start relative to the time that enqueuing takes, its maximum in seconds, and cycles of a second.
HEAD_START, LONGEST_START, CYCLES = 1.25, 0.2, 2e9

# A sample repeats a fast candidate until it takes about so long: clocks and calls cost microseconds.
SAMPLE_SECONDS = 0.005
# The default number of rounds gives each candidate about so many seconds, within these bounds.
CANDIDATE_SECONDS = 0.3
LEAST_ROUNDS, MOST_ROUNDS = 5, 25

T = TypeVar("T")
Settings = TypeVar("Settings", bound="BenchSettings")


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The settings that both benchmarks have; the defaults are those of the CPU, `on` takes the device's.

    `batch` counts the sequences at a time; with `tokens` they are as many as have so many tokens together. `passes` are
    keys of `PASSES`. `candidates` are measured beside those that always run; None measures all.
    """

    # Names on the command line → those in results; those of dtypes; and the defaults that differ on CUDA.
    PASSES: ClassVar[Mapping[str, str]] = {}
    DTYPES: ClassVar[Sequence[str]] = tuple(DTYPES)
    ON_CUDA: ClassVar[Mapping[str, Any]] = {}

    device: str = "cpu"
    dtypes: tuple[str, ...] = tuple(DTYPES)
    batch: int = 1
    tokens: int | None = None
    passes: tuple[str, ...] = ()
    candidates: tuple[str, ...] | None = None
    rounds: int | None = None

    @classmethod
    def on(cls: type[Settings], device: str, **chosen: Any) -> Settings:
        """Return the device's defaults with the chosen settings. A chosen batch holds at all lengths."""
        check_device(device)
        defaults = cls.ON_CUDA if torch.device(device).type == "cuda" else {}
        tokens = {"tokens": None} if "batch" in chosen else {}
        return cls(device=device, **{**defaults, **tokens, **chosen})

    def __post_init__(self) -> None:
        check_device(self.device)
        check_choice("device", [self.torch_device.type], ("cpu", "cuda"))
        check_choice("dtype", self.dtypes, self.DTYPES)
        check_choice("pass", self.passes, self.PASSES)
        for name, value in vars(self).items():
            least = LEAST_ROUNDS if name == "rounds" else 1
            for size in value if isinstance(value, tuple) else (value,):
                if type(size) is int and size < least:  # not a bool
                    raise ValueError(f"{name} must be {least} or more, got {size}.")

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def on_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def batch_at(self, length: int) -> int:
        """Return the sequences at a time, of a length."""
        return self.batch if self.tokens is None else max(1, self.tokens // length)

    def document(self, title: str, notes: Iterable[str], **parts: Any) -> dict[str, Any]:
        """Return the document of a benchmark: its environment, the settings, and the given parts."""
        settings = {**vars(self), "threads": torch.get_num_threads()}
        document = {**vars(capture_environment(self.device)), "title": title, "settings": settings}
        triton = installed_version("triton", "none")
        versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, Triton {triton}."
        return {**document, "notes": [*notes, *([versions] if self.on_cuda else [])], **parts}


def check_choice(option: str, chosen: Sequence[str], allowed: Iterable[str]) -> None:
    """Raise ValueError for a name that is not allowed."""
    names = tuple(allowed)
    for name in chosen:
        if name not in names:
            raise ValueError(f"{option} must be one of {', '.join(map(repr, names))}, got {name!r}.")


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One candidate in one case.

    `ratio` is the median over the rounds of (its time / the time of `against` in the same round), with its
    quartiles; `milliseconds` is its median time, to which the rates belong: bytes of keys and values that a decoding
    step reads, operations of the Transformer in the same case, tokens of a whole model's batch. `error` is the largest
    error as a share of the budget: above 1 the candidate is wrong and has no time. `reason` says why there is no time,
    and `backend` which one "auto" chose.
    """

    candidate: str
    pass_: str
    dtype: str
    shape: dict[str, int]
    against: str = BASELINE
    backend: str | None = None
    error: float | None = None
    milliseconds: float | None = None
    ratio: float | None = None
    quartiles: tuple[float, float] | None = None
    rounds: int | None = None
    gigabytes_per_second: float | None = None
    teraflops_per_second: float | None = None
    tokens_per_second: float | None = None
    reason: str | None = None

    @property
    def wrong(self) -> bool:
        """Whether the correctness check refused the candidate; an error that is not a number is wrong, too."""
        return self.error is not None and not self.error <= 1

    @property
    def sizes(self) -> str:
        """The shape in words."""
        return ", ".join(f"{name} {size}" for name, size in self.shape.items())

    def __str__(self) -> str:
        name = f"{self.candidate} ({self.backend})" if self.backend else self.candidate
        if self.ratio is None or self.quartiles is None:
            return f"{name:24} {self.reason}"
        error = "" if self.error is None else f"   error {self.error:.2f} of the limit"
        base = "" if self.against == BASELINE else f"   (relative to {self.against})"
        units = {"teraflops": "TFLOP/s", "gigabytes": "GB/s", "tokens": "tokens/s"}
        rates = {unit: getattr(self, f"{name}_per_second") for name, unit in units.items()}
        rate = "".join(f"   {value:,.1f} {unit}" for unit, value in rates.items() if value is not None)
        span = "[{:.2f}–{:.2f}]".format(*self.quartiles)
        return f"{name:24} {self.ratio:6.2f} {span} {self.milliseconds:10.3f} ms{rate}{error}{base}"

    def checked(self, error: float | None, reason: str | None) -> "BenchRow":
        """Return the row with the outcome of the correctness check."""
        row = replace(self, error=error, reason=reason)
        return replace(row, reason=WRONG) if row.wrong else row


def refuse_wrong(rows: Sequence[BenchRow]) -> None:
    """Raise ValueError naming every candidate that the correctness check refused."""
    wrong = [
        f"{row.candidate} ({row.pass_}, {row.dtype}, {row.sizes}: {row.error:.3g} times the allowed error)"
        for row in rows
        if row.wrong
    ]
    if wrong:
        raise ValueError(f"wrong results, which were not timed: {'; '.join(wrong)}.")


def try_run(device: torch.device, work: Callable[..., T], *arguments: Any) -> tuple[T | None, str | None]:
    """Return the result of `work` and None; or None and why it failed, which must not end a long benchmark."""
    try:
        value = work(*arguments)
        synchronize(device)  # a kernel's failure belongs to the work which launched it
        return value, None
    except torch.OutOfMemoryError:
        reason = NO_MEMORY
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
    # Not in the clauses above: there the exception still holds the frames, and they their tensors.
    free_memory(device)
    return None, reason


def free_memory(device: torch.device) -> None:
    """Free all memory that nothing refers to any more, including torch's cache."""
    gc.collect()
    synchronize(device)  # raises again if the device is beyond use
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wall_clock(device: torch.device) -> Clock:
    """Make the clock of a user's waiting, launches included: a CUDA device is synchronised before and after."""

    def seconds(run: Run, repeats: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        synchronize(device)
        return max(time.perf_counter() - start, 1e-9) / repeats

    return seconds


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; nothing on others."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def kernel_clock(device: torch.device) -> Clock:
    """Make the clock of the device's work: events on CUDA, else the wall clock."""
    return EventClock(device) if device.type == "cuda" else wall_clock(device)


class EventClock:
    """Times each run between two CUDA events, with none of its data in the second-level cache.

    Before each run other memory is read (not written, or it would be written back during the run), several times the
    size of the cache. Meanwhile, and while the device sleeps at the start of a burst, the host enqueues.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or USUAL_CACHE
        self._other = torch.ones(FLUSH * cache // 4, device=device)
        self._enqueuing: dict[Run, float] = {}
        self._other.sum()  # its kernel is loaded here, not in the first burst

    def __call__(self, run: Run, repeats: int) -> float:
        with torch.cuda.device(self._device):
            total = sum(self._burst(run, min(BURST, repeats - done)) for done in range(0, repeats, BURST))
        return max(total, 1e-9) / repeats

    def _burst(self, run: Run, repeats: int) -> float:
        pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
        torch.cuda.synchronize(self._device)
        if run in self._enqueuing:
            start = min(self._enqueuing[run] * repeats * HEAD_START, LONGEST_START)
            torch.cuda._sleep(int(start * CYCLES))
        begin = time.perf_counter()
        for first, last in pairs:
            self._other.sum()
            first.record()
            run()
            last.record()
        # Only of the first, single run: later the host may have waited for space in the queue.
        self._enqueuing.setdefault(run, (time.perf_counter() - begin) / repeats)
        torch.cuda.synchronize(self._device)
        return sum(first.elapsed_time(last) for first, last in pairs) * 1e-3


def alternate(candidates: Mapping[str, Run], clock: Clock, rounds: int | None = None) -> dict[str, list[float]]:
    """Time one run of each candidate in seconds, one value a round; the order rotates from round to round.

    Each candidate has run before, so that no first run is timed. Without `rounds` there are 5 to 25 of them, more the
    shorter a run is.
    """
    once = {name: clock(run, 1) for name, run in candidates.items()}
    repeats = {name: max(1, math.ceil(SAMPLE_SECONDS / seconds)) for name, seconds in once.items()}
    if rounds is None:
        longest = max(once[name] * repeats[name] for name in candidates)
        rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, math.ceil(CANDIDATE_SECONDS / longest)))
    names = list(candidates)
    times: dict[str, list[float]] = {name: [] for name in names}
    # A collection in the middle of a run would be charged to that run.
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(clock(candidates[name], repeats[name]))
    finally:
        gc.enable()
    return times


def time_case(
    checked: Mapping[str, BenchRow],
    prepare: Callable[[str], Run],
    settings: BenchSettings,
    clock: Clock,
    *,
    rates: Callable[[float], dict[str, Any]],
    bases: Sequence[str] = (BASELINE,),
    other_bases: Mapping[str, Sequence[str]] | None = None,
) -> list[BenchRow]:
    """Return the rows of one case with their times, measured in alternated runs.

    Of the `checked` rows those with a reason are not timed. `prepare` makes the timed call of a candidate, `rates`
    fields of a row from the median seconds of a run. The ratios are to the first of `bases` that can run. Candidates in
    `other_bases` get more rows, relative to other candidates.
    """
    device, rows = settings.torch_device, dict(checked)

    def attempt(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        value, reason = try_run(device, work, *arguments)
        rows[name] = replace(rows[name], reason=reason)
        return value

    runs = {name: attempt(name, prepare, name) for name, row in checked.items() if row.reason is None}
    # The first run, with the inputs of all candidates held: what compiles, tunes, makes state, or does not fit.
    for name in list(runs):
        if runs[name] is not None:
            attempt(name, runs[name])
        if rows[name].reason is not None:
            del runs[name]
            free_memory(device)

    base = next((name for name in bases if name in runs), bases[-1])
    failure: str | None = f"{base} has no time: {rows[base].reason}"
    times = None
    if base in runs:
        times, failure = try_run(device, alternate, runs, clock, settings.rounds)
    if times is None:
        return [replace(row, against=base, reason=row.reason or failure) for row in rows.values()]
    finished = []
    for name, row in rows.items():
        for against in (base, *(other_bases or {}).get(name, ())):
            if name in times and against in times:
                ratios = list(map(operator.truediv, times[name], times[against]))
                low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                seconds = statistics.median(times[name])
                fields: dict[str, Any] = {"ratio": middle, "quartiles": (low, high)}
                fields |= {"rounds": len(ratios), "milliseconds": seconds * 1e3}
                finished.append(replace(row, against=against, **fields, **rates(seconds)))
            elif against == base:
                finished.append(replace(row, against=base))
    return finished


@dataclass
class Recorder:
    """Collects the rows of a benchmark; `tell` is given a line for each of its parts, `show` each row as a line."""

    tell: Callable[[str], None] = print
    show: Callable[[str], None] = print
    parts: int = 0
    rows: list[BenchRow] = field(default_factory=list)
    _begun: int = 0

    def begin(self, text: str) -> None:
        """Tell that the next part begins."""
        self._begun += 1
        self.tell(f"part {self._begun} of {self.parts}: {text}")

    def add(self, rows: Sequence[BenchRow]) -> None:
        """Collect the rows of a case and show them, under a line for it."""
        for row in rows[:1]:
            self.show(f"{row.pass_}, {row.dtype}, {row.sizes}")
        for row in rows:
            self.rows.append(row)
            self.show(f"  {row}")
