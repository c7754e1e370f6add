"""Record in at most eight minutes what a GPU says of the kernels: whether they are right, and how fast they are.

    python lab/benchmarks/gpu_record.py                                  # on a machine with a GPU
    python lab/benchmarks/fill_readme.py                                 # what was recorded into the pages
    python lab/benchmarks/gpu_record.py --rehearsal --output /tmp/gpu    # everything once at tiny sizes, without a GPU

The stages run one after another, each in a process of its own (`--stage`) that is stopped at its limit. After each,
gpu-record.json in the output folder (lab/benchmarks/ unless named) says what it found, or why it ended; what a stage
had found when it was stopped is kept. Where results are wrong, nothing else is measured. The block sizes that are
fastest are written where the kernels read them, and the other times as `operator-cuda.json` and `model-cuda.json`. In a
rehearsal the CPU takes the place of the GPU, with the kernels in Triton's interpreter, and only its folder is written.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import tune_kernels
from diff_lab.bench.bench_pages import results_path, write_document
from diff_lab.bench.benchmark import DECODE, FORWARD, TRAINING, BenchRow, BenchSettings, Recorder
from diff_lab.bench.model_bench import ModelSettings, measure_model
from diff_lab.bench.operator_bench import OperatorSettings, check_candidate, measure_operator
from diff_lab.bench.operator_candidates import AnswerCheck, Shape, candidates, draw
from diff_lab.results_files import capture_environment, write_json
from diff_transformer.ops.triton import kernel_arguments
from diff_transformer.utils.files import read_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Seconds that each stage may take.
STAGES = {"correctness": 65, "tests": 100, "tuning": 115, "operator": 135, "model": 65}
FINISHED, STOPPED, FAILED = "finished", "stopped at its limit", "failed"
LOG_LINES = 15
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TESTS = "test_kernel_sizes or test_decoding or graph or test_auto or offsets"


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
            # Without flex and the memory-efficient kernel, which took 2.1 and 4.0 of flash's time in the first record,
            # and the time that d 128 needs.
            "candidates": (
                *("fa4", "fa3", "fa2", "triton", "sdpa", "softmax FA4", "softmax FA3", "softmax cuDNN", "DiffLlama"),
                *("sdpa_full_v cuDNN", "sdpa_split_v flash", "sdpa_split_v cuDNN"),
            ),
            "rounds": 7,
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
        "candidates": ("sdpa_split_v",),
        "rounds": 5,
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
    """A stage in its process: what it measures, where it writes, and until when it may begin something."""

    def __init__(self, name: str, folder: Path, seconds: float, sizes: Sizes) -> None:
        self.folder, self.sizes = folder, sizes
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


def part_file(folder: Path, stage: str) -> Path:
    """Where a stage writes what it has found so far."""
    return folder / f"gpu-record-{stage}.json"


def correctness(stage: Stage) -> None:
    """Forward, backward and decoding of the Triton kernels against Equation 1 in float64."""
    device = torch.device(stage.sizes.device)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"environment": vars(capture_environment(stage.sizes.device)), "rows": rows}
    for shape, dtypes in stage.sizes.shapes:
        drawn = draw(shape, device)
        check = AnswerCheck(drawn)
        for dtype in dtypes:
            for pass_ in (FORWARD, TRAINING) if shape.queries == shape.keys else (DECODE,):
                row = BenchRow(candidate="triton", pass_=pass_, dtype=dtype, shape=vars(shape))
                try:
                    row = check_candidate(
                        candidates(device)["triton"], row, drawn.to(DTYPES[dtype]), check, device
                    )  # fmt: skip
                except Exception as error:  # triton, ptxas and the driver each raise their own
                    row = replace(row, reason=tune_kernels.said(error))
                rows.append({"pass": pass_, "dtype": dtype, **vars(shape), "error": row.error, "reason": row.reason})
                print(rows[-1], flush=True)
                stage.write(found)


def run_tests(stage: Stage) -> None:
    """The tests on a GPU that matter most, in several processes."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:benchmark", *stage.sizes.tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    print(done.stdout)
    summary = done.stdout.strip().splitlines()[-1]
    outcomes = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", summary)}
    stage.write({"command": command[1:], "outcomes": outcomes, "summary": summary})
    if done.returncode:
        sys.exit(f"pytest returned {done.returncode}")


def tuning(stage: Stage) -> None:
    """Block sizes, written where the kernels read them, or in a rehearsal into the folder."""
    on_gpu = stage.sizes.device == "cuda"
    path = kernel_arguments.MEASURED_BLOCKS if on_gpu else stage.folder / "measured_blocks.json"
    tune_kernels.tune(stage.sizes.tuning, path, stage.write, stage.has_time_for)


def operator(stage: Stage) -> None:
    """`bench operator`, one length and width after another."""
    parts = stage.sizes.operator_parts
    settings = OperatorSettings.on(
        stage.sizes.device,
        lengths=tuple(dict.fromkeys(length for length, _ in parts)),
        head_dims=tuple(dict.fromkeys(width for _, width in parts)),
        **stage.sizes.operator,
    )
    one_by_one = [replace(settings, lengths=(n,), head_dims=(width,)) for n, width in parts]
    _measure_parts(stage, "operator", settings, measure_operator, one_by_one)


def model(stage: Stage) -> None:
    """`bench model`, one pass after another."""
    settings = ModelSettings.on(stage.sizes.device, passes=stage.sizes.model_parts, **stage.sizes.model)
    one_by_one = [replace(settings, passes=(name,)) for name in stage.sizes.model_parts]
    _measure_parts(stage, "model", settings, measure_model, one_by_one)


