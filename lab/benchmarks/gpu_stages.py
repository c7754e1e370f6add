"""Hold the stages of gpu_record.py, which starts each in a process of its own:

    python lab/benchmarks/gpu_stages.py STAGE --output FOLDER --seconds 60 [--rehearsal]

Each writes what it has found so far whenever there is more, because it may be stopped at any time.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import tune_kernels
from diff_lab.bench.bench_pages import results_path, row_line, write_document
from diff_lab.bench.benchmark import DECODE, FORWARD, TRAINING, BenchRow, BenchSettings
from diff_lab.bench.model_bench import ModelSettings, measure_model, step_thresholds
from diff_lab.bench.operator_bench import (
    OperatorSettings,
    check_candidate,
    cpu_thresholds,
    cuda_thresholds,
    measure_operator,
)
from diff_lab.bench.operator_candidates import candidates
from diff_lab.bench.operator_problem import AnswerCheck, Shape, draw
from diff_lab.results_files import capture_environment, write_json
from diff_transformer.ops.triton import kernel_arguments
from gpu_record import HERE, ROOT, part_file

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# A test's outcome as pytest prints it with -v, alone or in several processes.
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)")
TESTS = "test_kernel_sizes or test_decoding or graph or test_auto or offsets or changing_lengths"


@dataclass(frozen=True)
class Sizes:
    """What the stages measure; the defaults are a GPU's."""

    device: str = "cuda"
    # Each shape with its dtypes: narrow, with a length that no block divides, wide; and chunks and tokens of decoding.
    shapes: tuple[tuple[Shape, tuple[str, ...]], ...] = (
        (Shape(2, 8, 64, 1024, 1024), ("bfloat16", "float16")),
        (Shape(1, 8, 128, 1024, 1024), ("bfloat16", "float16")),
        (Shape(1, 4, 64, 1000, 1000), ("bfloat16",)),
        (Shape(2, 4, 128, 40, 4096), ("bfloat16",)),
    )
    tests: tuple[str, ...] = ("-n", "16", "tests/ops/triton/test_on_gpu.py", "-k", TESTS)
    tuning: tune_kernels.Sizes = field(default_factory=tune_kernels.Sizes)
    # Length and width of each part of `bench operator`, the most important first.
    operator_parts: tuple[tuple[int, int], ...] = ((4096, 64), (4096, 128), (16384, 64), (16384, 128))
    operator: Mapping[str, Any] = field(
        default_factory=lambda: {
            "passes": ("forward", "forward+backward", "decode"),
            "decode_batches": (1,),
            # Without flex and the memory-efficient kernel, which took 2.1 and 4.0 of flash's time in the first record,
            # and the time that d 128 needs.
            "candidates": (
                *("triton", "sdpa", "softmax cuDNN", "DiffLlama"),
                *("sdpa_full_v cuDNN", "sdpa_split_v flash", "sdpa_split_v cuDNN"),
            ),
            "rounds": 7,
            "grouped_length": 0,
            "memory_length": 0,
        }
    )
    model_parts: tuple[str, ...] = ("step", "decode", "forward")
    model: Mapping[str, Any] = field(
        default_factory=lambda: {"lengths": (4096,), "layers": 4, "rounds": 5, "candidates": ("diff", "diff, sdpa")}
    )


REHEARSAL = Sizes(
    device="cpu",
    shapes=((Shape(1, 2, 16, 20, 20), ("float16",)), (Shape(1, 2, 16, 3, 40), ("float16",))),
    tests=("tests/ops/triton/test_kernels.py", "-k", "test_which_requests_are_decoding"),
    tuning=tune_kernels.REHEARSAL,
    operator_parts=((24, 8), (40, 8)),
    operator={
        "heads": 2,
        "dtypes": ("float32",),
        "passes": ("forward", "forward+backward", "decode"),
        "decode_batches": (1,),
        "candidates": ("sdpa_split_v",),
        "rounds": 5,
        "grouped_length": 0,
        "memory_length": 0,
    },
    model_parts=("step", "decode"),
    model={
        "dtypes": ("float32",),
        "lengths": (12,),
        "hidden_size": 16,
        "intermediate_size": 24,
        "layers": 1,
        "head_dim": 8,
        "vocabulary": 32,
        "rounds": 5,
        "candidates": ("diff",),
    },
)


class Stage:
    """Where a stage writes, and until when it may begin something."""

    def __init__(self, name: str, folder: Path, seconds: float) -> None:
        self.folder = folder
        self._path, self._end = part_file(folder, name), time.monotonic() + seconds
        self._slowest = 0.0

    def write(self, found: Mapping[str, Any]) -> None:
        write_json(self._path, dict(found), indent=1)

    def has_time_for(self, part: Callable[[], Any]) -> bool:
        """Do a part if one as slow as the slowest so far would still end in time."""
        begin = time.monotonic()
        if begin + self._slowest > self._end:
            return False
        part()
        self._slowest = max(self._slowest, time.monotonic() - begin)
        return True


