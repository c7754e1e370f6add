"""Spreads a model over ranks with torch's public API alone, for any training loop.

tensor_parallel(parts, mesh["tp"])         # heads, feed-forward and vocabulary; sequence parallelism if asked for
context_parallel(parts.layers)             # a part of the sequence on each rank of mesh["cp"]: `Context`
shard(model, parts.layers, mesh["dp"])     # FSDP2, or HSDP on a mesh of two dimensions; always last
"""

from diff_transformer.parallel.context import Context, context_parallel
from diff_transformer.parallel.counting import Messages, one_rank_of
from diff_transformer.parallel.layout import Parts, parts_of, shard, tensor_parallel

__all__ = [
    "Context",
    "Messages",
    "Parts",
    "context_parallel",
    "one_rank_of",
    "parts_of",
    "shard",
    "tensor_parallel",
]
