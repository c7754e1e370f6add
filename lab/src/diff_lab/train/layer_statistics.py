"""Measures each layer during training: the sizes of activations and logits in one forward pass over a few sequences.

The operator does not return the headwise norm's input, and never holds a whole attention map. So hooks on the attention
layers compute both beside the pass, in blocks of queries: memory grows with the length, not with its square.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from diff_lab.train.distributed import all_gather_object, reshard
from diff_transformer.model.interface_attention import InterfaceAttention
from diff_transformer.nn import DecoderLayer, DifferentialAttention
from diff_transformer.ops import diff_attention
from diff_transformer.ops.attention_request import key_ranges, segment_bounds_from

_SCORES = 1 << 22  # logits to hold at a time


@torch.no_grad()
def measure_layers(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, list[float]]:
    """Run one forward pass of one of our models and measure each layer; compiled layers run uncompiled.

    Called on every rank, with rows of its own as the model takes them in training. All get the largest of maxima, the
    mean of means and the root mean square of the rest.

    Returns:
        A list of one number for each layer, by name. "norm_input_rms": root mean square of the heads that enter the
        headwise norm, (A1 − λA2) V, which grows before training of the first version becomes unstable; only of
        differential attention whose λ is that of all tokens ("diff", and "diff_grouped" without `token_lambda`), also
        without the norm. "logit_max": the largest q·k/√d that any token sees, of both maps. "hidden_rms": root mean
        square of the residual stream after the layer. "lambda_mean": the mean λ of tokens and heads, where each token
        has its own ("diff_v2", and "diff_grouped" with `token_lambda`).
    """
    tokens = {name: value for name, value in batch.items() if name != "labels"}
    ends = tokens.get("cu_seq_lens_q")
    bounds = None if ends is None else segment_bounds_from(ends, tokens["input_ids"].shape[1])
    statistics: dict[str, list[Tensor]] = {}

    def note(name: str, value: Tensor) -> None:
        statistics.setdefault(name, []).append(value)

    def measure(attention: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden = more["hidden_states"] if "hidden_states" in more else arguments[0]
        queries, keys, values = attention.project(hidden, more["position_embeddings"])
        is_differential = isinstance(attention, DifferentialAttention)
        q = attention.split_queries(queries) if is_differential else queries.transpose(1, 2).unsqueeze(2)
        k = attention.split_keys(keys) if is_differential else keys.unsqueeze(2)
        seen_by: dict[str, Any] = {"is_causal": attention.is_causal, "window": attention.sliding_window}
        begin, end = key_ranges(q.shape[3], q.shape[3], segment_bounds=bounds, device=q.device, **seen_by)
        note("logit_max", _largest_logit(q, k, begin, end) * attention.scaling)
        if is_differential and attention.config.has_token_lambda:
            note("lambda_mean", attention.lambdas(hidden).mean())
        elif is_differential:
            lam, seen_by = attention.lambdas(hidden), seen_by | {"scale": attention.scaling, "cu_seqlens": ends}
            note("norm_input_rms", _rms(diff_attention(q, k, values, lam, **seen_by)))

    with ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))  # what is compiled passes hooks by
        undo.callback(model.train, model.training)
        model.eval()  # nothing is dropped out, or computed twice to save memory
        undo.callback(reshard, model)
        for module in model.modules():
            if isinstance(module, InterfaceAttention):
                undo.callback(module.register_forward_pre_hook(measure, with_kwargs=True).remove)
            elif isinstance(module, DecoderLayer):
                hook = module.register_forward_hook(lambda _, __, output: note("hidden_rms", _rms(output)))
                undo.callback(hook.remove)
        model(**tokens, use_cache=False, logits_to_keep=1)
    per_rank = all_gather_object([torch.stack(values).tolist() for values in statistics.values()])
    ranks = torch.tensor(per_rank)  # (ranks, names, layers)
    by_name = {"logit_max": ranks.amax(0), "lambda_mean": ranks.mean(0)}
    root_mean_square = ranks.square().mean(0).sqrt()
    return {name: by_name.get(name, root_mean_square)[number].tolist() for number, name in enumerate(statistics)}


def _largest_logit(q: Tensor, k: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Return the largest q·k of a query (B, H, C, N, d) of C maps and a key (B, H_kv, 2 or 1, N, d) from begin to end.

    The last of two maps or more, the noise map, meets the second of two keys, and all before it the first.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = torch.cat((k[:, :, :1].expand(-1, -1, q.shape[2] - 1, -1, -1), k[:, :, -1:]), dim=2).to(dtype)
    positions = torch.arange(k.shape[3], device=k.device)
    rows = max(1, _SCORES // (q[:, :, :, 0, 0].numel() * k.shape[3]))
    largest = []
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, q.shape[3], rows):
            part = slice(start, start + rows)
            seen = (begin[part, None] <= positions) & (positions < end[part, None])
            groups = q[:, :, :, part].unflatten(1, (k.shape[1], -1)).to(dtype)  # of the queries that share a key head
            logits = torch.einsum("bhgcnd,bhcsd->bhgcns", groups, keys)
            largest.append(logits.masked_fill_(~seen, -torch.inf).amax())
    return torch.stack(largest).amax()


def _rms(x: Tensor) -> Tensor:
    """Compute the root mean square, in float32 at least."""
    rows = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return (rows.square().mean() / x.shape[-1]).sqrt()
