"""FSDP2: which modules are units, and what has to be done to weights that no process holds whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from diff_transformer.nn.precision import KeepsFloat32


def shard(model: Any, device: str, count: int, precision: str) -> None:
    """FSDP2: each decoder layer is a unit, and so is what stays in float32; all the rest is in the root's.

    With bfloat16 the layers' weights travel in it; gradients are added up in float32, and nothing else is cast:
    what is computed in which precision is left to autocast, as in one process.
    """
    mesh = init_device_mesh(device, (count,))
    lean = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in model.modules():
        if isinstance(module, KeepsFloat32) and module._parameters:
            fully_shard(module, mesh=mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=lean)
    fully_shard(model, mesh=mesh)


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """A module whose own sharded parameters are whole, on the CPU and not yet filled; afterwards this process' parts
    of what they were filled with are in the shards.
    """
    shards: dict[str, Any] = {name: part for name, part in module._parameters.items() if isinstance(part, DTensor)}
    for name, part in shards.items():
        module._parameters[name] = nn.Parameter(torch.empty(part.shape, dtype=part.dtype))
    yield
    for name, part in shards.items():
        filled = module._parameters[name]
        assert filled is not None
        parts = filled.detach().chunk(part.device_mesh.size())  # as FSDP2 divides: the last ones may have nothing
        rank = part.device_mesh.get_local_rank()
        if rank < len(parts):
            part.to_local().detach().copy_(parts[rank])
        module._parameters[name] = part


def reshard(model: nn.Module) -> None:
    """Give a model of FSDP2 its parameters back after a pass that no backward pass follows.

    It keeps the weights of the outermost unit whole until then. Whoever asked the model for its parameters would be
    given those, which no optimizer knows, instead of the parts.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_split(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(isinstance(placement, Shard) for placement in tensor.placements)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
