"""How far a reader has to go: the files of ours that a call enters, in whatever threads."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import diff_transformer

ROOT = Path(diff_transformer.__file__).parent


def files_entered(call: Callable[[], object], until: str, since: str | None = None) -> list[str]:
    """Our files, in the order in which the call enters them, up to the first entry of the function ``until``.

    Counted from the first entry of the function ``since``, if one is named; threads that begin meanwhile count as well.
    """
    entered: list[str] = []
    has_begun, has_arrived = since is None, False

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun, has_arrived
        path = Path(frame.f_code.co_filename)
        if has_arrived or event != "call" or not path.is_relative_to(ROOT):
            return
        has_begun = has_begun or frame.f_code.co_name == since
        if not has_begun:
            return
        name = path.relative_to(ROOT).as_posix()
        if name not in entered:
            entered.append(name)
        has_arrived = frame.f_code.co_name == until

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # which ends it
    assert has_arrived, f"{until} was not reached through {entered}"
    return entered
