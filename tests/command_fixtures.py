"""The command lines in this process, and models small enough to train in a test: fixtures for conftest files."""

from pathlib import Path
from typing import Any

import pytest
import transformers  # noqa: F401  # its log handler takes the stderr of the moment, which must not be a runner's
from typer.testing import CliRunner

from diff_lab.cli.app import app as lab_app
from diff_transformer.cli.app import COMMANDS, app

TINY = ["model.hidden_size=16", "model.intermediate_size=16", "data.batch_size=2", "data.validation_tokens=256"]


def run(*arguments: Any) -> Any:
    """Run a command, the laboratory's unless it is the library's; the result has exit_code, stdout and stderr.

    What the command line lets through is raised.
    """
    program = app if arguments and arguments[0] in COMMANDS else lab_app
    result = CliRunner().invoke(program, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def _one_worker(one_worker: None) -> None:
    """For every test of a command."""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {number}: to be, or not to be\n" for number in range(400)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """The folder of a finished run on text."""
    folder = tmp_path_factory.mktemp("runs") / "text"
    settings = [f"data.paths={text_file}", "train.steps=3", "train.checkpoint_every=2"]
    assert run("train", "tiny", *TINY, *settings, "--output", folder).exit_code == 0
    return folder


@pytest.fixture(scope="session")
def retrieval_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run on the retrieval task: its model has no tokenizer."""
    folder = tmp_path_factory.mktemp("runs") / "retrieval"
    sizes = ["model.hidden_size=16", "model.head_dim=8", "model.num_hidden_layers=1", "data.length=40"]
    settings = ["data.batch_size=2", "data.validation_sequences=4", "train.steps=1", "train.warmup_steps=0"]
    assert run("train", "retrieval", *sizes, *settings, "--output", folder).exit_code == 0
    return folder
