"""Spreads a model's parameters: tensor and sequence parallelism, FSDP2 and HSDP; and sequences: context parallelism.

Parameters that the heads of a layer share (λ, weights of the norms of heads) are whole on every tensor-parallel rank.
Their gradients are summed over the ranks, as each rank's backward pass sees its own heads alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AttentionInterface, AttentionMaskInterface

from diff_transformer.model.interface_attention import OPERATOR_IMPLEMENTATIONS
from diff_transformer.model.parallel_plan import check_ranks
from diff_transformer.nn.layers import KeepsFloat32, ReplicatedAcrossHeads

_BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lambda_proj")
_BY_ROWS = ("o_proj", "down_proj")
CONTEXT_PARALLEL = "diff_attention_context_parallel"
_REFUSAL = "context parallelism needs context, and takes no attention_mask, cu_seq_lens_q, dropout or attention maps."


def tensor_parallel(
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    embedding: nn.Module | None = None,
    norm: nn.Module | None = None,
    head: nn.Module | None = None,
    sequence_parallel: bool = False,
    gather_logits: bool = True,
) -> None:
    """Give each rank of a mesh its heads, its channels of the feed-forward networks, and its words.

    Call it before :func:`shard`, on weights that are equal on all ranks or on the meta device. All parameters are
    DTensors afterwards. A model of transformers is then called with ``position_ids``.

    Args:
        layers: the decoder layers of a model, or of a pipeline's stage.
        mesh: of one dimension.
        embedding, norm, head: the other modules, as far as the stage has them.
        sequence_parallel: divide hidden states between layers by position, (B, N / ranks, D), of a multiple of ranks.
        gather_logits: give every rank the logits of all words, else a DTensor for a loss that reads one.

    Raises:
        ValueError: the attention type or the activation is not spread this way, or its heads do not divide.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=8)
        >>> model = DiffTransformerForCausalLM(config)
        >>> with one_rank_of(2):
        ...     tensor_parallel(model.model.layers, torch.distributed.init_device_mesh("cpu", (2,)))
        ...     model.model.layers[0].self_attn.q_proj.weight.to_local().shape  # of (32, 32)
        torch.Size([16, 32])
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    tied = embedding is not None and head is not None and head.weight is embedding.weight
    for layer in layers:
        config: Any = layer.self_attn.config  # type: ignore[union-attr]
        check_ranks(mesh.size(), config)
        if config.hidden_act == "poly_norm":
            raise ValueError("tensor_parallel divides feed-forward channels: hidden_act 'poly_norm' needs all at once.")
        if config.intermediate_size % mesh.size():
            raise ValueError(f"{mesh.size()} ranks cannot share intermediate_size {config.intermediate_size} evenly.")
        parallelize_module(layer, mesh, _layer_plan(layer, stream))
    if embedding is not None:
        parallelize_module(embedding, mesh, _OwnWords(input_layouts=Replicate(), output_layouts=stream))
    if norm is not None:
        # Gathered here and not by the head, which a chunked loss gives one part of the sequence after another.
        parallelize_module(norm, mesh, _Norm(stream, Replicate()))
    if head is not None:
        logits = Replicate() if gather_logits else Shard(-1)
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=logits, use_local_output=gather_logits)
        parallelize_module(head, mesh, style)
    if tied:
        head.weight = embedding.weight  # type: ignore[union-attr]


def _layer_plan(layer: nn.Module, stream: Any) -> dict[str, ParallelStyle]:
    # A DTensor goes into attention and feed-forward network, so that the gradients of the projections that read it are
    # added once; as local tensors each projection would send its own.
    gathered = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": _Norm(stream, stream),
        "post_attention_layernorm": _Norm(stream, stream),
        "self_attn": gathered,
        "mlp": gathered,
    }
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if last in _BY_ROWS:
            plan[name] = RowwiseParallel(output_layouts=stream)
        elif last in _BY_COLUMNS:
            plan[name] = ColwiseParallel()
        elif isinstance(module, ReplicatedAcrossHeads):
            plan[name] = _SharedByHeads()
    return plan


class _OwnWords(RowwiseParallel):
    """A table of which each rank looks its own words up; the results are added."""

    def _prepare_output_fn(self, layouts: Any, _is_local: bool, _module: nn.Module, outputs: Any, mesh: Any) -> Tensor:  # type: ignore[override]
        if layouts[0] == Shard(1) and outputs.shape[1] % mesh.size():
            raise ValueError(f"sequence_parallel shares a multiple of {mesh.size()} tokens, got {outputs.shape[1]}.")
        # A copy, since a layer that torch.compile compiled gives a tensor that is still on its way no gradient.
        return outputs.redistribute(placements=layouts).to_local().clone()


