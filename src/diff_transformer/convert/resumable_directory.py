"""Makes a folder file by file, so that its making can be interrupted and resumed."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from diff_transformer.utils.files import atomic_file, commit, read_json, refuse_existing, unfinished_path


class ResumableDirectory:
    """The files of a folder to be, in a sibling ``.unfinished-NAME``, until the folder gets its name at the end.

    A file has its name only when it is complete, so a file that is present is never made again. What an interrupted
    making left is used only if it was made for the same ``job``: what is made of what, as JSON can hold it. Where the
    folder exists, FileExistsError is raised.
    """

    def __init__(self, target: Path, job: Mapping[str, Any]) -> None:
        self.target, self.job = target, dict(job)
        self._sibling = unfinished_path(target)
        self._files, self._job_file = self._sibling / "files", self._sibling / "job.json"
        refuse_existing(target)

    def finished(self) -> set[str]:
        """Names of the files that an interrupted job like this one has left."""
        return {file.name for file in self._files.iterdir()} if self._is_same_job() else set()

    @contextmanager
    def started(self) -> Iterator[set[str]]:
        """Resume an interrupted job like this one, or begin anew; no other process makes the folder meanwhile.

        Yields the names of the files that are present. Raises FileExistsError where another process is making this
        folder, or has made it.
        """
        self._sibling.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self._sibling / "lock").acquire(blocking=False)  # a process that ends loses it
        except Timeout:
            raise FileExistsError(
                f"{str(self.target)!r} is being made by another process; wait for it, or name another folder."
            ) from None
        with lock:
            refuse_existing(self.target)
            if not self._is_same_job():
                self._job_file.unlink(missing_ok=True)  # first, or it would speak for files that are gone
                shutil.rmtree(self._files, ignore_errors=True)
                self._files.mkdir()
                self._job_file.write_text(json.dumps(self.job), encoding="utf-8")
            yield self.finished()
        shutil.rmtree(self._sibling)

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        """Make a file of the folder, or of a folder in it, complete or not at all; `fill` writes it at a path."""
        try:
            (self._files / name).parent.mkdir(exist_ok=True)
            with atomic_file(self._files / name) as unfinished:
                fill(unfinished)
        except (OSError, SafetensorError) as error:  # the latter is what safetensors makes of a full disk
            reason = str(error).rstrip(".")
            raise OSError(
                f"{name} could not be written ({reason}); the finished files stay in {str(self._sibling)!r}, and the "
                "same command goes on from there."
            ) from error

    def finish(self) -> None:
        """Give the folder its name."""
        commit(self._files, self.target)

    def _is_same_job(self) -> bool:
        try:
            is_same = read_json(self._job_file) == self.job
        except (OSError, ValueError):  # there is none, or its writing was interrupted
            return False
        return is_same and self._files.is_dir()  # without, it has its name already, and what is left was not removed
