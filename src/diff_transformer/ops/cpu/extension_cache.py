"""torch's extension cache: where it is, and who can change what lies in it.

To load a library is to run it, so whoever can write to it, or put another in its place, runs code as its user.
"""

import os
import shlex
import stat
import sys
from pathlib import Path

import torch
import torch._appdirs


def cache_folder() -> Path:
    """The folder of torch's extension cache. ``torch.utils.cpp_extension`` says the same, but takes long to import."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named is not None:
        return Path(named).absolute()
    if torch.version.hip is not None:
        accelerator = f"rocm{torch.version.hip.replace('.', '')}"
    elif torch.version.cuda is not None:
        accelerator = f"cu{torch.version.cuda.replace('.', '')}"
    else:
        accelerator = "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(os.path.realpath(torch._appdirs.user_cache_dir(appname="torch_extensions"))) / f"{python}_{accelerator}"


def refusal(library: Path) -> str | None:
    """Why ``library``, an absolute path without symbolic links to its folder, must be neither loaded nor written.

    The rule is ssh's for its keys: the file, its folder and all folders above belong to this user or to root, and
    nobody else may write to them. Above the library's own folder a sticky one, such as /tmp, may be open to everybody:
    there, nobody can rename or remove what belongs to others. What does not exist yet is left out.

    Returns:
        A sentence without its full stop that says what to do about it; None where nothing is wrong.

    Raises:
        OSError: a folder on the way cannot be entered.
    """
    ours = {0, os.geteuid()}
    real = Path(os.path.realpath(library))  # where the library is a link, both ends of it count
    found = {place: os.lstat(place) for path in (library, real) for place in (path, *path.parents) if _is_there(place)}
    # In a container without root's rights, the host's folders, "/" among them, belong to a user that stands for all
    # who are unknown there. It may own the way to the cache, not what lies in the library's folder.
    above = ours | {os.lstat("/").st_uid}
    own = {library, library.parent, real, real.parent}
    foreign = [place for place, seen in found.items() if seen.st_uid not in (ours if place in own else above)]
    if foreign:
        return (
            f"{_described(foreign[0], found[foreign[0]])}, who may put any code there: name a folder of your own in "
            "the environment variable TORCH_EXTENSIONS_DIR"
        )
    written = [place for place, seen in found.items() if _others_write(seen, sticky_is_fine=place not in own)]
    if written:
        return (
            f"{_described(written[0], found[written[0]])}, so that others may put any code there: run "
            f"`chmod go-w {shlex.join(map(str, written))}` and compile again with `diff-transformer build --force`, or "
            "name another folder in the environment variable TORCH_EXTENSIONS_DIR"
        )
    return None


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone, whatever the umask."""
    for place in (*reversed(folder.parents), folder):
        if not _is_there(place):
            place.mkdir(mode=0o700, exist_ok=True)  # another process may be as far


def _is_there(place: Path) -> bool:
    try:
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _others_write(seen: os.stat_result, *, sticky_is_fine: bool) -> bool:
    if stat.S_ISLNK(seen.st_mode):  # its permissions mean nothing; those of what it names count
        return False
    if sticky_is_fine and stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX:
        return False
    return bool(seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _described(place: Path, seen: os.stat_result) -> str:
    return f"{place} belongs to user {seen.st_uid} with mode {stat.S_IMODE(seen.st_mode):04o}"
