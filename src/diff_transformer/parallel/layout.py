"""Spreads a model's parameters: tensor and sequence parallelism, FSDP2 and HSDP.

Tensor parallelism gives each rank some heads, some channels of the feed-forward network and some words. The parameters
that all heads of a layer share (λ, the weights of the norms of heads) are whole on every rank, and their gradients are
summed over the ranks, as each rank's backward pass sees its own heads alone.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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

from diff_transformer.model.parallel_plan import check_ranks
from diff_transformer.nn.layers import KeepsFloat32, ReplicatedAcrossHeads

_BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lambda_proj")
_BY_ROWS = ("o_proj", "down_proj")


class Parts(NamedTuple):
    """The modules of a language model, or of a pipeline's stage, which lacks those that other stages have.

    Examples:
        >>> Parts(embedding=None, layers=[torch.nn.Linear(2, 2)], norm=None, head=None).norm is None
        True
    """

    embedding: nn.Module | None
    layers: Sequence[nn.Module]
    norm: nn.Module | None
    head: nn.Module | None


def parts_of(model: Any) -> Parts:
    """Return the parts of a :class:`DiffTransformerForCausalLM`.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        >>> len(parts_of(DiffTransformerForCausalLM(config)).layers)
        2
    """
    return Parts(model.model.embed_tokens, tuple(model.model.layers), model.model.norm, model.lm_head)


def tensor_parallel(
    parts: Parts, mesh: DeviceMesh, *, sequence_parallel: bool = False, gather_logits: bool = True
) -> None:
    """Give each rank of a mesh its heads, its channels of the feed-forward networks, and its words.

    Call it before :func:`shard`, on weights that are equal on all ranks or on the meta device. All parameters are
    DTensors afterwards. A model of transformers then needs ``position_ids`` with ``sequence_parallel``, since between
    layers it sees a part of the sequence.

    Args:
        parts: modules of the model.
        mesh: of one dimension.
        sequence_parallel: divide the hidden states between attention and feed-forward network by position, (B, N, D)
            to (B, N / ranks, D): less memory for activations, equal bytes sent.
        gather_logits: give every rank the logits of all words; else they stay a DTensor, for a loss that reads one.

    Raises:
        ValueError: the attention type is not spread this way, or its heads do not divide among the ranks.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=8)
        >>> model = DiffTransformerForCausalLM(config)
        >>> with one_rank_of(2):
        ...     tensor_parallel(parts_of(model), torch.distributed.init_device_mesh("cpu", (2,)))
        ...     model.model.layers[0].self_attn.q_proj.weight.to_local().shape  # of (32, 32)
        torch.Size([16, 32])
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel if sequence_parallel else _WholeNorm
    tied = parts.embedding is not None and parts.head is not None and parts.head.weight is parts.embedding.weight
    for layer in parts.layers:
        check_ranks(mesh.size(), layer.self_attn.config)  # type: ignore[union-attr, arg-type]
    if parts.embedding is not None:
        parallelize_module(parts.embedding, mesh, _OwnWords(input_layouts=Replicate(), output_layouts=stream))
    for layer in parts.layers:
        parallelize_module(layer, mesh, _layer_plan(layer, stream, norm))
    if parts.norm is not None:
        # Gathered here and not by the head, which a chunked loss gives one part of the sequence after another.
        parallelize_module(parts.norm, mesh, _GatheringNorm(stream))
    if parts.head is not None:
        logits = Replicate() if gather_logits else Shard(-1)
        style = ColwiseParallel(input_layouts=Replicate(), output_layouts=logits, use_local_output=gather_logits)
        parallelize_module(parts.head, mesh, style)
    if tied:
        parts.head.weight = parts.embedding.weight  # type: ignore[union-attr]


def _layer_plan(layer: nn.Module, stream: Any, norm: Any) -> dict[str, ParallelStyle]:
    # A DTensor goes into attention and feed-forward network, so that the gradients of the projections that read it are
    # added once; as local tensors each projection would send its own.
    gathered = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),), use_local_output=False)
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": norm(use_local_output=True),
        "post_attention_layernorm": norm(use_local_output=True),
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

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any
    ) -> Tensor:
        # A copy, since a layer that torch.compile compiled gives a tensor that is still on its way no gradient.
        words = RowwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh)
        return words.clone()


class _SharedByHeads(ParallelStyle):
    """Parameters whole on every rank, whose gradient is the sum of the ranks' own."""

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module = distribute_module(module, mesh)
        module.sum_gradient = _summed_over_ranks  # type: ignore[assignment]
        return module


def _summed_over_ranks(value: Tensor) -> Tensor:
    return value.to_local(grad_placements=[Partial()]) if isinstance(value, DTensor) else value


class _WholeNorm(SequenceParallel):
    """A norm that every rank computes for all positions."""

    def __init__(self, *, use_local_output: bool) -> None:
        super().__init__(use_local_output=use_local_output)
        self.sequence_sharding = (Replicate(),)


class _GatheringNorm(SequenceParallel):
    """A norm of hidden states laid out as ``stream`` says, whose result every rank has for all positions."""

    def __init__(self, stream: Any) -> None:
        super().__init__(use_local_output=True)
        self.sequence_sharding = (stream,)

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: Any) -> Tensor:
        return outputs.redistribute(placements=(Replicate(),)).to_local()


def shard(
    model: nn.Module,
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard a model with FSDP2: a unit for each decoder layer, and one for all else, λ of all layers with it.

    λ of a layer is a few hundred numbers that stay in float32. As a unit of its own it would be two messages to a
    layer and pass, and an end to every graph that torch.compile makes of the layer.

    Args:
        model: the outermost module.
        layers: its decoder layers.
        mesh: of one dimension; or of two for HSDP, replicated along the first and sharded along the second.
        param_dtype: type in which the layers' weights travel and are used; None for their own. Gradients are then
            added up in float32, and inputs are not cast.
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
