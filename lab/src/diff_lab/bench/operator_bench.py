"""Checks each candidate of `bench operator`, and times it relative to the Transformer's attention."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
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
)
from diff_lab.bench.operator_problem import AnswerCheck, OperatorProblem, Shape, arrange, draw, flops, matrix_peak
from diff_lab.bench.timing import free_memory, kernel_clock, try_run

# Linux's own account of this process. getrusage's maximum would not do: a new process starts with that of its parent.
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 1 << 20
TINY = 16  # the length of a first run
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
    Peak memory is measured at `memory_length`, 0 for none.
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

    def label(self, pass_: str, dtype: str, shape: Shape) -> str:
        """Return a case as a line of progress names it."""
        width = f", width {shape.width}" if len(self.head_dims) > 1 else ""
        return f"{pass_}, {dtype}, length {shape.keys}, batch {shape.batch}{width}"


def measure_operator(settings: OperatorSettings, recorder: Recorder) -> dict[str, Any]:
    """Return the document to write; the last parts are memory."""
    device, cases = settings.torch_device, list(settings.cases())
    # A backward pass alone needs what a forward pass saved.
    from_inputs = [part for part in itertools.product(settings.dtypes, settings.causal_passes) if part[1] != BACKWARD]
    shapes = [settings.square(settings.memory_length, width) for width in settings.head_dims if settings.memory_length]
    memory_parts = [(dtype, pass_, shape) for dtype, pass_ in from_inputs for shape in shapes]
    timed = sum(len(passes) for _, passes in cases) * len(settings.dtypes)
    recorder.parts = timed + len(memory_parts)
    peak = {dtype: matrix_peak(DTYPES[dtype], device) for dtype in settings.dtypes} if settings.on_cuda else {}
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
        memory=memory,
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
    if candidate.is_baseline:
        return row
    if (reason := candidate.reason(problem, row.pass_)) is not None:
        return replace(row, reason=reason)
    return row.checked(*try_run(device, lambda: check.error(compute(candidate, problem, row.pass_))))


# --- Peak memory of one run, in a process of its own, so that no candidate inherits memory of another ---


def measure_memory(
    names: Sequence[str], shape: Shape, dtype: str, pass_: str, device: torch.device
) -> list[dict[str, Any]]:
    """Measure peak memory of the named candidates in MiB; the ratios are to the first one.

    `total` is the peak above a process that has imported torch and run the candidate once on a tiny shape: inputs, λ,
    the gradient that arrives, output, gradients, and tensors held between. `own` is the peak above the inputs.
    """
    parts: list[dict[str, Any]] = []
    for name in names:
        part: dict[str, Any] = {"pass": pass_, "dtype": dtype, "shape": vars(shape), "candidate": name}
        parts.append(part)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            threads = torch.get_num_threads()
            try:
                part |= process.submit(peak_of_run, name, shape, dtype, pass_, device, threads).result()
            except Exception as error:  # of a device, or of a system that does not tell its memory
                part["reason"] = " ".join(f"{type(error).__name__}: {error}".split())
                continue
        first = parts[0].get("total")
        part["ratio"] = part["total"] / first if first else None
    return parts


def peak_of_run(
    name: str, shape: Shape, dtype: str, pass_: str, device: torch.device, threads: int
) -> dict[str, float]:
    """Run a candidate in this process, and return what it took in MiB."""
    torch.set_num_threads(threads)
    candidate = candidates(device)[name]

    def problem(shape: Shape) -> OperatorProblem:
        return arrange(shape, lambda *size: torch.randn(*size, dtype=DTYPES[dtype], device=device))

    # What a first run loads and starts is not the attention's memory.
    timed_run(candidate, problem(Shape(1, 2, shape.width, TINY, TINY)), pass_)()
    base = _bytes_in_use(device)
    run = timed_run(candidate, problem(shape), pass_)
    if device.type == "cuda":
        run()  # a kernel tuned at this very size tries its variants with memory that is not the attention's
    arranged = _bytes_in_use(device)
    # Bringing the inputs into the candidate's layout took more than they do.
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _RESET.write_text("5", encoding="ascii")
    results = run()
    peak = _bytes_in_use(device, peak=True)
    del results
    return {"total": (peak - base) / MIB, "inputs": (arranged - base) / MIB, "own": (peak - arranged) / MIB}


def _bytes_in_use(device: torch.device, *, peak: bool = False) -> int:
    """Count the tensors on a CUDA device, without the allocator's cache; on the CPU the pages of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    fields = dict(line.split(":", 1) for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines())
    return int(fields["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
