"""Record in at most eight minutes what a GPU says of the kernels: whether they are right, and how fast they are.

    python lab/benchmarks/gpu_record.py                                  # on a machine with a GPU
    python lab/benchmarks/fill_readme.py                                 # what was recorded into the pages
    python lab/benchmarks/gpu_record.py --rehearsal --output /tmp/gpu    # everything once at tiny sizes, without a GPU

The stages of gpu_stages.py run one after another, each in a process of its own that is stopped at its limit. After
each, gpu-record.json in the output folder (lab/benchmarks/ unless named) says what it found, or why it ended; what a
stage had found when it was stopped is kept. Where results are wrong, nothing else is measured. The block sizes that are
fastest are written where the kernels read them, and the other times as `operator-cuda.json` and `model-cuda.json`. In a
rehearsal the CPU takes the place of the GPU, with the kernels in Triton's interpreter, and only its folder is written.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diff_lab.results_files import write_json
from diff_transformer.utils.files import read_json

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Seconds that each stage may take, of all; what one leaves over is divided among those after it.
STAGES = {"correctness": 65, "tests": 100, "tuning": 115, "operator": 135, "model": 65}
SECONDS = 480
# A stage that is nearly out of time by itself ends better than one that is stopped.
LEAST_SECONDS = 5
FINISHED, STOPPED, FAILED = "finished", "stopped at its limit", "failed"
LOG_LINES = 15

Command = Callable[[str, float], list[str]]


def part_file(folder: Path, stage: str) -> Path:
    """Where a stage writes what it has found so far."""
    return folder / f"gpu-record-{stage}.json"


def stage_command(folder: Path, rehearsal: bool) -> Command:
    """The program of a stage that may take so many seconds."""
    # Results hold the command: nobody's home is in it.
    folder = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder

    def command(stage: str, seconds: float) -> list[str]:
        options = ["--output", str(folder), "--seconds", f"{seconds:.0f}", *(["--rehearsal"] if rehearsal else [])]
        return [sys.executable, str(HERE / "gpu_stages.py"), stage, *options]

    return command


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
    command: Command,
    variables: Mapping[str, str],
    *,
    seconds: float = SECONDS,
    limits: Mapping[str, float] = STAGES,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the stages, and write the record after each. Stops after the first one where results are wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    path, begin = folder / "gpu-record.json", time.monotonic()
    document: dict[str, Any] = {"title": "gpu record", "limit_seconds": seconds, "stages": {}}
    write_json(path, document, indent=1)
    shares = sum(limits.values())
    for stage, limit in limits.items():
        left = (seconds - (time.monotonic() - begin)) * limit / shares
        shares -= limit
        part, log = part_file(folder, stage), folder / f"gpu-record-{stage}.log"
        part.unlink(missing_ok=True)
        if left < LEAST_SECONDS:
            document["stages"][stage] = {"status": "not begun: no time was left", "seconds": 0.0, "found": None}
        else:
            say(f"{stage}: at most {left:.0f} s")
            started = time.monotonic()
            status, lines = run_stage(command(stage, left), left, variables, log)
            took = time.monotonic() - started
            found = read_json(part) if part.is_file() else None
            document["stages"][stage] = {"status": status, "seconds": round(took, 1), "found": found}
            if status != FINISHED:
                document["stages"][stage]["last_lines"] = lines
            say(f"{stage}: {status} after {took:.0f} s")
        document["seconds"] = round(time.monotonic() - begin, 1)
        write_json(path, document, indent=1)
        part.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        if (reason := why_stop(stage, document["stages"][stage])) is not None:
            document["stopped"] = reason
            write_json(path, document, indent=1)
            say(f"stopped: {reason}")
            break
    say(f"written: {path}")
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for all stages together (default: {SECONDS})")
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes on the CPU, into --output alone")
    arguments = parser.parse_args()
    if arguments.rehearsal and arguments.output.resolve() == HERE:
        parser.error("--rehearsal goes with --output, which names another folder than that of the real record.")
    if arguments.seconds < LEAST_SECONDS:
        parser.error(f"--seconds must be {LEAST_SECONDS} or more, got {arguments.seconds:g}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stage, too, as Ctrl-C does
    folder = arguments.output.resolve()
    variables = environment(arguments.rehearsal)
    command = stage_command(folder, arguments.rehearsal)
    try:
        document = record(folder, command, variables, seconds=arguments.seconds)
    except KeyboardInterrupt:
        sys.exit("interrupted: the stages before are in the record")
    if "stopped" in document or any(stage["status"] == FAILED for stage in document["stages"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