class _SharedByHeads(ParallelStyle):
    """Parameters whole on every rank, whose gradient is the sum of the ranks' own."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = distribute_module(module, mesh)

        def sum_over_ranks(value: Tensor) -> Tensor:
            return value.to_local(grad_placements=[Partial()]) if isinstance(value, DTensor) else value

        module.sum_gradient = sum_over_ranks  # type: ignore[assignment]
        return module


class _Norm(SequenceParallel):
    """A norm of hidden states that lie as ``stream`` says; the result lies so, too, or is whole on every rank."""

    def __init__(self, stream: Any, result: Any) -> None:
        super().__init__()
        self.sequence_sharding, self.result = (stream,), result

    def _prepare_output_fn(self, _is_local: bool, _module: nn.Module, outputs: Any, _mesh: Any) -> Tensor:  # type: ignore[override]
        return outputs.redistribute(placements=(self.result,)).to_local()


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard a model with FSDP2: a unit for each decoder layer, and one for all else, λ of all layers with it.

    As a unit of its own, λ's few hundred numbers in float32 would be two messages a layer, and break its graph.

    Args:
        model: the outermost module.
        layers: its decoder layers.
        mesh: of one dimension; or of two for HSDP, replicated along the first and sharded along the second.
        param_dtype: type of the layers' weights as they travel, with gradients in float32; None for their own.
        reshard_after_forward: free a layer's weights after its forward pass, and gather them again for its backward.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=8)
        >>> model = DiffTransformerForCausalLM(config)
        >>> with one_rank_of(4):
        ...     shard(model, model.model.layers, torch.distributed.init_device_mesh("cpu", (4,)))
        ...     model.lm_head.weight.to_local().shape  # of (64, 32)
        torch.Size([16, 32])
    """
    reduce_dtype = None if param_dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    layers = tuple(layers)
    taken_out = []
    for module in (module for layer in layers for module in list(layer.modules())):
        for name, child in list(module.named_children()):
            if isinstance(child, KeepsFloat32) and child._parameters:
                taken_out.append((module, name, child))
                setattr(module, name, nn.Module())  # in its place, so that the order of names stays
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # FSDP2 looks for the outermost unit's parameters outside of the other units: λ stands there for the moment.
    model.float32_parts = nn.ModuleList(child for *_, child in taken_out)
    fully_shard(model, mesh=mesh)
    del model.float32_parts
    for module, name, child in taken_out:
        setattr(module, name, child)


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
        size = length // self.count
        # Of each call of the operator: this rank's queries, the sequence's keys, and documents if several begin in it.
        self.pieces: list[tuple[slice, slice, Tensor | None]] = []
        for own, start in enumerate(chunk * size for chunk in self.chunks):
            inside = [bound - start for bound in bounds if start < bound < start + size]
            cut = inside[0] if inside else size
            first_key = max(bound for bound in bounds if bound <= start)
            self.pieces.append((slice(own * size, own * size + cut), slice(first_key, start + cut), None))
            if inside:
                ends = torch.tensor([*inside, size], dtype=torch.int32, device=device) - cut
                rest = slice(own * size + cut, (own + 1) * size)
                self.pieces.append((rest, slice(start + cut, start + size), ends))

    def own(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of tokens, positions or labels that are shifted already, (B, N) → (B, N / ranks)."""
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
        ValueError: layers of ordinary attention, of an encoder, or with RoPE that depends on the length ("dynamic").

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
        if config.angles_follow_length:  # of which a rank knows its own part's
            raise ValueError(f"context parallelism cannot have rope_type {config.rope_parameters['rope_type']!r}.")
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
    signal_weight: Any = None,
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
            query[:, :, queries].unflatten(1, (-1, module.ratio + 1)),
            key[..., keys, :],
            value[:, :, keys],
            lam[..., queries] if lam.dim() == 3 else lam,
            signal_weight=None if signal_weight is None else signal_weight[..., queries],
            is_causal=True,
            window=sliding_window,
            scale=scaling,
            cu_seqlens=documents,
        )
        for queries, keys, documents in context.pieces
    ]
    return torch.cat(heads, dim=1), None
