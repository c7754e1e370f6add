"""`diff-transformer` alone says what to try, in commands that are there and times that they take."""

import shlex
from collections.abc import Callable
from typing import Any

from diff_transformer.cli.app import COMMANDS
from diff_transformer.cli.experiment_commands import demo
from diff_transformer.cli.start_page import TRIALS, start_page
from diff_transformer.lab.experiments.experiment import find_experiment


def test_no_command_shows_three_things_to_try(run: Callable[..., Any]) -> None:
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{start_page()}\n"
    for trial in TRIALS:
        assert f"diff-transformer {trial.command} " in result.stdout
        assert trial.takes in result.stdout
        assert shlex.split(trial.command)[0] in COMMANDS
    assert all(len(line) <= 80 for line in result.stdout.splitlines())


def test_the_times_are_those_of_the_commands() -> None:
    takes = {trial.command: trial.takes for trial in TRIALS}
    assert f"takes {takes['demo']} on two processor cores" in " ".join(str(demo.__doc__).split())
    assert takes["reproduce v2"] == f"{find_experiment('v2').presets['cpu'].minutes:g} minutes"
