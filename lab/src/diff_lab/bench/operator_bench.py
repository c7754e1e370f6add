"""Checks each candidate of `bench operator`, and times it relative to the Transformer's attention."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from diff_lab.bench.benchmark import (
    BACKWARD,
    BASELINE,
    DECODE,
    DTYPES,
    FORWARD,
    TRAINING,
    BenchRow,
    BenchSettings,
    Recorder,
    check_choice,
    time_case,
)
from diff_lab.bench.operator_candidates import (
    AUTO,
    BASELINE_FLASH,
    Candidate,
    backend_of_auto,
    candidates,
    compute,
    timed_run,
    with_noise_maps_repeated,
)
from diff_lab.bench.operator_problem import AnswerCheck, OperatorProblem, Shape, draw, flops, matrix_peak
from diff_lab.bench.peak_memory import measure_memory
from diff_lab.bench.timing import free_memory, kernel_clock, try_run

# Signal heads to a noise map in the case of grouped differential attention, and the backends that compute it once.
RATIO = 4
GROUPED_BACKENDS = {"cpu": ("cpu", "blockwise"), "cuda": ("triton", "blockwise")}
CUDA_NOTES = (
    "Times are the device's: between two CUDA events around a run, with other memory read before each run so that its "
    "inputs are not in the second-level cache, and launches enqueued ahead.",
    "Checked against Equation 1 in float64 on the first and the last head of the first and the last sequence, all "
    "their positions.",
    "TFLOP/s count the Transformer's operations for all candidates: 4·N²·d/2 for a head and sequence forward (half of "
    "the pairs are visible), 2.5 times as many backward. The peak is a matrix product of the same dtype, 8192 × 8192 × "
    "8192, measured in the same process.",
)


@dataclass(frozen=True, kw_only=True)
class OperatorSettings(BenchSettings):
    """Settings of the benchmark of the operator, besides those of both benchmarks.

    `heads` are the Transformer's, of which two make a differential head, and `head_dims` the widths of a query.
    `lengths` are those of a causal sequence; when decoding, one query sees so many keys in each of `batch` sequences.
    Grouped differential attention is measured at `grouped_length`, and peak memory at `memory_length`, 0 for none.
    """

    PASSES: ClassVar = {"forward": FORWARD, "backward": BACKWARD, "forward+backward": TRAINING, "decode": DECODE}
    # A constant number of tokens keeps a GPU busy at short lengths.
    ON_CUDA: ClassVar = {
        "dtypes": ("bfloat16",),
        "tokens": 16384,
        "head_dims": (64, 128),
        "lengths": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        "passes": tuple(PASSES),
    }

    passes: tuple[str, ...] = ("forward", "forward+backward", "decode")
    heads: int = 16
    head_dims: tuple[int, ...] = (64,)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    grouped_length: int = 2048
    memory_length: int = 16384

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("candidate", self.candidates or (), candidates(self.device))
        if self.heads % 2:
            raise ValueError(
                f"heads must be even, since two of the Transformer's make a differential head, got {self.heads}."
            )

    @property
    def causal_passes(self) -> list[str]:
        """The passes that take a causal sequence, by their names in results."""
        return [self.PASSES[name] for name in self.passes if name != "decode"]

    def cases(self) -> Iterator[tuple[Shape, list[str]]]:
        """Yield each shape, with the passes to run on it."""
        for width, length in itertools.product(self.head_dims, self.lengths):
            if self.causal_passes:
                yield self.square(length, width), self.causal_passes
            if "decode" in self.passes:
                yield Shape(self.batch, self.heads, width, 1, length), [DECODE]

    def square(self, length: int, width: int) -> Shape:
        """Return the shape of a causal sequence."""
        return Shape(self.batch_at(length), self.heads, width, length, length)

    def grouped(self) -> Shape:
        """Return the shape in groups: about as many signal heads as differential heads in the other shapes."""
        groups = max(1, self.heads // (2 * RATIO))
        square = self.square(self.grouped_length, self.head_dims[0])
        return replace(square, heads=groups * (RATIO + 1))

    def label(self, pass_: str, dtype: str, shape: Shape) -> str:
        """Return a case as a line of progress names it."""
        width = f", width {shape.width}" if len(self.head_dims) > 1 else ""
        return f"{pass_}, {dtype}, length {shape.keys}, batch {shape.batch}{width}"


def measure_operator(settings: OperatorSettings, recorder: Recorder) -> dict[str, Any]:
    """Return the document to write; the last parts are heads in groups, and memory."""
    device, cases = settings.torch_device, list(settings.cases())
    # A backward pass alone needs what a forward pass saved.
    from_inputs = [part for part in itertools.product(settings.dtypes, settings.causal_passes) if part[1] != BACKWARD]
    in_groups = _grouped_candidates(settings)
    grouped_parts = from_inputs if settings.grouped_length and len(in_groups) > 1 else []
    shapes = [settings.square(settings.memory_length, width) for width in settings.head_dims if settings.memory_length]
    memory_parts = [(dtype, pass_, shape) for dtype, pass_ in from_inputs for shape in shapes]
    timed = sum(len(passes) for _, passes in cases) * len(settings.dtypes)
    recorder.parts = timed + len(grouped_parts) + len(memory_parts)
    peak = {dtype: matrix_peak(DTYPES[dtype], device) for dtype in settings.dtypes} if settings.on_cuda else {}
    known, always = candidates(device), (BASELINE, BASELINE_FLASH, AUTO)
    names = known if settings.candidates is None else (*always, *settings.candidates)
    chosen = {name: candidate for name, candidate in known.items() if name in names}
    for shape, passes in cases:
        for rows in _measure_shape(shape, itertools.product(settings.dtypes, passes), chosen, settings, recorder):
            recorder.add(rows)
        free_memory(device)
    # Rows of grouped differential attention, relative to as many heads of the Transformer; they are no rows of the
    # other shapes' tables, unless they are wrong.
    grouped: list[BenchRow] = []
    if grouped_parts:
        for rows in _measure_shape(settings.grouped(), grouped_parts, in_groups, settings, recorder, ratio=RATIO):
            grouped += rows
            for row in rows:
                (recorder.add([row]) if row.wrong else recorder.show_row(row))
        free_memory(device)
    memory: list[dict[str, Any]] = []
    for dtype, pass_, shape in memory_parts:
        recorder.begin(f"memory, {settings.label(pass_, dtype, shape)}")
        memory += measure_memory((BASELINE, AUTO), shape, dtype, pass_, device)
    return settings.document(
        "bench operator",
        CUDA_NOTES if settings.on_cuda else (),
        candidates={name: candidate.about for name, candidate in known.items()},
        peak_teraflops_per_second=peak,
        rows=recorder.rows,
        grouped=grouped,
        memory=memory,
    )


def _measure_shape(
    shape: Shape,
    parts: Iterable[tuple[str, str]],
    known: Mapping[str, Candidate],
    settings: OperatorSettings,
    recorder: Recorder,
    *,
    ratio: int = 1,
) -> Iterator[list[BenchRow]]:
    """Yield the rows of a shape for each (dtype, pass) in turn; all of them get the same numbers and one truth."""
    device, prefix = settings.torch_device, "" if ratio == 1 else f"{ratio} signal heads to a noise map, "
    drawn, reason = try_run(device, draw, shape, device, ratio)
    check = None if drawn is None else AnswerCheck(drawn)
    for dtype, pass_ in parts:
        recorder.begin(f"{prefix}{settings.label(pass_, dtype, shape)}")
        row = BenchRow(candidate=BASELINE, pass_=pass_, dtype=dtype, shape=vars(shape))
        problem, reason = (None, reason) if drawn is None else try_run(device, drawn.to, DTYPES[dtype])
        if problem is None or check is None:
            yield [replace(row, reason=reason)]
        else:
            yield _measure_case(row, problem, check, known, settings)


def _measure_case(
    template: BenchRow,
    problem: OperatorProblem,
    check: AnswerCheck,
    known: Mapping[str, Candidate],
    settings: OperatorSettings,
) -> list[BenchRow]:
    """Return the rows of the candidates in the case of a row."""
    device, pass_ = settings.torch_device, template.pass_
    backend = backend_of_auto(problem, pass_) if AUTO in known else None
    rows: dict[str, BenchRow] = {}
    for name, candidate in known.items():
        if name != backend:  # what "auto" chose need not be measured twice
            row = replace(template, candidate=name, backend=backend if name == AUTO else None)
            rows[name] = check_candidate(candidate, row, problem, check, device)
    counts = settings.on_cuda and not problem.in_groups
    operations = flops(problem.shape, pass_) if counts else None

    def rates(seconds: float) -> dict[str, Any]:
        read = problem.k.nbytes + problem.v.nbytes
        return {
            "gigabytes_per_second": read / seconds / 1e9 if pass_ == DECODE else None,
            "teraflops_per_second": operations / seconds / 1e12 if operations else None,
        }

    return time_case(
        rows,
        lambda name: timed_run(known[name], problem, pass_),
        settings,
        kernel_clock(device),
        rates=rates,
        # The ratios on CUDA are to the Transformer's flash kernel, where there is one.
        bases=(BASELINE_FLASH, BASELINE),
        expected_errors=lambda name: known[name].expected_errors(device),
    )


def _grouped_candidates(settings: OperatorSettings) -> dict[str, Candidate]:
    """Return the baseline, the backends that compute a group's noise map once, and each with the map repeated."""
    known, chosen = candidates(settings.device), settings.candidates
    names = [name for name in GROUPED_BACKENDS[settings.torch_device.type] if chosen is None or name in chosen]
    pairs = [(known[name], with_noise_maps_repeated(known[name])) for name in names]
    return {candidate.name: candidate for candidate in (known[BASELINE], *itertools.chain.from_iterable(pairs))}


def check_candidate(
    candidate: Candidate, row: BenchRow, problem: OperatorProblem, check: AnswerCheck, device: torch.device
) -> BenchRow:
    """Return the row with the candidate's error, or the reason why it does not run. The baseline only runs."""
    if candidate.is_baseline:
        return row
    if (reason := candidate.reason(problem, row.pass_)) is not None:
        return replace(row, reason=reason)
    expected = candidate.expected_errors(device)
    outcome = try_run(device, lambda: check.error(compute(candidate, problem, row.pass_)), expected_errors=expected)
    return row.checked(*outcome)
