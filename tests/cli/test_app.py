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

import fresh
from commands import fails, interrupt
from diff_transformer._version import __version__
from diff_transformer.cli import app
from diff_transformer.cli.app import COMMANDS, Commands, with_plain_errors
from diff_transformer.cli.checkpoints import find_checkpoint
from diff_transformer.cli.extras import TRAIN_EXTRA, missing_extra
from diff_transformer.train import TrainingInterrupted

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SCRIPT = str(Path(sys.executable).with_name("diff-transformer"))
SMALL = """
name: mine
model: {hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, head_dim: 8}
data: {kind: retrieval, length: 32, num_pairs: 2, batch_size: 2, validation_sequences: 4}
train: {steps: 2000, learning_rate: 1e-3, inspect_every: null}
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment, timeout=300)


def test_help_of_every_command_costs_no_torch() -> None:
    lines = ["import sys", "from diff_transformer.cli import main"]
    for arguments in (["--help"], *([command, "--help"] for command in COMMANDS)):
        lines += [f"sys.argv = {['diff-transformer', *arguments]!r}", "try:\n    main()", "except SystemExit as end:"]
        lines += ["    assert not end.code", "for heavy in ('torch', 'transformers', 'matplotlib', 'datasets'):"]
        lines += ["    assert heavy not in sys.modules, heavy"]
    result = python("\n".join(lines))
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert f"diff-transformer {command}" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_breaks_lines_at_the_width_of_the_terminal_alone(name: str) -> None:
    command = Commands().get_command(None, name)
    for each in (command, *getattr(command, "commands", {}).values()):
        paragraphs = each.help.split("\n\n")
        assert all(paragraphs)
        assert not any("\n" in paragraph for paragraph in paragraphs)


def test_the_module_runs_as_the_script_does() -> None:
    command = [sys.executable, "-m", "diff_transformer.cli", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, f"diff-transformer {__version__}\n")


def test_a_command_says_nothing_about_libraries_that_nobody_asked_for(tmp_path: Path) -> None:
    """torchao, which transformers imports wherever it is, would begin each command with what it could not load."""
    code = "import sys; from diff_transformer.cli import main; sys.argv = ['', 'eval', sys.argv[1]]; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert result.returncode == 2
    assert result.stderr.startswith("error: The checkpoint")
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("begin", [(SCRIPT,), (sys.executable, "-m", "diff_transformer.cli")], ids=["script", "module"])
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


def test_a_mistyped_command_is_answered_with_the_nearest(run: Callable[..., Any]) -> None:
    fails(run("trian"), "Did you mean 'train'? See ")


def test_an_option_that_does_not_exist_is_an_error_on_stderr(run: Callable[..., Any]) -> None:
    fails(run("report", "--nonsense"), "--nonsense", "See ", " report --help.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "tiny", "--gpus", "many"],
        ["reproduce", "--preset", "huge"],
        ["generate", "x", "--prompt", "y", "--seed", 10**23],
        ["tokenizer", "make"],
        ["tokenizer", "train", "--vocab-size"],
        ["--nonsense"],
    ],
    ids=str,
)
def test_a_wrong_command_line_is_one_line(arguments: list[Any], run: Callable[..., Any]) -> None:
    fails(run(*arguments), " --help.")


def test_no_command_of_a_group_shows_its_help(run: Callable[..., Any]) -> None:
    result = run("tokenizer")
    assert result.exit_code == 2
    assert "Commands" in result.stdout
    assert result.stderr == ""


def outcome(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(typer.Exit) as end:
        with_plain_errors(command, "train")()
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


@pytest.mark.parametrize(
    "bug",
    [
        lambda: int("three"),
        lambda: __import__("no_such_module"),
        lambda: 1 / 0,
        lambda: (_ for _ in ()).throw(BrokenPipeError()),
    ],
)
def test_a_bug_is_not_dressed_up_as_bad_input(bug: Callable[[], None]) -> None:
    with pytest.raises((ValueError, ModuleNotFoundError, ZeroDivisionError, BrokenPipeError)):
        with_plain_errors(bug, "train")()


def test_an_interrupt_ends_with_130_and_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise TrainingInterrupted("Stopped after step 3.")

    def silently() -> None:
        raise KeyboardInterrupt

    assert outcome(interrupted, capsys) == (130, "Stopped after step 3.\n")
    assert outcome(silently, capsys) == (130, "Interrupted.\n")


def test_a_missing_extra_is_named_with_its_cure(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("diff_transformer.lab.report")]:
        monkeypatch.delitem(sys.modules, name)
    result = run("report", tmp_path)
    assert result.exit_code == 2
    advice = 'error: This command needs matplotlib, which is not installed: pip install ".[train]" in a checkout'
    assert result.stderr.startswith(advice)
    assert missing_extra(ModuleNotFoundError(name="torch")) is None


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["train", "tiny"], "matplotlib"),
        (["tokenizer", "train"], "datasets"),
        (["eval", "folder", "--tasks", "piqa"], "lm_eval"),
        (["export", "folder", "new", "--onnx"], "onnxscript"),
    ],
)
def test_a_missing_extra_is_said_before_torch_is_imported(arguments: list[str], module: str) -> None:
    lines = [f"import sys; sys.modules[{module!r}] = None; sys.argv[1:] = {arguments!r}"]
    lines += [
        "from diff_transformer.cli import main",
        "try:\n    main()",
        "finally:\n    print('torch' in sys.modules)",
    ]
    result = python("\n".join(lines))
    assert (result.returncode, result.stdout) == (2, "False\n")
    assert "which is not installed: pip install" in result.stderr


def test_a_tokenizer_is_trained_without_what_only_training_needs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be, or not to be")
    words = ["tokenizer", "train", str(tmp_path / "a.txt"), "--vocab-size", "258", "--output", str(tmp_path / "made")]
    code = f"import sys; sys.modules['tensorboard'] = None; sys.argv[1:] = {words!r}\n"
    result = fresh.run(f"{code}from diff_transformer.cli import main; main()")
    assert result.returncode == 0, result.stderr


def test_info_needs_no_extra(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("info").exit_code == 0


@pytest.mark.parametrize("module", ["typer", "pydantic"])  # which typer imports as late as it reads arguments
def test_without_what_reads_arguments_the_command_says_what_to_install(module: str) -> None:
    code = f"import sys; sys.modules['{module}'] = None; sys.argv[1:] = ['generate', 'nosuch', '--prompt', 'to be']\n"
    result = python(f"{code}from diff_transformer.cli import main; main()")
    assert result.returncode == 2
    if module == "typer" or "needs" in result.stderr:  # older versions of typer do without pydantic
        advice = f'This command needs {module}, which is not installed: pip install ".[train]" in a checkout'
        assert result.stderr.startswith(f"error: {advice}")


def test_the_extra_is_the_packages_own() -> None:
    required = [line for line in metadata.requires("diff-transformer") or [] if "extra == 'train'" in line]
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in required}  # type: ignore[index]
    assert names == set(TRAIN_EXTRA.values())


def test_every_command_of_the_table_exists() -> None:
    group = typer.main.get_command(app.app)
    for name in COMMANDS:
        command = group.get_command(None, name)
        assert command.name == name
        assert command.help
    assert group.get_command(None, "nothing") is None


def test_a_letter_that_stdout_cannot_show_is_no_error() -> None:
    lines = ["import sys; sys.argv[1:] = ['--version']", "from diff_transformer.cli import main"]
    lines += ["try:\n    main()", "finally:\n    print('λ')"]
    result = python("\n".join(lines), PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout) == (0, f"diff-transformer {__version__}\n?\n")


def test_ctrl_c_stops_a_training_without_a_traceback(tmp_path: Path, text_file: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["train", "tiny", f"data.paths={text_file}", "train.steps=1000000", "--output", str(folder)]
    metrics = folder / "metrics.jsonl"
    message = interrupt(tmp_path, arguments, lambda: metrics.is_file() and metrics.stat().st_size > 0)
    assert "--resume" in message
