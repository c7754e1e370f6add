"""Settings of a measurement as a user gives them: each is known, of the kind of its default, and not too small."""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

# What a value may be, for one and for several.
_WORDS: dict[type, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    dict: ("a mapping", "mappings"),
}


def chosen_options(given: Mapping[str, Any], defaults: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """All settings: what is given, and the defaults of the others.

    A value is of the kind of its default: true or false, a whole number (how many of something: 1 or more, or 0 where
    that is the default), a number (finite; a whole one will do), text, a mapping, or a list of one or more of a kind.
    Where the default is None it is a whole number or None. None given for text, as the command line reads `NAME=`,
    is "".

    Args:
        given: by name.
        defaults: all that there are.
        whose: the beginning of a sentence: "The measure many_shot".

    Raises:
        ValueError: a name that is not known, or a value of another kind; it says which are allowed.
    """
    refuse_unknown(given, defaults, whose)
    found = dict(defaults)
    for name, value in given.items():
        default = defaults[name]
        found[name] = "" if value is None and isinstance(default, str) else value
        if not _fits(found[name], default):
            # What is text in a shell may be a number in YAML.
            hint = "; in quotation marks a number is text" if isinstance(default, str) else ""
            got = "nothing" if value is None else repr(value)
            raise ValueError(f"{whose} takes {_kind(default)} for {name}, got {got}{hint}.")
    return found


def refuse_unknown(given: Collection[str], known: Collection[str], whose: str) -> None:
    """Raises ValueError for a name that is not known, with the nearest that is."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}."
            raise ValueError(f"{whose} has no option {name!r}; {hint}")


def check_counts(least: int, **counts: int) -> None:
    """Raises ValueError for a number below the least that means anything."""
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"{name} must be {least} or more, got {count}.")


def _fits(value: object, default: object) -> bool:
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple) and len(value) > 0 and all(_fits(part, default[0]) for part in value)
    if default is None:
        return value is None or _fits(value, 1)
    if isinstance(value, bool) or isinstance(default, bool):  # which Python takes for a whole number
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float) and math.isfinite(value)
    if isinstance(default, int):
        return isinstance(value, int) and value >= min(default, 1)
    return isinstance(value, type(default))


def _kind(default: object, several: bool = False) -> str:
    if isinstance(default, list | tuple):
        of = f"of {_kind(default[0], several=True)}"
        return f"lists {of}" if several else f"a list {of} such as {_as_written(default)}"
    if default is None:
        return f"null or {_kind(1, several)}"
    if isinstance(default, int) and not isinstance(default, bool):
        return f"{'whole numbers' if several else 'a whole number'} of {min(default, 1)} or more"
    return _WORDS[type(default)][several]


def _as_written(default: object) -> str:
    """As YAML has it: a tuple is a list."""
    if isinstance(default, list | tuple):
        return f"[{', '.join(map(_as_written, default))}]"
    return str(default)
