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
    trusted = {0, os.geteuid()}
    real = Path(os.path.realpath(library))  # where the library is a link, both ends of it count
    innermost = {library, library.parent, real, real.parent}
    for path in (library, *library.parents, real, *real.parents):
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        # In a container without root's rights, the host's folders, "/" among them, belong to a user that stands for all
        # who are unknown there. It may own the way to the cache, not what lies in the library's folder.
        owners = trusted if path in innermost else trusted | {os.lstat("/").st_uid}
        is_sticky = path not in innermost and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky
        if stat.S_ISLNK(status.st_mode):  # its permissions mean nothing; those of the path that it names count
            is_open = False
        if status.st_uid in owners and not is_open:
            continue
        mend = f"run `chmod go-w {shlex.quote(str(path))}` and compile again with `diff-transformer build --force`, or "
        return (
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, so that others may "
            f"put any code there: {mend if status.st_uid in owners else ''}name another folder in the environment "
            "variable TORCH_EXTENSIONS_DIR"
        )
    return None


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)  # another process may be as far
