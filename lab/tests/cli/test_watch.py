"""`diff-lab watch`: one picture where output goes into a file; in a terminal pictures until the run ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import fails

SECONDS = 120  # a machine may be busy with other tests


def log(folder: Path, step: int, **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text("train:\n  steps: 9\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 5.0 - step / 3, **more}) + "\n")


def test_one_picture_as_plain_text(run: Callable[..., Any], text_run: Path) -> None:
    """Of a run of the training command, as it is."""
    result = run("watch", text_run, "--once")
    assert result.exit_code == 0
    heading, *picture = result.stdout.splitlines()
    assert heading.startswith("text: finished · step 3 of 3 · ")
    for title in ("loss (o: validation) ", "gradient norm ", "learning rate ", "tokens/s ", "λ "):
        assert any(title in line for line in picture)
    assert any(0x2800 < ord(letter) < 0x2900 for line in picture for letter in line)
    assert "\x1b" not in result.stdout
    assert result.stderr == ""
    assert run("watch", text_run).stdout == result.stdout  # no terminal: no second picture


def test_twins_over_each_other(run: Callable[..., Any], text_run: Path, retrieval_run: Path) -> None:
    one, two, *_ = run("watch", text_run, retrieval_run, "--once").stdout.splitlines()
    assert one.startswith("1 text: finished · step 3 of 3")
    assert two.startswith("2 retrieval: finished · step 1 of 1")


def test_nothing_logged_yet(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("train:\n  steps: 9\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    result = run("watch", tmp_path, "--once")
    assert result.stdout.endswith(": running · nothing has been logged yet\n")


def test_bad_input(run: Callable[..., Any], tmp_path: Path, text_run: Path) -> None:
    fails(run("watch", tmp_path / "none"), "none does not exist")
    fails(run("watch", tmp_path), "is not a run folder")
    fails(run("watch", text_run, text_run), "can be watched once")
    log(tmp_path / "broken", 1)
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    fails(run("watch", tmp_path / "broken"), "metrics.jsonl, line 2 is not JSON")
    assert run("watch", text_run, "--interval", "0").exit_code == 2


class Terminal:
    """A command in a terminal of 80 × 24, and what has been drawn so far."""

    def __init__(self, *arguments: str) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self._mine, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        command = [sys.executable, "-m", "diff_transformer.cli", *arguments]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), its)
        self.process = subprocess.Popen(command, **streams, env={**environment, "TERM": "xterm-256color"})
        os.close(its)
        self.drawn = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._mine, 1 << 16):
                self.drawn += part
        except OSError:  # how Linux says that nobody holds the other end any more
            pass

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + SECONDS
        while text.encode() not in self.drawn:
            assert time.monotonic() < end, self.drawn.decode(errors="replace")[-2000:]
            assert self.process.poll() is None, self.drawn.decode(errors="replace")[-2000:]
            time.sleep(0.02)

    def ended(self) -> tuple[int, str]:
        """The exit code, and what stands there after the pictures."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        *_, last = self.drawn.decode(errors="replace").split("\x1b[?1049l")  # the ordinary screen is back
        return code, last

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._mine)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A run of 9 steps, 3 of them logged, watched in a terminal."""
    if sys.platform == "win32":
        pytest.skip("pseudo-terminals are Unix's")
    for step in (1, 2, 3):
        log(tmp_path / "run", step)
    watching = Terminal("watch", str(tmp_path / "run"), "--interval", "0.1")
    yield watching
    watching.close()


def test_pictures_follow_the_run_until_it_ends(terminal: Terminal, tmp_path: Path) -> None:
    terminal.wait_for("step 3 of 9")
    log(tmp_path / "run", 4)
    terminal.wait_for("step 4 of 9")
    log(tmp_path / "run", 9)
    (tmp_path / "run" / "model").mkdir()
    code, last = terminal.ended()
    assert code == 0
    assert "finished · step 9 of 9" in last
    assert "\x1b[" in last  # in colour


def test_ctrl_c_leaves_the_last_picture(terminal: Terminal) -> None:
    terminal.wait_for("step 3 of 9")
    terminal.process.send_signal(signal.SIGINT)
    code, last = terminal.ended()
    assert code == 0
    assert "running · step 3 of 9" in last
    assert "Traceback" not in last
