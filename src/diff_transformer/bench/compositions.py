"""How torch's own attention computes the twin, and how others put differential attention together from it.

Each function takes the inputs in the layout that suits it, λ (B, H, N), and whether the queries are a causal sequence.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = tuple[Tensor, ...]
Attend = Callable[[Inputs, Tensor, bool], Tensor]


def with_kernels(attend: Attend, *kernels: SDPBackend) -> Attend:
    """`attend` with torch held to some of its kernels: a RuntimeError where none of them takes the inputs."""

    def held(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
        with sdpa_kernel(list(kernels)):
            return attend(inputs, lam, causal)

    return held


def as_they_are(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """The operator's own layout."""
    return q, k, v


def split_values(v: Tensor) -> Tensor:
    """(B, H, S, 2d) → the twin's values (B, 2H, S, d)."""
    return v.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)


def twin_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """The same bytes as the twin has them: A heads of d."""
    return tuple(tensor.contiguous() for tensor in (q.flatten(1, 2), k.flatten(1, 2), split_values(v)))


def twin(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """The Transformer's attention; λ is not looked at."""
    q, k, v = inputs
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def wide(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """One call a map, values 2d wide."""
    q, k, v = inputs
    first, second = (F.scaled_dot_product_attention(q[:, :, c], k[:, :, c], v, is_causal=causal) for c in range(2))
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def pieces(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """Two calls a map, one for each half of the values."""
    q, k, v = inputs
    first, second = (
        torch.cat(
            [F.scaled_dot_product_attention(q[:, :, c], k[:, :, c], half, is_causal=causal) for half in v.chunk(2, -1)],
            dim=-1,
        )
        for c in range(2)
    )
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def cached_keys(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """Keys as the model's cache holds them, [k1; k2] of 2d."""
    return q, k.transpose(2, 3).flatten(3), v


def one_call(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """One grouped call, the queries padded with zeros to 2d."""
    q, k, v = inputs
    d = q.shape[-1]
    padded = torch.stack((F.pad(q[:, :, 0], (0, d)), F.pad(q[:, :, 1], (d, 0))), dim=2).flatten(1, 2)
    grouped = q.device.type == "cuda"
    if not grouped:  # elsewhere torch answers enable_gqa with its plain formula
        k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))
    heads = F.scaled_dot_product_attention(padded, k, v, is_causal=causal, scale=d**-0.5, enable_gqa=grouped)
    first, second = heads.unflatten(1, (-1, 2)).unbind(2)
    return (first - lam.unsqueeze(-1) * second).to(first.dtype)


def diffllama_inputs(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """transformers pairs head h with h + A/2: all first maps, then all second ones; values likewise."""
    halves = v.unflatten(-1, (2, -1)).movedim(-2, 1)
    return tuple(tensor.contiguous().flatten(1, 2) for tensor in (q.transpose(1, 2), k.transpose(1, 2), halves))


class _Call(nn.Module):
    """What transformers' attention functions ask of the module that calls them."""

    is_causal = True
    num_key_value_groups = 1
    training = False


@functools.cache
def _caller() -> _Call:
    return _Call()


def diffllama(inputs: Inputs, lam: Tensor, causal: bool) -> Tensor:
    """DiffLlamaAttention.forward between its rotary embedding and its norm, with transformers' own SDPA function."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v = inputs
    halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
    parts = [sdpa_attention_forward(_caller(), q, k, half, None, scaling=q.shape[-1] ** -0.5)[0] for half in halves]
    first, second = torch.cat(parts, dim=-1).chunk(2, dim=2)
    # The product with λ is in the model's dtype there. Heads are (B, N, H, 2d).
    return (first - lam.transpose(1, 2).unsqueeze(-1).to(q.dtype) * second).transpose(1, 2)
