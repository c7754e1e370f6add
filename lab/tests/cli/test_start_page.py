"""A program alone says what to try, in commands that are there and times that they take."""

import shlex
from typing import Any

import pytest
from typer.testing import CliRunner

from diff_lab.cli import app as lab
from diff_lab.cli.experiment_commands import demo
from diff_lab.experiments.definitions import find_experiment
from diff_transformer.cli import app as library
from diff_transformer.cli.app import TRIALS, start_page


@pytest.mark.parametrize(
    ("program", "module", "trials"),
    [("diff-transformer", library, TRIALS), ("diff-lab", lab, lab.TRIALS)],
    ids=["library", "laboratory"],
)
def test_no_command_shows_three_things_to_try(program: str, module: Any, trials: Any) -> None:
    result = CliRunner().invoke(module.app, [])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{start_page(program, trials)}\n"
    for trial in trials:
        assert f"{program} {trial.command} " in result.stdout
        assert trial.takes in result.stdout
        assert shlex.split(trial.command)[0] in module.COMMANDS
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_the_times_are_those_of_the_commands() -> None:
    takes = {trial.command: trial.takes for trial in lab.TRIALS}
    assert f"takes {takes['demo']} on two processor cores" in " ".join(str(demo.__doc__).split())
    assert takes["reproduce v2"] == f"{find_experiment('v2').presets['cpu'].minutes:g} minutes"
