"""Runs `diff-transformer train` for launchers: `torchrun --nproc-per-node K -m diff_transformer.train RECIPE`."""

import sys

from diff_transformer.cli.app import app
from diff_transformer.freed_memory import keep_freed_memory

if __name__ == "__main__":
    keep_freed_memory()
    app(["train", *sys.argv[1:]], prog_name="python -m diff_transformer.train")
