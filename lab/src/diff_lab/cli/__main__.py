"""Runs the command line as `python -m diff_lab.cli`, if the script `diff-lab` is not on the path."""

import sys

from diff_lab.cli import main

if __name__ == "__main__":
    # A worker process imports a script, but no module of this name: without its specification this one is a script.
    sys.modules[__name__].__spec__ = None
    main()
