"""The page that `diff-transformer` without a command shows: three things to try, with the times they take."""

from typing import NamedTuple


class Trial(NamedTuple):
    """Something to try."""

    command: str
    takes: str
    shows: str


# On two processor cores. tests/cli/test_start_page.py holds the times to what the commands say themselves.
TRIALS = (
    Trial("explore", "a minute", "trained models in the browser: move λ, and see what the second map does"),
    Trial("demo", "4 to 8 minutes", "a DIFF Transformer and a Transformer learn side by side, and are compared"),
    Trial("reproduce v2", "5 minutes", "an experiment with seeds, intervals and a verdict"),
)


def start_page() -> str:
    """The page, as plain text of at most 80 columns."""
    width = max(len(trial.command) for trial in TRIALS)
    lines = ["Three things to try, with the times they take on two processor cores:", ""]
    for trial in TRIALS:
        lines += [f"  diff-transformer {trial.command:{width}}  {trial.takes}", f"      {trial.shows}", ""]
    lines.append("diff-transformer --help lists all commands, COMMAND --help the options of one.")
    return "\n".join(lines)
