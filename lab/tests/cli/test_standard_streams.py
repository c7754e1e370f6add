"""Commands whose output goes nowhere: a terminal that was closed, a reader that has ended, a full disk, no stream."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import commands
import forked
from command_fixtures import run

RECIPE = f"{commands.RETRIEVAL}train: {{steps: 50, learning_rate: 2e-3, inspect_every: null, device: cpu}}\n"
COMPARE = ["--seeds", "1", "--learning-rates", "2e-3", "--option", "sequences=2", "--workers", "1"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def first_words(descriptor: int) -> bytes:
    words = b""
    while len(words) < 20:
        words += os.read(descriptor, 1)
    return words


def ends(process: Any) -> int:
    process.join(commands.SECONDS)
    process.kill()
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.all  # a terminal that is closed is the same to the program, and takes a third of the time
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_reads_the_progress_may_end(command: str, recipe: str, tmp_path: Path) -> None:
    """As `2>&1 | tee` does where it cannot write."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    options = COMPARE if command == "compare" else []
    process = forked.start(pipe, commands.main, [command, recipe, *options, "--output", str(tmp_path / "run")])
    reader = os.open(pipe, os.O_RDONLY)
    first_words(reader)
    os.close(reader)
    assert ends(process) == 0
    made = ["RESULTS.md", "recipe_mine.json"] if command == "compare" else ["model/model.safetensors"]
    for name in made:
        assert (tmp_path / "run" / name).is_file()


def test_a_terminal_may_be_closed(recipe: str, tmp_path: Path) -> None:
    """Where the training is none of its foreground's, or ignores its end."""
    import pty

    mine, its = pty.openpty()
    process = forked.start(
        Path(os.ttyname(its)), commands.main, ["train", recipe, "train.steps=200", "--output", str(tmp_path / "run")]
    )
    first_words(mine)
    os.close(its)
    os.close(mine)
    assert ends(process) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        ("<&- >&- 2>&-", 0, ""),
        ("> /dev/full", 2, "error: [Errno 28] No space left on device\n"),
        ("2> /dev/full", 0, ""),
    ],
)
def test_a_stream_that_is_not_there(streams: str, code: int, said: str, tmp_path: Path) -> None:
    """Nor does a file that is opened later get its number, and what is printed."""
    lines = ["import sys", "from diff_transformer.cli import main", "made = sys.argv.pop(1)"]
    lines += ["try:\n    main()", "finally:\n    open(made, 'w').write('made')\n    print('more')"]
    words = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "made"), "generate", "--list"]
    command = ["bash", "-c", f'"$@" {streams}', "bash", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=commands.SECONDS)
    assert (result.returncode, result.stderr) == (code, said)
    assert (tmp_path / "made").read_text() == "made"


def test_a_full_disk_leaves_no_part_of_a_tokenizer(text_file: Path, tmp_path: Path) -> None:
    command = ["tokenizer", "train", text_file, "--vocab-size", 270, "--output", tmp_path / "made"]
    with commands.largest_file(1000):
        commands.fails(run(*command), "There is no room on the disk: File too large")
    assert list(tmp_path.iterdir()) == []
    assert run(*command).exit_code == 0
