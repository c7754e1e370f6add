"""`bench operator`: cases, the correctness check, alternated times, and the bars."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diff_transformer.bench.candidates import AUTO, TWIN, Candidate, backend_of_auto, candidates, split_values
from diff_transformer.bench.memory import measure_memory, memory_bar
from diff_transformer.bench.problem import Judge, Problem, Shape, draw
from diff_transformer.bench.records import DECODE, FORWARD, TRAINING, Bar, Row, Watcher, ratio_bar, timed_fields
from diff_transformer.bench.settings import DTYPES, check_choice, check_device, check_dtypes, check_sizes
from diff_transformer.bench.timing import alternate, check_rounds, spread
from diff_transformer.results import capture_environment

PASSES = {"forward": FORWARD, "forward+backward": TRAINING, "decode": DECODE}
# Length of the case with one differential head, and the share of a linear speed-up that it has to reach.
ONE_HEAD_LENGTH, ONE_HEAD_SHARE = 2048, 0.75


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What to measure.

    Args:
        heads: the twin's; two of them make a differential head.
        lengths: of a causal sequence. `caches`: keys that one query meets when decoding, for each of `decode_batches`.
        passes: of "forward", "forward+backward" and "decode".
        candidates: names besides the twin and "auto", which always run; None for all.
        memory_length: length at which peak memory is measured, 0 for none.

    Raises:
        ValueError: something that is not among what is allowed.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch: int = 1
    heads: int = 16
    head_dim: int = 64
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    caches: tuple[int, ...] = (512, 2048, 8192)
    decode_batches: tuple[int, ...] = (1, 8)
    passes: tuple[str, ...] = tuple(PASSES)
    candidates: tuple[str, ...] | None = None
    rounds: int | None = None
    one_head_length: int = ONE_HEAD_LENGTH
    memory_length: int = 16384

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtypes(self.dtypes)
        check_rounds(self.rounds)
        check_choice("pass", self.passes, PASSES)
        check_choice("candidate", self.candidates or (), candidates())
        check_sizes(batch=self.batch, heads=self.heads, head_dim=self.head_dim)
        for name in ("lengths", "caches", "decode_batches"):
            check_sizes(**{f"{name}: a value": min(getattr(self, name), default=1)})
        if self.heads % 2:
            raise ValueError(f"heads must be even, since two of the twin's make a differential head, got {self.heads}.")
        if self.memory_length < 0:
            raise ValueError(f"the length for the memory must be 1 or more, or 0 for none, got {self.memory_length}.")


def measure_operator(settings: OperatorSettings, watch: Watcher) -> tuple[dict[str, Any], list[Row]]:
    """The document to write, and its rows. The last parts are one head on all threads, and memory."""
    device = torch.device(settings.device)
    causal = [name for name in settings.passes if name != "decode"]
    shapes = [(shape, causal) for shape in _sequences(settings)] if causal else []
    if "decode" in settings.passes:
        shapes += [(shape, ["decode"]) for shape in _decodings(settings)]
    total = sum(len(passes) for _, passes in shapes) * len(settings.dtypes)
    total += len(causal) * len(settings.dtypes) * (1 + bool(settings.memory_length))
    done = 0
    rows: list[Row] = []
    for shape, passes in shapes:
        problem = draw(shape, device)
        judge = Judge(problem)
        for dtype in settings.dtypes:
            for name in passes:
                watch.stage(f"{PASSES[name]}, {dtype}, length {shape.keys}, batch {shape.batch}", done, total)
                for row in _measure_case(problem.to(DTYPES[dtype]), shape, PASSES[name], judge, settings):
                    rows.append(row)
                    watch.row(row)
                done += 1
    one_head, memory = [], []
    for dtype in settings.dtypes:
        for name in causal:
            watch.stage(f"one head on all threads, {PASSES[name]}, {dtype}", done, total)
            row, parts = _one_head(settings, dtype, PASSES[name], device)
            one_head += parts
            if row.wrong:
                rows.append(row)
                watch.row(row)
            done += 1
    for dtype in settings.dtypes if settings.memory_length else ():
        for name in causal:
            watch.stage(f"memory, {PASSES[name]}, {dtype}, length {settings.memory_length}", done, total)
            shape = Shape(settings.batch, settings.heads, settings.head_dim, *[settings.memory_length] * 2)
            memory += measure_memory((TWIN, AUTO), shape, dtype, PASSES[name], device)
            done += 1
    bars = [*_bars(rows), _one_head_bar(one_head), memory_bar(memory)]
    document = {
        **vars(capture_environment(settings.device)),
        "title": "bench operator",
        "settings": {**vars(settings), "threads": torch.get_num_threads()},
        "candidates": {name: candidate.about for name, candidate in candidates().items()},
        "bars": bars,
        "rows": rows,
        "one_head": one_head,
        "memory": memory,
    }
    return document, rows


def _sequences(settings: OperatorSettings) -> Iterator[Shape]:
    for length in settings.lengths:
        yield Shape(settings.batch, settings.heads, settings.head_dim, length, length)


def _decodings(settings: OperatorSettings) -> Iterator[Shape]:
    for batch in settings.decode_batches:
        for length in settings.caches:
            yield Shape(batch, settings.heads, settings.head_dim, 1, length)


def prepare(candidate: Candidate, problem: Problem, pass_: str) -> Callable[[], object]:
    """One run of a candidate, without arguments: what is timed."""
    backward, causal = pass_ == TRAINING, pass_ != DECODE
    arranged = candidate.arrange(problem.q, problem.k, problem.v)
    leaves = tuple(tensor.detach().requires_grad_(backward) for tensor in arranged)
    lam = problem.lam.detach().clone().requires_grad_(backward)
    size = problem.grad.shape[:3]
    if not backward:
        with torch.no_grad():
            expanded = lam.expand(size)

        def forward() -> Tensor:
            with torch.no_grad():
                return candidate.attend(leaves, expanded, causal)

        return forward
    # The twin has no λ, and the gradient arrives at heads of d.
    wanted = leaves if candidate.name == TWIN else (*leaves, lam)
    grad = split_values(problem.grad).contiguous() if candidate.name == TWIN else problem.grad

    def training() -> tuple[Tensor, ...]:
        return torch.autograd.grad(candidate.attend(leaves, lam.expand(size), causal), wanted, grad)

    return training


def answer(candidate: Candidate, problem: Problem, pass_: str) -> dict[str, Tensor]:
    """The output and, with a backward, the gradients of q, k, v and of λ for each head and token."""
    backward, causal = pass_ == TRAINING, pass_ != DECODE
    size = problem.grad.shape[:3]
    if not backward:
        with torch.no_grad():
            arranged = candidate.arrange(problem.q, problem.k, problem.v)
            return {"out": candidate.attend(arranged, problem.lam.expand(size), causal)}
    leaves = [tensor.detach().requires_grad_() for tensor in (problem.q, problem.k, problem.v)]
    # The expanded view and not λ itself: its gradient belongs to one head, so that a few heads can be checked.
    lam = problem.lam.detach().requires_grad_().expand(size)
    out = candidate.attend(candidate.arrange(*leaves), lam, causal)
    gradients = torch.autograd.grad(out, [*leaves, lam], problem.grad)
    return {"out": out.detach(), **dict(zip(("q", "k", "v", "lam"), gradients, strict=True))}


def _measure_case(problem: Problem, shape: Shape, pass_: str, judge: Judge, settings: OperatorSettings) -> list[Row]:
    torch.compiler.reset()  # torch stops compiling after a number of lengths
    device, dtype = problem.q.device, str(problem.q.dtype).removeprefix("torch.")
    rows: dict[str, Row] = {}
    # The check runs each of them once: no first run is timed.
    runs: dict[str, Callable[[], object]] = {}
    backend = backend_of_auto(problem)
    for name, candidate in candidates().items():
        left_out = settings.candidates is not None and name not in (TWIN, AUTO, *settings.candidates)
        # What "auto" stands for need not be measured twice.
        if left_out or name == backend:
            continue
        row = Row(candidate=name, pass_=pass_, dtype=dtype, shape=shape.named())
        row = replace(row, backend=backend if name == AUTO else None)
        rows[name] = _check(candidate, row, problem, shape, judge)
        if rows[name].reason is None:
            runs[name] = prepare(candidate, problem, pass_)
    times = alternate(runs, device, settings.rounds)
    read = problem.k.nbytes + problem.v.nbytes
    for name, seconds in times.items():
        rate = read / spread(seconds).median / 1e9 if pass_ == DECODE else None
        fields: dict[str, Any] = timed_fields(seconds, times[TWIN])
        rows[name] = replace(rows[name], gigabytes_per_second=rate, **fields)
    return list(rows.values())


def _check(candidate: Candidate, row: Row, problem: Problem, shape: Shape, judge: Judge) -> Row:
    """The row with the candidate's error, or the reason why it does not run. The twin is torch's own."""
    if candidate.name == TWIN:
        prepare(candidate, problem, row.pass_)()
        return row
    reason = candidate.reason(problem, shape, row.pass_)
    if reason is not None:
        return replace(row, reason=reason)
    try:
        error = judge.error(answer(candidate, problem, row.pass_))
    except RuntimeError as failure:
        if not candidate.may_fail:
            raise
        return replace(row, reason=f"{type(failure).__name__}: {str(failure).strip().splitlines()[0]}")
    row = replace(row, error=error)
    return replace(row, reason="its results are wrong") if row.wrong else row


def _one_head(
    settings: OperatorSettings, dtype: str, pass_: str, device: torch.device
) -> tuple[Row, list[dict[str, Any]]]:
    """Time of one differential head of one sequence on one thread, divided by the time on all, round by round.

    Nothing is timed where the row that comes first says why not.
    """
    threads, length = torch.get_num_threads(), settings.one_head_length
    shape = Shape(1, 2, settings.head_dim, length, length)
    row = Row(candidate=AUTO, pass_=pass_, dtype=dtype, shape=shape.named())
    if threads == 1 or device.type != "cpu":
        return replace(row, reason="there is one thread alone"), []
    whole = draw(shape, device)
    problem = whole.to(DTYPES[dtype])
    row = _check(candidates()[AUTO], row, problem, shape, Judge(whole))
    if row.reason is not None:
        return row, []
    runs = {}
    for name in (TWIN, AUTO):
        run = prepare(candidates()[name], problem, pass_)
        for count in (1, threads):
            runs[name, count] = _on_threads(count, run)
            runs[name, count]()
    try:
        times = alternate({f"{name} {count}": run for (name, count), run in runs.items()}, device, settings.rounds)
    finally:
        torch.set_num_threads(threads)
    parts = []
    for name in (TWIN, AUTO):
        alone, together = times[f"{name} 1"], times[f"{name} {threads}"]
        gain = spread([a / b for a, b in zip(alone, together, strict=True)])
        part = {"candidate": name, "pass": pass_, "dtype": dtype, "length": length, "threads": threads}
        part |= {"speed_up": gain.median, "quartiles": gain.quartiles, "milliseconds": spread(together).median * 1e3}
        parts.append(part)
    return row, parts


def _on_threads(count: int, run: Callable[[], object]) -> Callable[[], object]:
    def limited() -> object:
        torch.set_num_threads(count)
        return run()

    return limited


def _bars(rows: Sequence[Row]) -> list[Bar]:
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


def _one_head_bar(parts: Sequence[dict[str, Any]]) -> Bar:
    """Whether one head makes use of all threads."""
    text = f"speed-up of one head by all threads, as a share of linear, at least {ONE_HEAD_SHARE}"
    ours = [part for part in parts if part["candidate"] == AUTO]
    if not ours:
        return Bar(text=text, limit=ONE_HEAD_SHARE, worst=None, where=None, holds=None)
    worst = min(ours, key=lambda part: part["speed_up"])
    share = worst["speed_up"] / worst["threads"]
    where = f"{worst['pass']}, {worst['dtype']}, {worst['threads']} threads"
    return Bar(text=text, limit=ONE_HEAD_SHARE, worst=share, where=where, holds=share >= ONE_HEAD_SHARE)
