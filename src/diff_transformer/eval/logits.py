"""Ordinary attention that shows its logits, and may change them, a block of queries at a time.

Fast kernels keep their logits to themselves. An implementation made here takes their place under a name of its own in
transformers' attention interface, in any model that attends through it: ours, whose layers make one ordinary call (two
maps are two heads of it), and transformers' own, such as Llama and DiffLlama. Memory grows with the length, not with
its square, but for a boolean mask where there is padding or several documents.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

# Logits to hold at a time: few for a processor's caches, many for a GPU, which is slow to start.
_LOGITS = {"cpu": 1 << 22}
_LOGITS_ELSEWHERE = 1 << 26
# Arguments by which some models change their logits, or what these are divided by, inside the attention call.
_NOT_ORDINARY = ("softcap", "s_aux")


class LogitBlock(NamedTuple):
    """The logits of some queries.

    Attributes:
        logits: (B, H, rows, keys), q·k times the scale, in float32 at least, of the hidden ones too.
        seen: broadcastable to that, which of them the queries see.
    """

    logits: Tensor
    seen: Tensor


class Call(NamedTuple):
    """One call of an implementation.

    Attributes:
        query: (B, H, N, d), as the module gave them.
        blocks: gives the logits, computed anew each time it is called.
        arguments: what the model was called with besides.
    """

    query: Tensor
    blocks: Callable[[], Iterator[LogitBlock]]
    arguments: Mapping[str, Any]


def register_logits(name: str, logits_of: Callable[[Call], Iterator[LogitBlock]]) -> None:
    """Make an attention known to transformers.

    Args:
        name: for ``attn_implementation`` and ``set_attn_implementation``.
        logits_of: gives the blocks that the softmax is taken of, in the order of the queries.
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' signature: query (B, H, N, d), key and value (B, H_kv, S, …) → (B, N, H, dv), no weights."""
        _check_call(name, module, attention_mask, kwargs)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling

        def blocks() -> Iterator[LogitBlock]:
            return logit_blocks(query, key, attention_mask, scale)

        return _weigh(logits_of(Call(query, blocks, kwargs)), value).transpose(1, 2), None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)


@contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """The model attends by the implementation of this name, and afterwards as before.

    Raises:
        ValueError: a model that does not attend through transformers' interface, which would not notice.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} computes attention by itself in this version of transformers, so its logits "
            "cannot be seen; convert it to this project's layout, or take a newer transformers."
        )
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def logit_blocks(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Iterator[LogitBlock]:
    """The logits of some queries after the other, up to the last key that any of them sees.

    Args:
        query: (B, H, N, d).
        key: (B, H_kv, S, d).
        mask: boolean (B or 1, 1, N, S), True = may attend, or None: a single query sees all, of several each its own
            key and those before, where the first key is the first query's.
        scale: of the products.
    """
    n, s = query.shape[2], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows = max(1, _LOGITS.get(query.device.type, _LOGITS_ELSEWHERE) // (query.shape[0] * query.shape[1] * s))
    place = torch.arange(s, device=query.device)
    if mask is None:
        reach = [s] if n == 1 else list(range(1, n + 1))
    else:
        reach = ((mask.any(0).any(0) * (place + 1)).amax(-1)).tolist()
    for start in range(0, n, rows):
        stop = min(n, start + rows)
        width = max(1, *reach[start:stop])
        with torch.autocast(query.device.type, enabled=False):
            # The queries of a group meet the same keys: one product, (B, H_kv, G·rows, keys).
            some = query[:, :, start:stop].unflatten(1, (key.shape[1], -1)).flatten(2, 3).to(dtype) * scale
            logits = (some @ key[:, :, :width].to(dtype).mT).unflatten(2, (-1, stop - start)).flatten(1, 2)
        if mask is not None:
            seen = mask[:, :, start:stop, :width]
        elif n == 1:
            seen = torch.ones(1, width, dtype=torch.bool, device=query.device)
        else:
            seen = place[:width] <= torch.arange(start, stop, device=query.device).unsqueeze(-1)
        yield LogitBlock(logits, seen)


def _weigh(blocks: Iterator[LogitBlock], value: Tensor) -> Tensor:
    """softmax(logits) V, (B, H, N, dv), in the values' dtype; the softmax in float32 at least."""
    outs = []
    for logits, seen in blocks:
        # Not −∞: a query at padding sees nothing, and no key may weigh "not a number" there.
        hidden = logits.masked_fill(~seen, torch.finfo(logits.dtype).min)
        weights = torch.softmax(hidden, dim=-1).to(value.dtype)
        width, groups = weights.shape[-1], value.shape[1]
        out = weights.unflatten(1, (groups, -1)).flatten(2, 3) @ value[:, :, :width]
        outs.append(out.unflatten(2, (-1, weights.shape[2])).flatten(1, 2))
    return torch.cat(outs, dim=2)


def _check_call(name: str, module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    owner = type(module).__name__
    for argument in _NOT_ORDINARY:
        if kwargs.get(argument) is not None:
            raise ValueError(f"{name!r} is ordinary attention, and {owner} asks for {argument}.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name!r} takes a boolean mask (True = may attend) or none, got {kind}.")
