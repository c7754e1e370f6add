"""The command line `diff-transformer`: modules of commands, each imported when one of its commands is called."""

import logging
import sys

from diff_transformer.cli.extras import missing_extra
from diff_transformer.freed_memory import keep_freed_memory
from diff_transformer.processors import limit_threads

# transformers imports torchao wherever it is installed, and torchao would begin every command with its warnings. Not in
# `main`: a worker process imports this package, as its parent's script does, and does not run it.
for _library in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_library).setLevel(logging.ERROR)


def main() -> None:
    """Run the command line. The exit code is 0, or 2 after an error (one line on stderr), or 130 after Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        # Generated text may hold any character; a terminal that cannot show one shows "?".
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    limit_threads()
    try:
        from diff_transformer.cli.app import TRAINING, app

        if sys.argv[1:2] and sys.argv[1] in TRAINING:
            keep_freed_memory()
        app()
    except ModuleNotFoundError as error:
        advice = missing_extra(error)
        if advice is None:
            raise
        sys.stderr.write(f"error: {advice}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
