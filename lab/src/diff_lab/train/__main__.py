"""Runs `diff-lab train` for launchers: `torchrun --nproc-per-node K -m diff_lab.train RECIPE`."""

import sys

from diff_lab.cli.app import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="python -m diff_lab.train")
