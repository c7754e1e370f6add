"""Finds torch's extension cache, and says who can change its files.

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
    """Return torch's extension cache folder, as ``torch.utils.cpp_extension`` does, which takes long to import."""
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
    """Return why ``library``, an absolute path without links to its folder, must be neither loaded nor written.

    It is a sentence without its full stop, with the remedy; an OSError if a folder on the way cannot be entered.

    The rule is ssh's for its keys: the file, its folder and all folders above belong to this user or to root, and
    nobody else may write to them. Above the library's own folder a sticky one, such as /tmp, may be open to everybody:
    there, nobody can rename or remove the files of others. A path that does not exist yet is left out.
    """
    trusted_users = {0, os.geteuid()}
    real = Path(os.path.realpath(library))  # where the library is a link, both ends of it count
    paths = (library, *library.parents, real, *real.parents)
    status = {path: os.lstat(path) for path in paths if _exists(path)}
    # In a container without root's rights, the host's folders, "/" among them, belong to a user that stands for all
    # who are unknown there. It may own the way to the cache, not what lies in the library's folder.
    trusted_above = trusted_users | {os.lstat("/").st_uid}
    innermost = {library, library.parent, real, real.parent}
    foreign = [
        path
        for path, stats in status.items()
        if stats.st_uid not in (trusted_users if path in innermost else trusted_above)
    ]
    if foreign:
        return (
            f"{_described(foreign[0], status[foreign[0]])}, who may put any code there: name a folder of your own in "
            "the environment variable TORCH_EXTENSIONS_DIR"
        )
    writable = [
        path for path, stats in status.items() if _others_write(stats, sticky_is_fine=path not in innermost)
    ]  # fmt: skip
    if writable:
        return (
            f"{_described(writable[0], status[writable[0]])}, so that others may put any code there: run "
            f"`chmod go-w {shlex.join(map(str, writable))}` and compile again with `diff-transformer build --force`, "
            "or name another folder in the environment variable TORCH_EXTENSIONS_DIR"
        )
    return None


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not _exists(path):
            path.mkdir(mode=0o700, exist_ok=True)  # another process may be as far


def _exists(path: Path) -> bool:
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _others_write(stats: os.stat_result, *, sticky_is_fine: bool) -> bool:
    if stat.S_ISLNK(stats.st_mode):  # its permissions mean nothing; those of what it names count
        return False
    if sticky_is_fine and stat.S_ISDIR(stats.st_mode) and stats.st_mode & stat.S_ISVTX:
        return False
    return bool(stats.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def _described(path: Path, stats: os.stat_result) -> str:
    return f"{path} belongs to user {stats.st_uid} with mode {stat.S_IMODE(stats.st_mode):04o}"
