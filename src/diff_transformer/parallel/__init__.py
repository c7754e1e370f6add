"""Spreads a model over ranks with torch's public API alone, for any training loop.

tensor_parallel(layers, mesh["tp"], embedding=…, norm=…, head=…)  # sequence parallelism, too, if asked for
context_parallel(layers)                                          # a part of the sequence on each rank: `Context`
shard(model, layers, mesh["dp"])                                  # FSDP2, HSDP on two dimensions; always last
"""

from diff_transformer.parallel.counting import Messages, one_rank_of
from diff_transformer.parallel.layout import Context, context_parallel, shard, tensor_parallel

__all__ = ["Context", "Messages", "context_parallel", "one_rank_of", "shard", "tensor_parallel"]
