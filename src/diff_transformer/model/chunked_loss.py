"""Computes the cross-entropy of the next token without the logits of all tokens at once.

With a vocabulary of V the logits of T tokens, their float32 copy and their gradient take most of a training step's
memory. Here a chunk of tokens at a time goes through the output head, and leaves a number and gradients.

torch's ``linear_cross_entropy`` (2.13) does the same, in float32 about as fast if it is told to take such chunks. Of
bfloat16 it gives a loss in bfloat16, 3 % off for a batch of 2048 tokens, and no earlier release has it.
"""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from diff_transformer.ops.attention_request import autocast_dtype
from diff_transformer.ops.functional import without_autocast

IGNORED = -100  # the label of what is not to be predicted, unless the caller names another
# Logits to hold at a time, at most. On the CPU more of them are no faster; elsewhere (not measured) the matrix products
# should be large beside what is read and written of W's gradient for each chunk.
CORE_LOGITS = 1 << 23
DEVICE_LOGITS = 1 << 26
# On the CPU chunks that stay in the caches are faster, if they have enough tokens for that gradient. Forward and
# backward of 4,096 tokens, V 2,048 and D 128, in float32 on one thread of a Xeon with AVX-512, with 2^21, 2^22 and 2^23
# logits: 57, 66 and 82 ms; of 2,048 tokens, V 16,384 and D 256, with 64, 128, 256 and 512 tokens: 539, 462, 452 and
# 467 ms.
CACHED_LOGITS = 1 << 21
CACHED_TOKENS = 256


def chunked_cross_entropy(
    head: nn.Module,
    hidden_states: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Compute transformers' ``ForCausalLMLoss`` of the logits ``head(hidden_states)``, without holding them.

    −Σ log softmax(h_t W)[label_{t+1}] / items. An ordinary head's gradients are computed along with the loss, a chunk
    at a time, so that nothing is computed twice. Any other (one whose weight is spread over devices or is quantised,
    one that PEFT has wrapped) is called for each chunk, and for its gradient once more; parameters of such a head that
    are in half precision add up the chunks' gradients in it.

    ``head`` maps (…, D) to (…, V = ``vocab_size``) logits, and ``hidden_states`` are (B, N, D). ``labels`` are (B, N)
    and shifted inside; ``shift_labels``, shifted already, take their place. ``num_items_in_batch`` divides the sum: the
    number of labels that are not ``ignore_index`` unless given. The result is a scalar, float32 at least.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    rows = chunk_tokens(vocab_size, targets.device.type == "cpu")
    flat = hidden_states.flatten(0, -2)
    if is_plain_linear(head, vocab_size):
        total = _SummedCrossEntropy.apply(flat, head.weight, targets, ignore_index, rows, torch.is_grad_enabled())
    else:
        parts = zip(flat.split(rows), targets.split(rows), strict=True)
        # Autocast as it is, but parameters are cast for each chunk: gradients of one cast would add up in its dtype.
        dtype, device = autocast_dtype(flat.device.type), flat.device.type
        with contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=False):
            total = sum(checkpoint(_summed, head, part, at, ignore_index, use_reentrant=False) for part, at in parts)
    items = (targets != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def chunk_tokens(vocab_size: int, on_cpu: bool) -> int:
    """Return how many tokens go through the output head at a time."""
    at_most = max(1, (CORE_LOGITS if on_cpu else DEVICE_LOGITS) // vocab_size)
    return min(at_most, max(CACHED_TOKENS, CACHED_LOGITS // vocab_size)) if on_cpu else at_most


def is_plain_linear(head: nn.Module, vocab_size: int) -> bool:
    """Return whether ``head(x)`` is x Wᵀ with all of W at hand, and nothing else happens when it is called."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) is nn.Parameter
        and head.weight.shape[0] == vocab_size
        and "forward" not in vars(head)
        and not (head._forward_hooks or head._forward_pre_hooks)
    )


def _summed(head: nn.Module, hidden_states: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    logits = head(hidden_states)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")


class _SummedCrossEntropy(torch.autograd.Function):
    """hidden (T, D), weight (V, D), targets (T,) → the summed loss; its gradients are ready before backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, rows: int, differentiable: bool
    ) -> Tensor:
        device = hidden.device.type
        dtype = (autocast_dtype(device) if hidden.dtype != torch.float64 else None) or weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        needs_hidden, needs_weight = (differentiable and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sums over chunks are rounded once, at the end.
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        total = hidden.new_zeros((), dtype=exact)
        with without_autocast(device):
            matrix = weight.to(dtype)
            # Memory of this size that is new each time costs as much as the arithmetic in it.
            buffers = [hidden.new_empty(min(rows, len(hidden)), len(weight), dtype=exact) for _ in range(2)]
            for start in range(0, len(hidden), rows):
                part, at = hidden[start : start + rows].to(dtype), targets[start : start + rows]
                logits, logs = (buffer[: len(part)] for buffer in buffers)
                if dtype == exact:
                    torch.mm(part, matrix.T, out=logits)
                else:
                    logits.copy_(part @ matrix.T)
                torch.log_softmax(logits, dim=-1, out=logs)
                total += F.nll_loss(logs, at, ignore_index=ignore_index, reduction="sum")
                if grad_hidden is None and grad_weight is None:
                    continue
                # The gradient of the logits is softmax − one-hot, and 0 where nothing is to be predicted.
                counted = (at != ignore_index).unsqueeze(1)
                slope = logs.exp_().scatter_add_(1, at.unsqueeze(1) * counted, -counted.to(exact)).to(dtype)
                if grad_hidden is not None:
                    grad_hidden[start : start + rows] = (slope @ matrix).mul_(counted)
                if grad_weight is not None and dtype == exact:
                    grad_weight.addmm_(slope.T, part * counted)
                elif grad_weight is not None:
                    grad_weight += slope.T @ (part * counted)
        ctx.save_for_backward(grad_hidden, grad_weight if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        # Rounded once: a factor in half precision would scale all of them alike, and wrongly.
        gradients = (
            None if x is None else (x.to(torch.promote_types(x.dtype, torch.float32)) * grad_total).to(x.dtype)
            for x in ctx.saved_tensors
        )
        return (*gradients, None, None, None, None)
