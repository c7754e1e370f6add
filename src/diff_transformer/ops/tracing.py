"""Whether a call is an ordinary one, whose values may be looked at and whose results may be kept."""

import torch
from torch import Tensor

_TRACING = (
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.FAKE,
)


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Whether nobody traces or transforms this call: no torch.compile, torch.func, make_fx or tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    if any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING):
        return False
    return all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
