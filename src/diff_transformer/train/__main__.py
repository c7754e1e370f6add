"""Runs `diff-transformer train` for launchers: `torchrun --nproc-per-node K -m diff_transformer.train RECIPE`."""

import sys

from diff_transformer.cli.app import app

if __name__ == "__main__":
    app(["train", *sys.argv[1:]], prog_name="python -m diff_transformer.train")
