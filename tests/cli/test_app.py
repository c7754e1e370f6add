import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from commands import fails
from diff_lab.cli import app as lab_app
from diff_transformer._version import __version__
from diff_transformer.cli import EXTRAS, app, missing_extra
from diff_transformer.cli.app import MOVED, with_plain_errors
from diff_transformer.cli.checkpoints import find_checkpoint

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def invoke(*arguments: Any) -> Any:
    """Run a command of the library in this process."""
    return CliRunner().invoke(app.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment, timeout=300)


def outcome(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as end:
        with_plain_errors(command)()
    out, err = capsys.readouterr()
    assert out == ""
    return end.value.exit_code, err


def test_an_error_of_ours_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    code, text = outcome(lambda: str(find_checkpoint(tmp_path)), capsys)
    assert code == 2
    assert re.fullmatch(r"error: '.*config\.json' is not JSON: .*\n", text)


def test_a_file_error_is_one_line_whoever_raised_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = outcome(lambda: str(Path("/nowhere/at all").read_text()), capsys)
    assert (code, text) == (2, "error: [Errno 2] No such file or directory: '/nowhere/at all'\n")


@pytest.mark.parametrize("bug", [lambda: int("three"), lambda: __import__("no_such_module")])
def test_a_bug_is_not_dressed_up_as_bad_input(bug: Callable[[], None]) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError)):
        with_plain_errors(bug)()


@pytest.mark.all
def test_a_command_says_nothing_about_libraries_that_nobody_asked_for(tmp_path: Path) -> None:
    """torchao, which transformers imports wherever it is, would begin each command with what it could not load."""
    code = "import sys; from diff_transformer.cli import main; sys.argv = ['', 'explore', sys.argv[1]]; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: The checkpoint")
    assert result.stderr.count("\n") == 1


def test_a_mistyped_command_is_answered_with_the_nearest() -> None:
    fails(invoke("expolre"), "Did you mean 'explore'")


@pytest.mark.parametrize("command", MOVED)
def test_a_command_that_has_moved_is_answered_with_where_it_went(command: str) -> None:
    fails(invoke(command, "tiny"), f"is `diff-lab {command}` now, which `pip install . ./lab` in a checkout")
    assert command in lab_app.COMMANDS


@pytest.mark.parametrize(
    "arguments", [["generate", "x", "--prompt", "y", "--seed", 10**23], ["export", "x"], ["--nonsense"]], ids=str
)
def test_a_wrong_command_line_is_one_line(arguments: list[Any]) -> None:
    fails(invoke(*arguments), " --help.")


def test_an_interrupt_ends_with_130_and_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt("Stopped after step 3.")

    def silently() -> None:
        raise KeyboardInterrupt

    assert outcome(interrupted, capsys) == (130, "Stopped after step 3.\n")
    assert outcome(silently, capsys) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("program", "arguments", "module", "extra"),
    [
        ("diff_transformer", ["export", "folder", "new", "--onnx"], "onnxscript", ".[onnx]"),
        ("diff_transformer", ["explore", "folder"], "anywidget", ".[explore]"),
        ("diff_lab", ["eval", "folder", "--tasks", "piqa"], "lm_eval", "./lab[harness]"),
    ],
)
def test_a_missing_extra_is_said_before_torch_is_imported(
    program: str, arguments: list[str], module: str, extra: str
) -> None:
    lines = [f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = {arguments!r}"]
    lines += [f"from {program}.cli import main", "try:\n    main()", "finally:\n    print('torch' in sys.modules)"]
    result = python("\n".join(lines))
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert f'which is not installed: pip install "{extra}"' in result.stderr
    assert missing_extra(ModuleNotFoundError(name="torch")) is None


def test_the_extras_are_the_packages_own() -> None:
    for extra, packages in EXTRAS.items():
        required = [line for line in metadata.requires("diff-transformer") or [] if f"extra == '{extra}'" in line]
        names = {re.match(r"[\w.-]+", line)[0].lower() for line in required}  # type: ignore[index]
        assert names == set(packages)


PROGRAMS = {"diff-transformer": app, "diff-lab": lab_app}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_of_every_command_costs_no_torch(program: str) -> None:
    commands = PROGRAMS[program].COMMANDS
    lines = ["import sys", f"from {PROGRAMS[program].__package__} import main"]
    for arguments in (["--help"], *([command, "--help"] for command in commands)):
        lines += [f"sys.argv = {[program, *arguments]!r}", "try:\n    main()", "except SystemExit as end:"]
        lines += ["    assert not end.code", "for heavy in ('torch', 'transformers', 'matplotlib', 'datasets'):"]
        lines += ["    assert heavy not in sys.modules, heavy"]
    result = python("\n".join(lines))
    assert result.returncode == 0, result.stderr
    for command in commands:
        assert f"{program} {command}" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_of_the_table_exists_and_its_help_wraps(program: str) -> None:
    """Lines break at the width of the terminal alone."""
    group: Any = typer.main.get_command(PROGRAMS[program].app)
    for name in PROGRAMS[program].COMMANDS:
        command = group.get_command(None, name)
        assert command.name == name
        for each in (command, *getattr(command, "commands", {}).values()):
            paragraphs = each.help.split("\n\n")
            assert all(paragraphs)
            assert not any("\n" in paragraph for paragraph in paragraphs)
    assert group.get_command(None, "nothing") is None


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_module_runs_as_the_script_does_and_a_letter_that_stdout_cannot_show_is_no_error(program: str) -> None:
    code = f"import runpy, sys; sys.argv[1:] = ['--version']; name = {PROGRAMS[program].__package__!r}"
    code += "\ntry:\n    runpy.run_module(name, run_name='__main__', alter_sys=True)\nfinally:\n    print('λ')"
    result = python(code, PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, f"{program} {__version__}\n?\n")
