"""The command line `diff-lab`: modules of commands, each imported when one of its commands is called."""

import sys

from diff_transformer.cli import run_program

# Commands that train in their own process, or may. Their files are what they make, and stdout only tells of it.
TRAINING = ("demo", "train", "reproduce", "compare")


def main() -> None:
    """Run the command line `diff-lab`; see :func:`diff_transformer.cli.run_program`."""
    run_program("diff_lab.cli.app", lasts=bool(set(sys.argv[1:2]) & set(TRAINING)))
