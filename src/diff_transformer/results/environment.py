"""Where numbers come from: command line, device, versions, commit."""

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from diff_transformer.results.records import Comparison, Environment, Result, ResultsFile


def capture_environment(device: str | None = None) -> Environment:
    """What every results file says about its origin; `device` is a torch device string, by default the one in use."""
    versions = {"python": platform.python_version()}
    for package in ("diff-transformer", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            versions[package] = "not installed"
    return Environment(
        command=command_line(),
        device=device_name(device),
        versions=versions,
        commit=_git_commit(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def capture_results(
    title: str,
    settings: Mapping[str, Any],
    records: Sequence[Result],
    device: str | None = None,
    *,
    comparisons: Sequence[Comparison] = (),
    notes: Sequence[str] = (),
) -> ResultsFile:
    """`records` with the environment they were measured in, ready for `write_json(run / "results.json", …)`."""
    return ResultsFile(
        **vars(capture_environment(device)),
        title=title,
        settings=dict(settings),
        records=tuple(records),
        comparisons=tuple(comparisons),
        notes=tuple(notes),
    )


def command_line() -> str:
    """The command as it can be typed again, without the folder that its program lies in."""
    program = Path(sys.argv[0])
    if program.stem in ("__main__", "diff-transformer"):
        return shlex.join(["diff-transformer", *sys.argv[1:]])
    return shlex.join([program.name, *sys.argv[1:]])


def device_name(device: str | None = None) -> str:
    """A device as a reader knows it: the GPU's name, or the processor's with the number of threads torch uses."""
    # Here and not above: reading a results file must not cost an import of torch.
    import torch

    kind = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if kind.type == "cuda":
        return torch.cuda.get_device_name(kind)
    if kind.type != "cpu":
        return f"{kind.type} on {platform.machine()}"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' if threads > 1 else ''}"


def _git_commit() -> str | None:
    """The commit of the checkout that this file belongs to, "-dirty" where it was changed since; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository: only a tracked file tells of ours.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None
    except (OSError, subprocess.SubprocessError):
        return None
