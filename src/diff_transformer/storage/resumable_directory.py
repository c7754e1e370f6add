"""A folder whose making can be interrupted and resumed, file by file."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from diff_transformer.storage.atomic import atomic_file, commit, refuse_existing, unfinished_path


class ResumableDirectory:
    """The files of a folder to be, in a sibling ``.unfinished-NAME``, until the folder gets its name at the end.

    A file has its name only when it is complete, so a file that is present is never made again. What an interrupted
    making left is used only if it was made for the same ``job``.

    Args:
        target: the folder to be; it must not exist.
        job: what is made of what, as JSON can hold it.

    Raises:
        FileExistsError: ``target`` exists.
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

        Yields:
            Names of the files that are present.

        Raises:
            FileExistsError: another process is making this folder, or has made it.
        """
        self._sibling.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._sibling / "lock")  # the operating system takes it from a process that ends
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise FileExistsError(
                f"{str(self.target)!r} is being made by another process; wait for it, or name another folder."
            ) from None
        try:
            refuse_existing(self.target)
            if not self._is_same_job():
                self._job_file.unlink(missing_ok=True)  # first, or it would speak for files that are gone
                shutil.rmtree(self._files, ignore_errors=True)
                self._files.mkdir()
                self._job_file.write_text(json.dumps(self.job), encoding="utf-8")
            yield self.finished()
        finally:
            lock.release()
        shutil.rmtree(self._sibling)

    def write(self, name: str, fill: Callable[[Path], object]) -> None:
        """Make a file, complete or not at all.

        Args:
            name: of the file, in the folder or in a folder of it.
            fill: writes the file at the path that it is given.

        Raises:
            OSError: it could not be written, e.g. because the disk is full.
        """
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
        if not self._files.is_dir():  # it has its name already, and what is left here was not removed
            return False
        try:
            return bool(json.loads(self._job_file.read_text(encoding="utf-8")) == self.job)
        except (OSError, ValueError):  # there is none, or its writing was interrupted
            return False
