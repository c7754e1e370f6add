"""Runs the command line as `python -m diff_transformer.cli`, if the script `diff-transformer` is not on the path."""

from diff_transformer.cli import main

if __name__ == "__main__":
    main()
