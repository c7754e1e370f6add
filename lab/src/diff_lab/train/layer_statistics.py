"""Measures each layer during training: the sizes of activations and logits in one forward pass over a few sequences.

The operator does not return the headwise norm's input, and never holds a whole attention map. So hooks on the attention
layers compute both beside the pass, in blocks of queries: memory grows with the length, not with its square.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from diff_lab.data.batches import flattened
from diff_lab.train.collectives import all_gather_object
from diff_lab.train.distributed import reshard
from diff_transformer.model.interface_attention import InterfaceAttention
from diff_transformer.nn import DecoderLayer, DifferentialAttention
from diff_transformer.ops import diff_attention
from diff_transformer.ops.visibility import key_ranges, segment_bounds_from

# Keys of a batch that say which tokens there are; and labels, which are left out.
_TOKENS = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_SCORES = 1 << 22  # logits to hold at a time


@torch.no_grad()
def measure_layers(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, list[float]]:
    """Run one forward pass without gradients and measure each layer. The model is left as it was.

    If several ranks hold a part of the model or of the data each, all of them call this, and :func:`reduced` combines
    their answers. The model may have any attention type, and any wrapper that leaves our layers in it; compiled layers
    run uncompiled here. The batch is on its device: `input_ids` (B, N); `position_ids` (B, N) if documents are packed
    into a sequence, or transformers' `cu_seq_lens_q` and so on with B = 1.

    Returns:
        A list of one number for each layer, by name:
            "norm_input_rms": root mean square of the heads that enter the headwise norm, (A1 − λA2) V; it grows before
                training of the first version becomes unstable. Only of differential attention whose λ is that of all
                tokens ("diff", and "diff_grouped" without `token_lambda`); also without the norm.
            "logit_max": the largest q·k/√d that any token sees, of both maps. "hidden_rms": root mean square of the
            residual stream after the layer. "lambda_mean": the mean λ of tokens and heads. Only if each token has its
            own ("diff_v2", and
                "diff_grouped" with `token_lambda`).
    """
    attentions = [module for module in model.modules() if isinstance(module, InterfaceAttention)]
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    if not attentions:
        raise ValueError(f"Only our models have layers to inspect, got {type(model).__name__}.")
    if unknown := batch.keys() - {*_TOKENS, "labels"}:
        raise ValueError(f"A batch to inspect holds {', '.join(_TOKENS)}; got {', '.join(sorted(unknown))} as well.")
    tokens = {name: batch[name] for name in _TOKENS if name in batch}
    if "cu_seq_lens_q" not in tokens:  # packed documents in one row, as in training
        tokens = flattened(tokens | {"labels": tokens["input_ids"]})
        del tokens["labels"]
    ends = tokens.get("cu_seq_lens_q")
    bounds = None if ends is None else segment_bounds_from(ends, tokens["input_ids"].shape[1])
    statistics: dict[str, list[Tensor]] = {}

    def note(name: str, value: Tensor) -> None:
        statistics.setdefault(name, []).append(value)

    def measure(attention: nn.Module, arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
        assert isinstance(attention, InterfaceAttention)
        hidden = more["hidden_states"] if "hidden_states" in more else arguments[0]
        queries, keys, values = attention.project(hidden, more["position_embeddings"])
        if isinstance(attention, DifferentialAttention):
            q, k = attention.split_queries(queries), attention.split_keys(keys)
        else:
            q, k = queries.transpose(1, 2).unsqueeze(2), keys.unsqueeze(2)
        window, is_causal = attention.sliding_window, attention.is_causal
        note("logit_max", _largest_logit(q, k, attention.scaling, is_causal, window, bounds))
        if not isinstance(attention, DifferentialAttention):
            return
        if attention.config.has_token_lambda:
            note("lambda_mean", attention.lambdas(hidden).mean())
        else:
            lam, scale = attention.lambdas(hidden), attention.scaling
            heads = diff_attention(q, k, values, lam, is_causal=is_causal, scale=scale, window=window, cu_seqlens=ends)
            note("norm_input_rms", _rms(heads))

    with ExitStack() as undo:
        undo.enter_context(torch.compiler.set_stance("force_eager"))  # what is compiled passes hooks by
        for module in model.modules():
            undo.callback(setattr, module, "training", module.training)
        model.eval()  # nothing is dropped out, or computed twice to save memory
        undo.callback(reshard, model)
        for attention in attentions:
            undo.callback(attention.register_forward_pre_hook(measure, with_kwargs=True).remove)
        for layer in layers:
            hook = layer.register_forward_hook(lambda _, __, output: note("hidden_rms", _rms(output)))
            undo.callback(hook.remove)
        model(**tokens, use_cache=False, logits_to_keep=1)
    return {name: torch.stack(values).tolist() for name, values in statistics.items()}


def reduced(numbers: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Combine what `measure_layers` returns on all ranks, each of which has data or heads of its own. Takes the largest
    of maxima, the mean of means, and the root mean square of the rest. A number that is not finite on one rank is not
    finite in the result. Called on every rank; all get the same result.
    """
    per_rank = all_gather_object(list(numbers.values()))
    if len(per_rank) == 1:
        return dict(numbers)
    ranks = torch.tensor(per_rank, dtype=torch.float32)  # (ranks, names, layers)
    by_name = {"logit_max": ranks.amax(0), "lambda_mean": ranks.mean(0)}
    root_mean_square = ranks.square().mean(0).sqrt()
    return {name: by_name.get(name, root_mean_square)[i].tolist() for i, name in enumerate(numbers)}


def _largest_logit(
    q: Tensor, k: Tensor, scale: float, is_causal: bool, window: int | None, segment_bounds: Tensor | None
) -> Tensor:
    """Return the largest logit that is seen: q (B, H, C, N, d) of C maps, k (B, H_kv, 2 or 1, N, d).

    The last of two maps or more, the noise map, meets the second of two keys, and all before it the first.
    """
    batch, heads, maps, n, _ = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = max(1, _SCORES // (batch * heads * n))
    begin, end = key_ranges(n, n, is_causal, window, segment_bounds, q.device)
    largest = []
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, n, rows):
            stop = min(n, start + rows)
            low = 0 if window is None else max(0, start - window + 1)
            high = stop if is_causal else n
            keys = torch.arange(low, high, device=q.device)
            seen = (begin[start:stop, None] <= keys) & (keys < end[start:stop, None])  # (rows, keys)
            for c in range(maps):
                # The queries of a group meet the same keys: one product, (B, H_kv, G·rows, keys).
                block = q[:, :, c, start:stop].unflatten(1, (k.shape[1], -1)).flatten(2, 3).to(dtype) * scale
                key = k.shape[2] - 1 if c == maps - 1 else 0
                logits = block @ k[:, :, key, low:high].to(dtype).mT
                logits = logits.unflatten(2, (-1, stop - start)).masked_fill_(~seen, -torch.inf)
                largest.append(logits.amax())
    return torch.stack(largest).amax()


def _rms(x: Tensor) -> Tensor:
    """Compute the root mean square, in float32 at least."""
    rows = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    return (rows.square().mean() / x.shape[-1]).sqrt()
