"""Names the folder in which the package keeps what it can make again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of all caches: $DIFF_TRANSFORMER_CACHE, or `diff_transformer` in the user's cache."""
    named = os.environ.get("DIFF_TRANSFORMER_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diff_transformer"
