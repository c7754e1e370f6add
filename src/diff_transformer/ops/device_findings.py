"""Remembers what was found out about a CUDA device: whether the Triton kernels are right on it, and what is faster.

A file in the folder of caches holds it, whose name is a hash of the device and of all versions that it depends on, the
kernels' sources among them. So another version of any of them finds everything out again.
"""

import functools
import hashlib
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

KERNELS = Path(__file__).with_name("triton")
VERDICTS, TIMES = "verdicts", "times"


class Findings:
    """By kind (:data:`VERDICTS` or :data:`TIMES`) and name. They are kept in memory where no file can be written."""

    def __init__(self, about: dict[str, str], folder: Callable[[], Path]) -> None:
        self.about = about
        self._folder = folder
        self._known: dict[str, dict[str, Any]] = self._read()

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:16]
        return self._folder() / "devices" / f"{digest}.json"

    def of(self, kind: str) -> dict[str, Any]:
        """All of a kind, by name."""
        return self._known[kind]

    def add(self, kind: str, name: str, value: Any) -> None:
        """Remember it, beside what other processes have found out by now."""
        from diff_transformer.storage.files import write_atomically

        of_others = self._read()
        for each in (VERDICTS, TIMES):
            self._known[each] = {**of_others[each], **self._known[each]}
        self._known[kind][name] = value
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"about": self.about, **self._known}, indent=1) + "\n"
            write_atomically(self.path, text, concurrent=True)
        except OSError:  # a cache that cannot be written costs the next process a second, and nothing else
            pass

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {kind: dict(found[kind]) for kind in (VERDICTS, TIMES)}
        except (OSError, ValueError, KeyError, TypeError):  # absent, or not as it was written
            return {VERDICTS: {}, TIMES: {}}


def _cache_folder() -> Path:
    from diff_transformer.storage.cache_folder import cache_folder

    return cache_folder()


@functools.cache
def findings_of(index: int) -> Findings:
    """Those of the CUDA device of this number."""
    return Findings(versions_of(index), _cache_folder)


def versions_of(index: int) -> dict[str, str]:
    """What the findings depend on: the device and all that is compiled, or compiles, for it."""
    sources = hashlib.sha256()
    for path in sorted(KERNELS.iterdir()):
        if path.suffix in (".py", ".json"):
            sources.update(path.read_bytes())
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "device": torch.cuda.get_device_name(index),
        "capability": f"{major}.{minor}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "triton": metadata.version("triton"),
        "kernels": sources.hexdigest()[:16],
    }
