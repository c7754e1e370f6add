"""Finds the known name that a mistyped one is nearest to, for messages."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`; None where none is like it."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """The end of a message about an unknown name, "; did you mean 'steps'?", or ``otherwise`` where none is like it."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else otherwise
