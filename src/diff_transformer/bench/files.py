"""Where results go: a JSON file and the same as Markdown, named by benchmark and device."""

import os
from pathlib import Path
from typing import Any

import torch

from diff_transformer.bench.tables import page
from diff_transformer.results import read_json, write_json, write_text


def results_path(folder: Path, kind: str, device: str, *, overwrite: bool = False) -> Path:
    """The JSON file of a benchmark ("operator" or "model") in a folder, which is made if it is not there.

    Raises:
        ValueError: nothing can be written there, or the file there is not of this benchmark.
        FileExistsError: it is there, or its page, and ``overwrite`` is false.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise ValueError(f"the output must be a folder that can be written, got {str(folder)!r}: {reason}.") from None
    path = folder / f"{kind}-{torch.device(device).type}.json"
    if path.exists():
        _check_ours(path, f"bench {kind}")
    for file in (path, path.with_suffix(".md")):
        if file.exists() and not overwrite:
            raise FileExistsError(
                f"{str(file)!r} is there already; choose another --output, or replace the results with --overwrite."
            )
    return path


def _check_ours(path: Path, title: str) -> None:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or found.get("title") != title:
        raise ValueError(f"{str(path)!r} is no result of {title} and would be replaced; name another output folder.")


def write_document(path: Path, document: dict[str, Any]) -> tuple[Path, Path]:
    """Write a document, and beside it the page made from what was written."""
    write_json(path, document, indent=1)
    return path, write_text(path.with_suffix(".md"), page(read_json(path)))
