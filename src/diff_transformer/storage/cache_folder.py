"""Names the folder in which the package keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of all caches: $DIFF_TRANSFORMER_CACHE, or `diff_transformer` in the user's cache.

    Raises OSError where none is named and the user has no home.
    """
    named = os.environ.get("DIFF_TRANSFORMER_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diff_transformer"
    except RuntimeError:
        raise OSError(
            "This user has no home folder to keep prepared data in: the environment variable DIFF_TRANSFORMER_CACHE "
            "names another one."
        ) from None
