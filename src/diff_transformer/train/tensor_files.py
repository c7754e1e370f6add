"""Tensors of several processes in safetensors files, written and read by torch's distributed checkpointing.

A tensor is plain, then all processes have the same, or a `DTensor`, then each has its part. Files are read in any
number of processes and any sharding, whatever wrote them. Nothing is pickled.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from diff_transformer.files import follow_umask
from diff_transformer.train.together import count, is_first, rank, shared_out, together


def is_split(tensors: Iterable[Tensor]) -> bool:
    """Whether each process has a part of some of them only."""
    return any(isinstance(tensor, DTensor) for tensor in tensors)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """How many bytes they have on all processes together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def write_split(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Each process writes its parts into a file of its own in `folder`. Called on every process."""
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))


def write_weights(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Whole tensors in the files and with the index that `from_pretrained` reads. Called on every process.

    Each process writes its share of the tensors: nobody holds more than that, two copies of it while it is written, and
    the one tensor that is being put together.
    """
    numbers = shared_out({name: bytes_of([tensor]) for name, tensor in tensors.items()}, min(count(), len(tensors)))
    files = {name: number + 1 for name, number in numbers.items()}  # from 1, as the writer counts
    own = {}
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if files[name] == rank() + 1:
            own[name] = whole.cpu()
    dcp.save(own, storage_writer=HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files))


def write_plain(file: Path, tensors: dict[str, Tensor]) -> None:
    """The first process writes them all. Called on every process."""
    with together():
        if is_first():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            follow_umask([file])


class TensorFiles:
    """The tensors in the safetensors files of a folder.

    Attributes:
        shapes, dtypes: of the whole tensors, by name.
    """

    def __init__(self, folder: Path) -> None:
        self._reader = HuggingFaceStorageReader(str(folder))
        self._metadata = self._reader.read_metadata()
        entries = self._metadata.state_dict_metadata.items()
        found = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self.shapes: dict[str, torch.Size] = {name: entry.size for name, entry in found.items()}
        self.dtypes: dict[str, torch.dtype] = {name: entry.properties.dtype for name, entry in found.items()}

    def read(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, or this process' parts of them, in place. No process waits for another."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(dict(tensors), self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        plan = self._reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
