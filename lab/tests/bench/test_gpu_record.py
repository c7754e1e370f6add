"""The record of a GPU: stages, limits and files, with stages made up; tuning; and a whole rehearsal without a GPU."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = ("gpu_record", "tune_kernels", "kernel_resources")
Programs = Callable[[str], Any]  # imports a program by its name
RIGHT = {"rows": [{"pass": "forward", "reason": None}]}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Imports a program of lab/benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__
    for name in NAMES:
        sys.modules.pop(name, None)


def made_up(folder: Path, stages: dict[str, str]) -> Callable[[str, float], list[str]]:
    """Stages that are a line of Python each; `write` writes what was found."""
    begin = f"import json, pathlib, sys, time\nfolder = pathlib.Path({str(folder)!r})\n"

    def command(stage: str, seconds: float) -> list[str]:
        write = f"write = lambda found: (folder / 'gpu-record-{stage}.json').write_text(json.dumps(found))\n"
        return [sys.executable, "-c", begin + write + stages[stage]]

    return command


def run(programs: Programs, folder: Path, limit: float = 30.0, **stages: str) -> dict[str, Any]:
    program = programs("gpu_record")
    limits = dict.fromkeys(stages, limit)
    program.record(folder, made_up(folder, stages), os.environ, limits)
    document: dict[str, Any] = json.loads((folder / "gpu-record.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in folder.iterdir()) == ["gpu-record.json"]
    return document


def test_every_stage_has_its_place_in_the_record(programs: Programs, tmp_path: Path) -> None:
    document = run(programs, tmp_path, correctness=f"write({RIGHT})", tuning="write({'kept': True})")
    assert {name: stage["status"] for name, stage in document["stages"].items()} == {
        "correctness": "finished",
        "tuning": "finished",
    }
    assert document["stages"]["tuning"]["found"] == {"kept": True}
    assert "stopped" not in document


def test_the_page_of_a_stage_is_printed(programs: Programs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a machine's output holds is there also where its files are lost."""
    (page := tmp_path / "pages" / "times.md").parent.mkdir()
    page.write_text("| triton | 1.19 |", encoding="utf-8")
    stages = {"operator": f"write({{'document': {str(page.with_suffix('.json'))!r}}})"}
    programs("gpu_record").record(tmp_path, made_up(tmp_path, stages), os.environ, {"operator": 30.0})
    assert "| triton | 1.19 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        ("write({'rows': [{'pass': 'forward', 'reason': 'its results are wrong'}]})", "1 of 1 results are not right"),
        ("raise ValueError('no device')", "the check of correctness failed"),
        ("pass", "the check of correctness finished"),
    ],
    ids=["wrong", "failed", "silent"],
)
def test_nothing_is_measured_after_wrong_results(programs: Programs, tmp_path: Path, stage: str, reason: str) -> None:
    document = run(programs, tmp_path, correctness=stage, operator="write({})")
    assert document["stopped"].startswith(reason)
    assert list(document["stages"]) == ["correctness"]


@pytest.mark.all
def test_a_stage_is_stopped_at_its_limit_with_all_that_it_started(programs: Programs, tmp_path: Path) -> None:
    """What it had found is kept, and the next stage runs."""
    child = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); write({'child': child.pid}); time.sleep(600)"
    )
    begin = time.monotonic()
    document = run(programs, tmp_path, 8.0, tuning=f"print('begins', flush=True); {child}", operator="write({})")
    assert time.monotonic() - begin < 500  # the child is not waited for
    tuning = document["stages"]["tuning"]
    assert (tuning["status"], tuning["last_lines"]) == ("stopped at its limit", ["begins"])
    assert _has_ended(tuning["found"]["child"])
    assert document["stages"]["operator"]["status"] != "failed"


def _has_ended(process: int) -> bool:
    path = Path(f"/proc/{process}/stat")
    for _ in range(50):
        try:
            if path.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.1)
    return False


def test_a_stage_that_fails_says_why_and_the_next_one_runs(programs: Programs, tmp_path: Path) -> None:
    look = "write(json.loads((folder / 'gpu-record.json').read_text())['stages'])"  # it is written after each stage
    document = run(programs, tmp_path, tests="write({'failed': 3}); sys.exit('three failed')", model=look)
    tests = document["stages"]["tests"]
    assert (tests["status"], tests["found"], tests["last_lines"]) == ("failed", {"failed": 3}, ["three failed"])
    assert document["stages"]["model"]["status"] == "finished"
    assert document["stages"]["model"]["found"] == {"tests": tests}


