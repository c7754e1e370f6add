"""Writes one of our models as a folder to share, with safetensors or as an ONNX graph."""

import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from diff_transformer.convert.conversion import MAX_SHARD_SIZE
from diff_transformer.convert.onnx_graph import export_graph
from diff_transformer.storage.atomic import atomic_directory

CARD = "README.md"
GRAPH = "model.onnx"


def check_shard_size(size: str) -> None:
    """Raise ValueError if this is not a size as transformers reads it."""
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", size):
        raise ValueError(f"The size of a shard must be like '500MB' or '5GB', got {size!r}.")


def export_folder(
    model: Any,
    tokenizer: Any | None,
    target: Path,
    *,
    card: str,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> list[Path]:
    """Write a model, in its dtype, as a folder that ``from_pretrained`` loads.

    Args:
        model: any of our models; it is left as it was.
        tokenizer: saved beside it, if there is one.
        target: the folder to make; it appears when all of it is there.
        card: the text of README.md.
        max_shard_size: most bytes of weights in a file, like "5GB".

    Returns:
        The files.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: ``max_shard_size`` is not a size.
        OSError: the folder cannot be written, e.g. because the disk is full.
    """
    check_shard_size(max_shard_size)
    with atomic_directory(target) as folder:
        try:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(f"The weights cannot be written: {error}") from error
        _save_tokenizer_and_card(folder, tokenizer, card)
    return sorted(target.iterdir())


def export_onnx(model: Any, tokenizer: Any | None, target: Path, *, card: str) -> list[Path]:
    """Write a language model as a folder with an ONNX graph and all that is needed to run it.

    Args: as :func:`export_folder`; and the model as :func:`diff_transformer.convert.onnx_graph.export_graph` takes it.

    Returns:
        The files.

    Raises:
        FileExistsError, OSError: as :func:`export_folder`.
        ModuleNotFoundError, ValueError: as ``export_graph``.
    """
    with atomic_directory(target) as folder:
        export_graph(model, folder / GRAPH)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _save_tokenizer_and_card(folder, tokenizer, card)
    return sorted(target.iterdir())


def _save_tokenizer_and_card(folder: Path, tokenizer: Any | None, card: str) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / CARD).write_text(card, encoding="utf-8")
