"""Gives tensor parallelism by transformers' plan the style of parameters that all heads share.

Tensor parallelism gives each rank some of the heads: W_Q, W_K, W_V (and DIFF V2's W_λ) are split by rows, W_O by
columns. The parameters that all heads of a layer share, λ and the weight of the headwise norm, are on every rank, and
each rank's backward pass gives the part of its gradient that comes from its own heads. :class:`SharedParameters` sums
the parts. transformers' own style for that, "replicated_with_grad_allreduce", sums ``.grad`` after it was accumulated:
the second of two backward passes would sum the first one's gradient again.
"""

from typing import Any

import torch.distributed
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedConfig

from diff_transformer.attention_types import ATTENTION_TYPES, SHARED_PARAMETERS
from diff_transformer.nn.layers import ReplicatedAcrossHeads

try:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
except ModuleNotFoundError:  # where earlier releases of transformers 5 have it
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer


def check_ranks(ranks: int, config: PreTrainedConfig) -> None:
    """Refuse, with a ValueError that names the sizes, a number of ranks that cannot take whole heads each."""
    if ranks > 1 and (instead := ATTENTION_TYPES[config.attention_type].parallel_refusal) is not None:
        raise ValueError(
            f"tensor parallelism does not spread attention_type {config.attention_type!r}, asked for on {ranks} ranks; "
            f"{instead}."
        )
    heads = config.get_text_config().num_key_value_heads
    if heads % ranks:
        raise ValueError(
            f"tensor parallelism gives each rank whole key/value heads, and a model of attention_type "
            f"{config.attention_type!r} with num_key_value_heads {config.num_key_value_heads} has {heads}, "
            f"which {ranks} ranks cannot share evenly."
        )


class SumGradient(torch.autograd.Function):
    """The identity; the gradient is summed over the ranks of a process group."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy, as the sum is made in place and autograd may hand the same gradient to others.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SharedParameters(TensorParallelLayer):
    """The style of a :class:`ReplicatedAcrossHeads`: all parameters on every rank, gradients summed over the ranks."""

    def install_forward(self, module: ReplicatedAcrossHeads, mesh: Any) -> ReplicatedAcrossHeads:
        group = mesh.get_group()

        # A closure and no partial: copying a model copies the function as it is, and a process group has no copy.
        def sum_gradient(value: Tensor) -> Tensor:
            needed = torch.is_grad_enabled() and value.requires_grad
            return SumGradient.apply(value, group) if needed else value

        module.sum_gradient = sum_gradient
        return module

    def prepare_module_tp(self, module: ReplicatedAcrossHeads, device_mesh: Any, **kwargs: Any) -> None:
        """Install the forward pass, as earlier releases of transformers 5 ask for it."""
        self.install_forward(module, device_mesh)

    def shard_tensor(self, param: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None) -> Tensor:
        """Load a parameter whole: those releases load a planned parameter through its style."""
        return param[...].to(device=device, dtype=dtype)


# Here, because whoever reads a config's plan has to find the style that it names.
ALL_PARALLEL_STYLES.register(SHARED_PARAMETERS, SharedParameters())
