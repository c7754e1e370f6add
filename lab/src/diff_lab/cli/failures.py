"""Says what went wrong with one of several experiments, so that the others are carried out all the same."""

import traceback
from collections.abc import Sequence

from diff_transformer.cli.app import user_message


def message_among(error: Exception, count: int) -> str:
    """What is told of one of `count` experiments that failed: a sentence, or of a bug or a full memory where it was.

    Raises the error again where it is the only one, or where nobody reads what is printed any more.
    """
    if count == 1 or isinstance(error, BrokenPipeError):
        raise error
    message = user_message(error)
    return "".join(traceback.format_exception(error)).rstrip() if message is None else message


def refuse_failed(failed: Sequence[str], count: int, done: str) -> None:
    """Raises ValueError where some of `count` experiments could not be "carried out", or whatever is `done`."""
    if failed and count > 1:
        raise ValueError(f"{len(failed)} of {count} experiments could not be {done}: {', '.join(failed)}.")