def _measure_parts(
    stage: Stage,
    kind: str,
    settings: BenchSettings,
    measure: Callable[[Any, Recorder], dict[str, Any]],
    parts: Sequence[BenchSettings],
) -> None:
    """The documents of the parts as one, which is written after each."""
    path, rows = results_path(stage.folder, kind, settings.device), list[BenchRow]()

    def measure_part(part: BenchSettings) -> None:
        recorder = Recorder()
        document = measure(part, recorder)
        rows.extend(recorder.rows)
        write_document(path, {**document, "rows": rows, "settings": vars(settings)})
        stage.write({"document": path.name, "rows": len(rows), "wrong": sum(row.wrong for row in rows)})

    for part in parts:
        if not stage.has_time_for(lambda part=part: measure_part(part)):  # type: ignore[misc]
            break


RUN: dict[str, Callable[[Stage], None]] = {
    "correctness": correctness,
    "tests": run_tests,
    "tuning": tuning,
    "operator": operator,
    "model": model,
}


def stage_command(folder: Path, rehearsal: bool) -> Callable[[str, float], list[str]]:
    """The program of a stage that may take so many seconds."""
    # Results hold the command: nobody's home is in it.
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    options = ["--output", str(folder), *(["--rehearsal"] if rehearsal else [])]
    return lambda stage, seconds: [sys.executable, __file__, *options, "--stage", stage, "--seconds", f"{seconds:.0f}"]


def environment(rehearsal: bool) -> dict[str, str]:
    """The package of this checkout, and in a rehearsal Triton's interpreter in place of a GPU."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), str(ROOT / "lab" / "src"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, **({"TRITON_INTERPRET": "1"} if rehearsal else {})}


def run_stage(command: list[str], seconds: float, variables: Mapping[str, str], log: Path) -> tuple[str, list[str]]:
    """How the program ended, and the last lines that it printed. It and what it started have ended by then."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=dict(variables), start_new_session=True, cwd=ROOT
        )
        try:
            status = FINISHED if process.wait(seconds) == 0 else FAILED
        except subprocess.TimeoutExpired:
            status = STOPPED
        finally:
            if process.poll() is None or _has_group(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]


def _has_group(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def record(
    folder: Path,
    command: Callable[[str, float], list[str]],
    variables: Mapping[str, str],
    limits: Mapping[str, float] = STAGES,
) -> dict[str, Any]:
    """Run the stages, and write the record after each. Stops after the first one where results are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    path, begin = folder / "gpu-record.json", time.monotonic()
    stages: dict[str, Any] = {}
    document: dict[str, Any] = {"title": "gpu record", "limit_seconds": sum(limits.values()), "stages": stages}
    for stage, limit in limits.items():
        part, log = part_file(folder, stage), folder / f"gpu-record-{stage}.log"
        part.unlink(missing_ok=True)
        started = time.monotonic()
        status, lines = run_stage(command(stage, limit), limit, variables, log)
        took = time.monotonic() - started
        found = read_json(part) if part.is_file() else None
        stages[stage] = {"status": status, "seconds": round(took, 1), "found": found}
        if status != FINISHED:
            stages[stage]["last_lines"] = lines
        print(f"{stage}: {status} after {took:.0f} s")
        if found is not None and "document" in found:  # a lent machine may be gone before its files are fetched
            print((folder / found["document"]).with_suffix(".md").read_text(encoding="utf-8"), flush=True)
        document["seconds"] = round(time.monotonic() - begin, 1)
        if (reason := why_stop(stage, stages[stage])) is not None:
            document["stopped"] = reason
            print(f"stopped: {reason}")
        write_json(path, document, indent=1)
        part.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        if reason is not None:
            break
    return document


def why_stop(stage: str, outcome: Mapping[str, Any]) -> str | None:
    """Why nothing else is to be measured after a stage, or None: times of wrong results say nothing."""
    if stage != "correctness":
        return None
    rows = (outcome["found"] or {}).get("rows", [])
    wrong = [row for row in rows if row["reason"] is not None]
    if wrong:
        return f"{len(wrong)} of {len(rows)} results are not right, first {wrong[0]}"
    if outcome["status"] == FAILED or not rows:
        return f"the check of correctness {outcome['status']}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the record (default: lab/benchmarks)")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU, into --output alone")
    parser.add_argument("--stage", choices=RUN, help="run this one in this process")
    parser.add_argument("--seconds", type=float, help="limit of each stage, in place of its own")
    arguments = parser.parse_args()
    if arguments.rehearsal and arguments.output.resolve() == HERE:
        parser.error("--rehearsal goes with --output, which names another folder than that of the real record.")
    if not arguments.rehearsal and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --rehearsal runs every stage on the CPU.")
    if arguments.stage is not None:
        sizes = REHEARSAL if arguments.rehearsal else Sizes()
        RUN[arguments.stage](Stage(arguments.stage, arguments.output, arguments.seconds, sizes))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage, too, as Ctrl-C does
    folder = arguments.output.resolve()
    limits = dict.fromkeys(STAGES, arguments.seconds) if arguments.seconds else STAGES
    command = stage_command(folder, arguments.rehearsal)
    try:
        document = record(folder, command, environment(arguments.rehearsal), limits)
    except KeyboardInterrupt:
        sys.exit("interrupted: the stages before are in the record")
    if "stopped" in document or any(stage["status"] == FAILED for stage in document["stages"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
