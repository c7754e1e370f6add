"""Tells the origin of a number: the device, the versions of packages, and the commit."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path


def check_device(name: str) -> None:
    """Raise ValueError for a device that cannot be used here."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # what torch raises for an unknown name, or a build without it
        raise ValueError(f"The device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def device_name(device: str | None = None) -> str:
    """Return the name of a device: the GPU's, or the processor's with the number of torch's threads."""
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


def installed_version(package: str, otherwise: str = "not installed") -> str:
    """Return the version of an installed package; a source tree may not be one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return otherwise


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that compute."""
    packages = ("diff-transformer", "torch", "transformers")
    return {"python": platform.python_version(), **{name: installed_version(name) for name in packages}}


def git_commit() -> str | None:
    """Return the commit of this file's checkout, with "-dirty" after local changes; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody else's repository: only a tracked file tells of ours.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("describe", "--always", "--abbrev=40", "--exclude=*", "--dirty") or None
    except (OSError, subprocess.SubprocessError):
        return None
