"""Context parallelism: each rank has a part of the sequence, and the keys and values of all of it."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import AttentionInterface, AttentionMaskInterface

from diff_transformer.model.interface_attention import OPERATOR_IMPLEMENTATIONS

CONTEXT_PARALLEL = "diff_attention_context_parallel"
_REFUSAL = "context parallelism needs context, and takes no attention_mask, cu_seq_lens_q, dropout or attention maps."


class Piece(NamedTuple):
    """Queries of one call of the operator, and their keys: a document that began before the chunk, or those in it."""

    queries: slice  # of this rank's
    keys: slice  # of the sequence
    cu_seqlens: Tensor | None  # if several documents begin in the piece


class Context:
    """Divides sequences among c ranks: of 2c chunks rank r has r and 2c − 1 − r, so that all see as many keys.

    Args:
        mesh: of one dimension.
        length: N, of the whole sequence.
        documents: starts of the documents packed into it, and N at the end; None for one. Numbers and no tensor, which
            would be read from the device in every layer.
        device: of the sequence.

    Raises:
        ValueError: the length is not a multiple of the number of chunks, or the documents do not fill it.

    Examples:
        >>> with one_rank_of(2):
        ...     mesh = torch.distributed.init_device_mesh("cpu", (2,))
        ...     Context(mesh, length=8, documents=[0, 3, 8]).own(torch.arange(8)[None])
        tensor([[0, 1, 6, 7]])
    """

    def __init__(
        self, mesh: DeviceMesh, length: int, documents: Sequence[int] | None = None, device: Any = "cpu"
    ) -> None:
        ranks, rank = mesh.size(), mesh.get_local_rank()
        self.length, self.mesh, self.count, self.chunks = length, mesh, 2 * ranks, (rank, 2 * ranks - 1 - rank)
        if length % self.count:
            raise ValueError(f"{ranks} ranks share a multiple of {self.count} tokens, got {length}.")
        bounds = [0, length] if documents is None else list(documents)
        if bounds[:1] != [0] or bounds[-1] != length or bounds != sorted(bounds):
            raise ValueError(f"documents must start at 0, ascend and end at the length {length}, got {bounds}.")
        size, self.pieces = length // self.count, list[Piece]()
        for own, start in enumerate(chunk * size for chunk in self.chunks):
            inside = [bound - start for bound in bounds if start < bound < start + size]
            cut = inside[0] if inside else size
            first_key = max(bound for bound in bounds if bound <= start)
            self.pieces.append(Piece(slice(own * size, own * size + cut), slice(first_key, start + cut), None))
            if inside:
                ends = torch.tensor([*inside, size], dtype=torch.int32, device=device) - cut
                rest = slice(own * size + cut, (own + 1) * size)
                self.pieces.append(Piece(rest, slice(start + cut, start + size), ends))

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of tokens, positions or labels, (B, N) → (B, N / ranks)."""
        if x.shape[dim] != self.length:
            raise ValueError(f"the context is of {self.length} tokens, got {x.shape[dim]}.")
        parts = x.chunk(self.count, dim)
        return torch.cat([parts[chunk] for chunk in self.chunks], dim)

    def gather(self, x: Tensor) -> Tensor:
        """Gather keys or values (B, heads, N / ranks, width) of all ranks in the sequence's order; differentiable."""
        x = DTensor.from_local(x, self.mesh, [Shard(2)], run_check=False).redistribute(placements=[Replicate()])
        x = x.to_local(grad_placements=[Partial()])
        chunks = x.chunk(self.count, dim=2)  # 0, 2c − 1, 1, 2c − 2, …
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim=2)


def context_parallel(layers: Iterable[nn.Module]) -> None:
    """Let decoder layers attend from a rank's part of the sequence to all of it.

    The model is then called with this rank's tokens and ``position_ids`` (:meth:`Context.own`), and with ``context``,
    a :class:`Context`, which alone tells documents apart: positions that begin anew do not.

    Raises:
        ValueError: layers of ordinary attention, or of an encoder.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> context_parallel(DiffTransformerForCausalLM(config).model.layers)
    """
    AttentionInterface.register(CONTEXT_PARALLEL, _attend)
    AttentionMaskInterface.register(CONTEXT_PARALLEL, _no_mask)
    OPERATOR_IMPLEMENTATIONS.setdefault(CONTEXT_PARALLEL, "auto")
    for layer in layers:
        config: Any = layer.self_attn.config  # type: ignore[union-attr]
        if not config.spec.differential or not config.is_causal:
            got = f"{config.attention_type!r} and is_causal {config.is_causal}"
            raise ValueError(f"context parallelism is for causal differential attention, got {got}.")
        config._attn_implementation = CONTEXT_PARALLEL


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Make no mask: causality, window and documents hide keys."""
    if attention_mask is not None:
        raise ValueError(_REFUSAL)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    lam: Any = None,
    sliding_window: int | None = None,
    context: Context | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    others = (attention_mask, kwargs.get("cu_seq_lens_q"), kwargs.get("maps"), dropout or None)
    if context is None or kwargs.get("output_attentions") or any(other is not None for other in others):
        raise ValueError(_REFUSAL)
    if query.shape[2] != context.length // context.mesh.size():
        raise ValueError(f"the context is of {context.length} tokens, got {query.shape[2]} on this rank.")
    key, value = module.split_keys(context.gather(key)), context.gather(value)
    heads = [
        module.difference(
            query[:, :, piece.queries].unflatten(1, (-1, module.ratio + 1)),
            key[..., piece.keys, :],
            value[:, :, piece.keys],
            lam[..., piece.queries] if lam.dim() == 3 else lam,
            is_causal=True,
            window=sliding_window,
            scale=scaling,
            cu_seqlens=piece.cu_seqlens,
        )
        for piece in context.pieces
    ]
    return torch.cat(heads, dim=1), None
