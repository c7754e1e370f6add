"""Reads what a folder with a model holds: its config.json, and the keys, shapes and tensors of its safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diff_transformer.convert.layout import Header
from diff_transformer.utils.files import read_json
from diff_transformer.utils.suggestions import some

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Names of dtypes in a safetensors header.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """Keys, shapes and dtypes of a folder's tensors, and the tensors one at a time.

    Raises:
        FileNotFoundError: there are no weights, or a file of the index is absent.
        ValueError: a file is damaged or disagrees with the index, weights are pickled or not in floating point.
    """

    def __init__(self, folder: Path) -> None:
        self.files, listed = _files(folder)
        self.headers: dict[str, Header] = {}
        for file in self.files:
            self.headers |= _headers(file)
        if listed is not None and (wrong := sorted(self.headers.keys() ^ listed)):
            raise ValueError(f"{str(folder / INDEX)!r} and the files it names disagree on {some(wrong)}.")

    def read(self, key: str) -> Tensor:
        """One tensor, on the CPU."""
        file = self.headers[key].file
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} cannot be read: {error}.") from None


def read_source_config(source: Path) -> dict[str, Any]:
    """The config.json of a folder. Raises FileNotFoundError, or ValueError where it holds anything else."""
    if not source.is_dir():
        raise FileNotFoundError(f"{str(source)!r} is no folder; name the one that holds {CONFIG} and the weights.")
    if not (source / CONFIG).is_file():
        raise FileNotFoundError(f"{str(source)!r} holds no {CONFIG}.")
    return read_json_object(source / CONFIG)


def read_json_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises FileNotFoundError, or ValueError where it holds anything else."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, got {type(content).__name__}.")
    return content


def _files(folder: Path) -> tuple[list[Path], set[str] | None]:
    """The files, and the keys that an index says are in them."""
    if (folder / INDEX).is_file():
        file_of_key = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(file_of_key, Mapping) or not all(isinstance(name, str) for name in file_of_key.values()):
            raise ValueError(f"{str(folder / INDEX)!r} must say under weight_map which file holds each tensor.")
        names = sorted(set(file_of_key.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{str(folder / INDEX)!r} must name files of its own folder, got {some(outside)}.")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{str(folder)!r} lacks {some(absent)}, which {INDEX} names.")
        return [folder / name for name in names], set(file_of_key)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if pickled := sorted(file.name for pattern in PICKLED for file in folder.glob(pattern)):
        raise ValueError(
            f"The weights in {str(folder)!r} are pickled ({some(pickled)}), and a pickle can run any code when it is "
            "read: save them as safetensors first."
        )
    raise FileNotFoundError(f"{str(folder)!r} holds no weights: neither {WEIGHTS} nor {INDEX}.")


def _headers(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  # not a mapping
            entries = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(file)!r} is no complete safetensors file: {error}.") from None
    if rejected := [f"{key} ({dtype})" for key, (_, dtype) in entries.items() if dtype not in DTYPES]:
        raise ValueError(f"Only {', '.join(DTYPES)} weights are converted, but {str(file)!r} holds {some(rejected)}.")
    return {key: Header(file, shape, DTYPES[dtype]) for key, (shape, dtype) in entries.items()}