def correctness(stage: Stage, sizes: Sizes) -> None:
    """Forward, backward and decoding of the Triton kernels against Equation 1 in float64."""
    device = torch.device(sizes.device)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"environment": vars(capture_environment(sizes.device)), "rows": rows}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = {"name": properties.name, "memory": properties.total_memory}
        found["gpu"] |= {"multiprocessors": properties.multi_processor_count}
        found["gpu"]["capability"] = f"{properties.major}.{properties.minor}"
    stage.write(found)
    for shape, dtypes in sizes.shapes:
        drawn = draw(shape, device)
        check = AnswerCheck(drawn)
        for dtype in dtypes:
            for pass_ in (FORWARD, TRAINING) if shape.queries == shape.keys else (DECODE,):
                row = BenchRow(candidate="triton", pass_=pass_, dtype=dtype, shape=vars(shape))
                row = checked(row, drawn.to(DTYPES[dtype]), check, device)
                rows.append({"pass": pass_, "dtype": dtype, **vars(shape), "error": row.error, "reason": row.reason})
                print(rows[-1], flush=True)
                stage.write(found)


def checked(row: BenchRow, problem: Any, check: AnswerCheck, device: torch.device) -> BenchRow:
    """The row of the Triton kernels with their error, or why there is none; whatever they raise is a reason."""
    try:
        return check_candidate(candidates(device)["triton"], row, problem, check, device)
    except Exception as error:  # triton, ptxas and the driver each raise their own
        return replace(row, reason=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


def run_tests(stage: Stage, sizes: Sizes) -> None:
    """The tests on a GPU that matter most, in several processes."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:benchmark", *sizes.tests]
    counts: Counter[str] = Counter()
    failed: list[str] = []
    lines: list[str] = []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
        if "::" in line and (outcome := OUTCOME.search(line)) is not None and not line.startswith(outcome[1]):
            counts[outcome[1].lower()] += 1
            if outcome[1] in ("FAILED", "ERROR"):
                failed.append(line.strip())
            stage.write({"command": command[1:], "outcomes": dict(counts), "failed": failed})
    returned = process.wait()
    found = {"command": command[1:], "outcomes": dict(counts), "failed": failed, "summary": lines[-1:]}
    stage.write(found | {"returned": returned})
    if returned != 0:
        sys.exit(f"pytest returned {returned}")


def tuning(stage: Stage, sizes: Sizes) -> None:
    """Block sizes, written where the kernels read them, or in a rehearsal into the folder."""
    path = kernel_arguments.MEASURED_BLOCKS if sizes.device == "cuda" else stage.folder / "measured_blocks.json"
    tune_kernels.tune(sizes.tuning, path, stage.write, stage.has_time_for)


class _Printer:
    """Prints what a benchmark does."""

    def stage(self, text: str, done: int, total: int) -> None:
        print(f"part {done + 1} of {total}: {text}", flush=True)

    def row(self, row: BenchRow) -> None:
        print(row_line(row), flush=True)


def _measure_parts(
    stage: Stage,
    kind: str,
    settings: BenchSettings,
    parts: Sequence[Callable[[], tuple[dict[str, Any], list[BenchRow]]]],
    thresholds: Callable[[list[BenchRow]], list[Any]],
) -> None:
    """The documents of the parts as one, which is written after each."""
    path, rows = results_path(stage.folder, kind, settings.device), list[BenchRow]()

    def measure(part: Callable[[], tuple[dict[str, Any], list[BenchRow]]]) -> None:
        document, more = part()
        rows.extend(more)
        document |= {"rows": rows, "thresholds": thresholds(rows), "settings": vars(settings)}
        write_document(path, document)
        stage.write({"document": path.name, "rows": len(rows), "wrong": sum(row.wrong for row in rows)})

    for part in parts:
        if not stage.has_time_for(lambda part=part: measure(part)):  # type: ignore[misc]
            break


def operator(stage: Stage, sizes: Sizes) -> None:
    """`bench operator`, one length and width after another."""
    settings = OperatorSettings.on(
        sizes.device,
        lengths=tuple(dict.fromkeys(length for length, _ in sizes.operator_parts)),
        head_dims=tuple(dict.fromkeys(width for _, width in sizes.operator_parts)),
        **sizes.operator,
    )
    one_by_one = [
        replace(settings, lengths=(length,), caches=(length,), head_dims=(width,), one_head_length=length)
        for length, width in sizes.operator_parts
    ]
    parts = [lambda one=one: measure_operator(one, _Printer()) for one in one_by_one]
    _measure_parts(stage, "operator", settings, parts, cuda_thresholds if settings.on_cuda else cpu_thresholds)


def model(stage: Stage, sizes: Sizes) -> None:
    """`bench model`, one pass after another."""
    settings = ModelSettings.on(sizes.device, passes=sizes.model_parts, **sizes.model)
    one_by_one = [replace(settings, passes=(name,)) for name in sizes.model_parts]
    parts = [lambda one=one: measure_model(one, _Printer()) for one in one_by_one]
    _measure_parts(
        stage, "model", settings, parts, lambda rows: step_thresholds(rows, on_cuda=settings.on_cuda)
    )  # fmt: skip


RUN: dict[str, Callable[[Stage, Sizes], None]] = {
    "correctness": correctness,
    "tests": run_tests,
    "tuning": tuning,
    "operator": operator,
    "model": model,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stage", choices=RUN)
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the record")
    parser.add_argument("--seconds", type=float, required=True, help="when the stage will be stopped")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    sizes = REHEARSAL if arguments.rehearsal else Sizes()
    if not arguments.rehearsal and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --rehearsal runs every stage on the CPU.")
    RUN[arguments.stage](Stage(arguments.stage, arguments.output, arguments.seconds), sizes)


if __name__ == "__main__":
    main()
