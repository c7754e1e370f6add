"""Checks each candidate of `bench operator`, and times it relative to the Transformer's attention."""

import itertools
from collections.abc import Iterator, Mapping
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
    free_memory,
    kernel_clock,
    time_case,
    try_run,
)
from diff_lab.bench.operator_candidates import (
    AUTO,
    BASELINE_FLASH,
    AnswerCheck,
    Candidate,
    OperatorProblem,
    Shape,
    backend_of_auto,
    candidates,
    compute,
    draw,
    flops,
    timed_run,
)

CUDA_NOTES = (
    "Times are the device's: between two CUDA events around a run, with other memory read before each run so that its "
    "inputs are not in the second-level cache, and launches enqueued ahead.",
    "Checked against Equation 1 in float64 on the first and the last head of the first and the last sequence, all "
    "their positions.",
    "TFLOP/s count the Transformer's operations for all candidates: 4·N²·d/2 for a head and sequence forward (half of "
    "the pairs are visible), 2.5 times as many backward.",
)


@dataclass(frozen=True, kw_only=True)
class OperatorSettings(BenchSettings):
    """Settings of the benchmark of the operator, besides those of both benchmarks.

    `heads` are the Transformer's, of which two make a differential head, and `head_dims` the widths of a query.
    `lengths` are those of a causal sequence; when decoding, one query sees so many keys in each of `batch` sequences.
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

    def label(self, pass_: str, dtype: str, shape: Shape) -> str:
        """Return a case as a line of progress names it."""
        width = f", width {shape.width}" if len(self.head_dims) > 1 else ""
        return f"{pass_}, {dtype}, length {shape.keys}, batch {shape.batch}{width}"


def measure_operator(settings: OperatorSettings, recorder: Recorder) -> dict[str, Any]:
    """Return the document to write."""
    device, cases = settings.torch_device, list(settings.cases())
    recorder.parts = sum(len(passes) for _, passes in cases) * len(settings.dtypes)
    known, always = candidates(device), (BASELINE, BASELINE_FLASH, AUTO)
    names = known if settings.candidates is None else (*always, *settings.candidates)
    chosen = {name: candidate for name, candidate in known.items() if name in names}
    for shape, passes in cases:
        # All dtypes and passes of a shape get the same numbers and one truth.
        drawn, reason = try_run(device, draw, shape, device)
        check = None if drawn is None else AnswerCheck(drawn)
        for dtype, pass_ in itertools.product(settings.dtypes, passes):
            recorder.begin(settings.label(pass_, dtype, shape))
            row, rows = BenchRow(candidate=BASELINE, pass_=pass_, dtype=dtype, shape=vars(shape)), None
            if drawn is not None:
                rows, reason = try_run(device, _measure_case, row, drawn, check, chosen, settings)
            recorder.add(rows or [replace(row, reason=reason)])
        del drawn, check
        free_memory(device)
    return settings.document(
        "bench operator",
        CUDA_NOTES if settings.on_cuda else (),
        candidates={name: candidate.about for name, candidate in known.items()},
        rows=recorder.rows,
    )


def _measure_case(
    template: BenchRow,
    drawn: OperatorProblem,
    check: AnswerCheck,
    known: Mapping[str, Candidate],
    settings: OperatorSettings,
) -> list[BenchRow]:
    """Return the rows of the candidates in the case of a row."""
    device, pass_, problem = settings.torch_device, template.pass_, drawn.to(DTYPES[template.dtype])
    backend = backend_of_auto(problem, pass_)
    rows: dict[str, BenchRow] = {}
    for name, candidate in known.items():
        if name != backend:  # what "auto" chose need not be measured twice
            row = replace(template, candidate=name, backend=backend if name == AUTO else None)
            rows[name] = check_candidate(candidate, row, problem, check, device)
    operations = flops(problem.shape, pass_) if settings.on_cuda else None

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
    )


def check_candidate(
    candidate: Candidate, row: BenchRow, problem: OperatorProblem, check: AnswerCheck, device: torch.device
) -> BenchRow:
    """Return the row with the candidate's error, or the reason why it does not run. The baseline only runs."""
    if (reason := candidate.reason(problem, row.pass_)) is not None:
        return replace(row, reason=reason)
    if candidate.is_baseline:
        return row
    return row.checked(*try_run(device, lambda: check.error(compute(candidate, problem, row.pass_))))
