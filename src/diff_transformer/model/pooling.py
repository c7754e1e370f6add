"""Makes one vector of a text from those of its tokens."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Pooling = Literal["mean", "first", "last"]
_POOLINGS = ("mean", "first", "last")


def pooled(hidden_states: Tensor, attention_mask: Tensor | None = None, pooling: Pooling = "mean") -> Tensor:
    """One vector of each text: the mean of its tokens, or the first or the last of them, padding left out.

    Args:
        hidden_states: (B, N, D), floating.
        attention_mask: (B, N), 0 at padding, which may stand on either side; None where there is none.
        pooling: "mean", "first" or "last".

    Returns:
        (B, D) in the dtype of ``hidden_states``; the mean is taken in float32 at least. A text of padding alone gives 0
        as its mean.

    Raises:
        ValueError: another pooling, or a mask of another shape.
    """
    if pooling not in _POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(map(repr, _POOLINGS))}, got {pooling!r}.")
    batch, n, _ = hidden_states.shape
    if attention_mask is None:
        attention_mask = torch.ones(batch, n, dtype=torch.bool, device=hidden_states.device)
    if tuple(attention_mask.shape) != (batch, n):
        raise ValueError(
            f"pooling needs a mask that says which tokens are padding, (B, N) = ({batch}, {n}), "
            f"got {tuple(attention_mask.shape)}."
        )
    real = attention_mask.to(hidden_states.device) != 0
    if pooling == "mean":
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        # Selected, not multiplied: a NaN at padding stays out.
        total = torch.where(real.unsqueeze(-1), wide, 0.0).sum(1)
        return (total / real.sum(1, keepdim=True).clamp(min=1)).to(hidden_states.dtype)
    places = torch.arange(n, device=hidden_states.device)
    chosen = torch.where(real, places, n - 1).amin(1) if pooling == "first" else (places * real).amax(1)
    return hidden_states[torch.arange(batch, device=hidden_states.device), chosen]


def text_embeddings(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
) -> Tensor:
    """Embeddings of texts: the pooled last hidden states of a model, whose products are cosine similarities.

    Differentiable where gradients are on, so that a contrastive loss can train them.

    Args:
        model: one of ours, with a head or without, in training mode or not, or one with adapters of PEFT's.
        input_ids: (B, N) tokens.
        attention_mask: (B, N), 0 at padding, or None.
        pooling: "mean", "first" or "last"; unless given, "mean" for encoders and "last" for causal models, whose last
            token alone has seen all others.
        normalize: whether each vector is divided by its length.

    Returns:
        (B, D).

    Raises:
        ValueError: as :func:`pooled`; or the model has learned prompts of PEFT's, which come before the tokens.
    """
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise ValueError(
            f"text_embeddings knows no learned prompts, got a model with PEFT's {adapter.peft_type.value}."
        )
    base = getattr(model, "get_base_model", lambda: model)().base_model  # of PEFT's wrapper, whose own is another
    outputs = base(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    vectors = pooled(
        outputs.last_hidden_state, attention_mask, pooling or ("last" if model.config.is_causal else "mean")
    )
    return F.normalize(vectors, dim=-1) if normalize else vectors
