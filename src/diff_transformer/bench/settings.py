"""Checks that both benchmarks make of what they are asked for, before anything is measured."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_choice(what: str, chosen: Sequence[str], allowed: Iterable[str]) -> None:
    """Raises ValueError for a name that is not allowed."""
    names = tuple(allowed)
    for name in chosen:
        if name not in names:
            raise ValueError(f"{what} must be one of {', '.join(map(repr, names))}, got {name!r}.")


def check_dtypes(dtypes: Sequence[str]) -> None:
    """Raises ValueError for a dtype that is not measured."""
    check_choice("dtype", dtypes, DTYPES)


def check_sizes(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, got {size}.")


def check_device(name: str) -> None:
    """Raises ValueError for a device that cannot be used here."""
    try:
        if torch.empty(0, device=name).device.type not in ("cpu", "cuda"):
            raise RuntimeError("it is neither cpu nor cuda")
    except (RuntimeError, AssertionError) as error:  # what torch raises for an unknown name, or a build without it
        raise ValueError(f"the device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None


def with_defaults(device: str, cuda: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and on a CUDA device its defaults for the rest."""
    check_device(device)
    return {**(cuda if torch.device(device).type == "cuda" else {}), **given}


def cuda_versions() -> str:
    """What else kernels on CUDA come from, in a sentence."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, Triton {triton}."
