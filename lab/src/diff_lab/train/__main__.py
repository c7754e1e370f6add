"""Runs `diff-lab train` for launchers: `torchrun --nproc-per-node K -m diff_lab.train RECIPE`."""

import sys

from diff_lab.cli.app import app
from diff_lab.process import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()
    app(["train", *sys.argv[1:]], prog_name="python -m diff_lab.train")
