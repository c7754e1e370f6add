"""The state of optimizers by the names of the model's parameters: the same however a model is split, or was."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from diff_transformer.train.tensor_files import TensorFiles


def by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Tensor]]
) -> dict[str, Tensor]:
    """An optimizer's state by "parameter/key", from what its state dictionary counts in the order of the groups."""
    names = _parameter_names(model, optimizer)
    return {f"{names[index]}/{key}": tensor for index, entry in state.items() for key, tensor in entry.items()}


def _parameter_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


def reshard(model: nn.Module) -> None:
    """After a forward pass alone, FSDP2 leaves whole copies in the places of some parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Each parameter belongs to one optimizer, so names do not meet."""
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        tensors |= by_name(model, optimizer, optimizer.state_dict()["state"])
    return tensors


def empty_state(model: nn.Module, optimizer: torch.optim.Optimizer, files: TensorFiles) -> dict[int, dict[str, Tensor]]:
    """Tensors for the state that files hold, split as the parameters are; by number, as in a state dictionary."""
    keys: dict[str, list[str]] = {}
    for full_name in files.shapes:
        name, _, key = full_name.rpartition("/")
        keys.setdefault(name, []).append(key)
    state: dict[int, dict[str, Tensor]] = {}
    names = _parameter_names(model, optimizer)
    for index, (name, parameter) in enumerate(zip(names, _parameters(optimizer), strict=True)):
        for key in keys.get(name, ()):
            shape, dtype = files.shapes[f"{name}/{key}"], files.dtypes[f"{name}/{key}"]
            like_it = shape == parameter.shape  # a number that counts steps is not
            empty = torch.empty_like(parameter.detach(), dtype=dtype) if like_it else torch.empty(shape, dtype=dtype)
            state.setdefault(index, {})[key] = empty
    return state
