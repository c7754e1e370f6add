"""Parts of messages: the known name that a mistyped one is nearest to, and values and lists in short."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`; None if none is like it."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str = ".") -> str:
    """Return the end of a message on an unknown name, "; did you mean 'steps'?", or ``otherwise`` if none is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else otherwise


def quoted(value: Any, most: int = 60) -> str:
    """Return a value as Python writes it, of which a long one is cut: it may be a whole book."""
    text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def some(names: Iterable[str], most: int = 20) -> str:
    """List names for a message: all of them, unless there are very many."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