def test_a_rehearsal_does_not_replace_the_real_record(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_record.py", "--rehearsal"])
    with pytest.raises(SystemExit):
        programs("gpu_record").main()
    assert "--rehearsal goes with --output" in capsys.readouterr().err


def test_the_notebook(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells of Python run, with the CPU in the GPU's place, and the record's command is one that there is."""
    notebook = json.loads((BENCHMARKS / "gpu_record.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    commands = [line for text in code for line in text.splitlines() if line.startswith(("!", "%"))]
    (record,) = (line.split() for line in commands if line.startswith("!python"))
    assert (BENCHMARKS.parents[1] / record[1]).samefile(BENCHMARKS / "gpu_record.py")
    monkeypatch.setattr(sys, "argv", record[1:])
    with pytest.raises(SystemExit, match="torch finds no CUDA device"):
        programs("gpu_record").main()
    monkeypatch.chdir(tmp_path)
    shown: list[Any] = []
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Markdown=str))
    (tmp_path / record[-1]).mkdir()
    (tmp_path / record[-1] / "operator-cuda.md").write_text("| a table |", encoding="utf-8")
    for text in code:
        exec("\n".join(line for line in text.splitlines() if line not in commands), {"display": shown.append})
    assert shown == ["| a table |", "The stage model measured nothing."]
    assert "reference  error" in capsys.readouterr().out


# Tuning.


def test_the_fastest_blocks_are_kept_only_where_results_are_right(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    tune = programs("tune_kernels")
    path = tmp_path / "measured_blocks.json"
    before = (
        '{"80": {"forward, narrow heads": [64, 32, 4, 2, false]}, "90": {"save, narrow heads": [64, 64, 4, 2, false]}}'
    )
    path.write_text(before, encoding="utf-8")
    monkeypatch.setattr(tune, "reasons", lambda *_: iter(["forward: its results are wrong"]))
    fastest = {"forward, narrow heads": [64, 64, 4, 2, False]}
    assert tune.keep(tune.REHEARSAL, path, fastest) == {"kept": False, "wrong": ["forward: its results are wrong"]}
    assert path.read_text(encoding="utf-8") == before
    monkeypatch.setattr(tune, "reasons", lambda *_: iter(()))
    assert tune.keep(tune.REHEARSAL, path, fastest)["kept"]
    known = json.loads(before)
    assert json.loads(path.read_text(encoding="utf-8")) == {**known, "90": known["90"] | fastest}


def test_the_kernels_take_measured_blocks(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their own capability, in half precision, without a mask."""
    pytest.importorskip("triton")
    tune = programs("tune_kernels")
    arguments = tune.kernel_arguments
    path = tmp_path / "measured_blocks.json"
    path.write_text('{"90": {"forward, narrow heads": [64, 64, 4, 2, false]}}', encoding="utf-8")
    monkeypatch.setattr(arguments, "MEASURED_BLOCKS", path)
    arguments.measured_blocks.cache_clear()
    try:
        problem = tune.problems(tune.REHEARSAL, 16, "cpu")(4)
        assert problem.blocks("forward") == (64, 64, 4, 2, False)
        assert problem.blocks("save") != (64, 64, 4, 2, False)
        assert problem._replace(capability=80).blocks("forward") != (64, 64, 4, 2, False)
        masked = problem.readable._replace(attn_mask=problem.readable.q)
        assert problem._replace(readable=masked).blocks("forward") != (64, 64, 4, 2, False)
    finally:
        arguments.measured_blocks.cache_clear()


# Kernels compiled ahead of time.


def test_which_compiled_kernels_are_refused(programs: Programs) -> None:
    pytest.importorskip("triton")
    program = programs("kernel_resources")
    row = {"kernel": "forward", "capability": 90, "spilled": 16, "shared": 227 * 1024, "may_spill": False}
    program.require_fitting([row, row | {"slow": ["C7515"]}, row | {"spilled": 400, "may_spill": True}])
    wrong: list[dict[str, Any]] = [{"spilled": 24}, {"shared": 227 * 1024 + 1}, {"slow": ["C7515", "mma.sync"]}]
    for each in (*wrong, {"kernel": "values", "slow": ["C7515"]}):
        with pytest.raises(SystemExit, match="These configurations spill too much"):
            program.require_fitting([row, row | each])


COMPILED = """
    import kernel_resources
    name, launch = next(kernel_resources.launches(kernel_resources.Configuration(64, 128), 90))
    print(*kernel_resources.resources(launch, 90))
"""


@pytest.mark.all
def test_what_ptxas_says_is_read() -> None:
    """Of a forward whose products it serialises, in a process without triton's interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(BENCHMARKS)
    command = [sys.executable, "-c", textwrap.dedent(COMPILED)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    registers, spilled, shared, slow = done.stdout.split()
    assert int(registers) > 100
    assert int(shared) > 2**15
    assert (spilled, slow) == ("0", "['C7515']")


@pytest.mark.all
def test_a_rehearsal_of_everything(tmp_path: Path) -> None:
    """Each stage as on a GPU, with the CPU in its place; many minutes on a busy machine."""
    pytest.importorskip("triton")
    command = [sys.executable, str(BENCHMARKS / "gpu_record.py"), "--rehearsal", "--output", str(tmp_path)]
    done = subprocess.run([*command, "--seconds", "2400"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, textwrap.indent(done.stdout + done.stderr, "> ")
    stages = json.loads((tmp_path / "gpu-record.json").read_text(encoding="utf-8"))["stages"]
    assert {stage["status"] for stage in stages.values()} == {"finished"}
    assert list(stages) == ["correctness", "tests", "tuning", "operator", "model"]
    assert stages["tests"]["found"]["outcomes"] == {"passed": 3}
    assert stages["tuning"]["found"]["kept"]
    assert (tmp_path / "operator-cpu.md").is_file()
    assert (tmp_path / "model-cpu.md").is_file()
