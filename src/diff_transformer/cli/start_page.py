"""The page that a program shows without a command: what to try, with the times it takes."""

from collections.abc import Sequence
from typing import NamedTuple


class Trial(NamedTuple):
    """Something to try."""

    command: str
    takes: str
    shows: str


# On two processor cores.
TRIALS = (
    Trial("explore", "a minute", "trained models in the browser: move λ, and see what the second map does"),
    Trial('generate --prompt "It was"', "ten seconds", "a trained model of the package goes on with a text"),
    Trial("info", "ten seconds", "versions, and which backends can run on this machine"),
)


def start_page(program: str, trials: Sequence[Trial]) -> str:
    """The page of a program, as plain text of at most 80 columns."""
    width = max(len(trial.command) for trial in trials)
    lines = ["Three things to try, with the times they take on two processor cores:", ""]
    for trial in trials:
        lines += [f"  {program} {trial.command:{width}}  {trial.takes}", f"      {trial.shows}", ""]
    lines.append(f"{program} --help lists all commands, COMMAND --help the options of one.")
    return "\n".join(lines)
