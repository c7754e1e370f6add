"""Computes the normalisation and the rotary embedding as functions of tensors; a block without autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from diff_transformer.ops.attention_request import is_floating


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Switch autocast off, on a type of device that has it: "meta" has none."""
    available = torch.amp.is_autocast_available(device)
    return torch.autocast(device, enabled=False) if available else nullcontext()


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis, computed in float32 at least.

    Args:
        x: (…, n), floating, of 16 bits or more.
        weight: (n,), floating as well, or None for a weight of 1.
        eps: added to the mean square; the paper's code uses 1e-5.

    Returns:
        (…, n) in the dtype of ``x``.

    Raises:
        ValueError: another dtype.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor is not None and not is_floating(tensor):
            raise ValueError(f"{name} must be floating, of 16 bits or more, got {tensor.dtype}.")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(x.dtype)


def rotary_tables(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles positions · theta^(−2i / head_dim).

    Args:
        positions: (…, N) token positions, any real dtype.
        head_dim: width d of a head; even.
        theta: base of the frequencies.

    Returns:
        cos and sin, each (…, N, d) in float32; the two halves of the last axis are equal.

    Raises:
        ValueError: if ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for a rotary embedding, got {head_dim}.")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return computed_once(angles.cos(), positions), computed_once(angles.sin(), positions)


def computed_once(table: Tensor, positions: Tensor) -> Tensor:
    """The cosines or sines `table` of `positions`, which torch.compile shall not compute anew for every head.

    On a CPU, torch.compile merges them into the loops that read them, since it takes a cosine for as cheap as an
    addition: a ninth of V2's training step with heads of 8 (docs/log.md). It does not look into an operator. The
    operator has no derivatives, and integer positions need none; tables of others are left to torch.compile.
    """
    compiles = torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()
    return _stored(table) if compiles and table.device.type == "cpu" and not positions.is_floating_point() else table


@torch.library.custom_op("diff_transformer::stored_table", mutates_args=())
def _stored(table: Tensor) -> Tensor:
    return table.clone()


@_stored.register_fake
def _(table: Tensor) -> Tensor:
    return torch.empty_like(table)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every pair (x_i, x_{i + d/2}) of the last axis by its angle.

    Args:
        x: (…, N, d).
        cos, sin: (…, N, d), broadcastable to ``x``.

    Returns:
        Like ``x``.

    Raises:
        ValueError: an odd d, or ``cos`` or ``sin`` of another width.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"what is rotated must have an even last axis, got {tuple(x.shape)}.")
    if cos.shape[-1] != x.shape[-1] or sin.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"cos and sin must be as wide as what they rotate, d = {x.shape[-1]}, got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}."
        )
    # chunk and not slices: its gradient is one concatenation, where torch.compile makes of those of slices a loop that
    # takes four times as long for narrow heads on a CPU (docs/log.md).
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
