"""How far a reader has to go: the files of ours whose functions a call runs, in whatever threads."""

import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

_HOUSES = ("diff_transformer", "diff_lab")


def files_entered(
    call: Callable[[], object], until: str | None = None, *, since: str | None = None, but_for: Iterable[str] = ()
) -> list[str]:
    """Our files, as "ops/functional.py" or "diff_lab/train/loop.py", in the order in which the call enters them.

    Up to the first entry of the function ``until`` and from that of ``since``, where they are named. Functions of the
    names ``but_for`` are other journeys: what they call is left out.
    """
    roots = {name: Path(spec.origin).parent for name in _HOUSES if (spec := find_spec(name)) and spec.origin}
    but_for, entered = set(but_for), dict[str, None]()
    aside: list[FrameType] = []  # the function of another journey that is running
    has_begun, has_arrived = since is None, False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun, has_arrived
        if aside:
            if event == "return" and frame is aside[0]:
                aside.clear()
            return
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        # What runs while a module or a class is made is no function.
        if has_arrived or event != "call" or path.suffix != ".py" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        house = next((name for name, root in roots.items() if path.is_relative_to(root)), None)
        if house is None:
            return
        has_begun = has_begun or code.co_name == since
        if not has_begun:
            return
        file = path.relative_to(roots[house]).as_posix()
        entered[file if house == _HOUSES[0] else f"{house}/{file}"] = None
        has_arrived = code.co_name == until
        if code.co_name in but_for:
            aside.append(frame)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # which ends it
    assert until is None or has_arrived, f"{until} was not reached through {[*entered]}"
    return [*entered]
