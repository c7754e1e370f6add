import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_fixtures import run
from commands import RETRIEVAL, fails, interrupt

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SCRIPT = str(Path(sys.executable).with_name("diff-lab"))
SMALL = f"{RETRIEVAL}train: {{steps: 2000, learning_rate: 1e-3, inspect_every: null}}\n"


@pytest.mark.all
@pytest.mark.parametrize("begin", [(SCRIPT,), (sys.executable, "-m", "diff_lab.cli")], ids=["script", "module"])
def test_nor_do_the_workers_of_a_command(begin: tuple[str, ...], tmp_path: Path) -> None:
    """Each is a process of its own, which imports transformers anew."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(SMALL, encoding="utf-8")
    command = [*begin, "compare", str(recipe), "--workers", "2", "--seeds", "1", "--learning-rates", "1e-3"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.endswith(": 1 process (cpu), float32\n"):  # a worker says so, and has imported all by then
                process.terminate()
    assert process.returncode == 143, lines
    for word in ("torchao", "site-packages", "deprecated", "Warning", "_pytree"):
        assert word not in "".join(lines)


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["report", "--nonsense"], ["plan", "tiny", "--gpus", "many"], ["tokenizer", "make"], ["plan"]],
    ids=str,
)
def test_a_wrong_command_line_is_one_line(arguments: list[Any]) -> None:
    fails(run(*arguments), " --help.")


def test_no_command_of_a_group_shows_its_help() -> None:
    result = run("tokenizer")
    assert result.exit_code == 2
    assert "Commands" in result.stdout
    assert result.stderr == ""


@pytest.mark.all
def test_ctrl_c_stops_a_training_without_a_traceback(tmp_path: Path, text_file: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "tiny", f"data.paths={text_file}", "train.steps=1000000", "--output", str(folder)]
    metrics = folder / "metrics.jsonl"
    message = interrupt(tmp_path, arguments, lambda: metrics.is_file() and metrics.stat().st_size > 0)
    assert "--resume" in message
