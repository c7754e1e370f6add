"""Defines the models with other heads than that of the next token: masked tokens, classes, answers and texts."""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from diff_transformer.model.cache import given_cache
from diff_transformer.model.chunked_loss import IGNORED
from diff_transformer.model.configuration import DiffTransformerConfig
from diff_transformer.model.modeling import (
    DiffTransformerForCausalLM,
    DiffTransformerLanguageModel,
    DiffTransformerPreTrainedModel,
)

Pooling = Literal["mean", "first", "last"]


def pooled(hidden_states: Tensor, attention_mask: Tensor | None = None, pooling: Pooling = "mean") -> Tensor:
    """Pool tokens to one vector of each text: their mean, or the first or the last of them, padding left out.

    Args:
        hidden_states: (B, N, D), floating.
        attention_mask: (B, N), 0 at padding, which may stand on either side; None if there is none.
        pooling: "mean", "first" or "last".

    Returns:
        (B, D) in the dtype of ``hidden_states``. A mean is taken in float32 at least, and is 0 for padding alone.

    Raises:
        ValueError: another pooling, or a mask of another shape.

    Examples:
        >>> pooled(torch.tensor([[[1.0], [3.0], [9.0]]]), attention_mask=torch.tensor([[1, 1, 0]]))
        tensor([[2.]])
    """
    if pooling not in (known := get_args(Pooling)):
        raise ValueError(f"pooling must be one of {', '.join(map(repr, known))}, got {pooling!r}.")
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
    """Embed texts as the pooled last hidden states of a model, whose products are cosine similarities.

    They are differentiable if gradients are on, so that a contrastive loss can train them.

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

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> text_embeddings(DiffTransformerModel(config), torch.arange(10)[None]).shape
        torch.Size([1, 32])
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


class DiffTransformerForMaskedLM(DiffTransformerLanguageModel):
    """The encoder that finds masked tokens: :class:`DiffTransformerModel` and an output head, as the language model's.

    Weights of a causal model fit: ``from_pretrained(folder, is_causal=False)`` begins with them.

    Raises:
        ValueError: a configuration whose ``is_causal`` is True.

    Examples:
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> model = DiffTransformerForMaskedLM(DiffTransformerConfig(is_causal=False, **sizes))
        >>> model(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 64])
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        chunked_loss: bool = False,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Compute the logits of every token, and the loss if ``labels`` are given.

        The other arguments are those of :meth:`DiffTransformerModel.forward`.

        Args:
            labels: (B, N), at each masked token the one that it hides, −100 elsewhere; nothing is shifted. The mean
                over masked tokens, or the sum divided by ``num_items_in_batch`` if that is given.
            logits_to_keep: which positions get logits, or how many last ones; 0 for all.
            chunked_loss: compute the loss alone, from logits of masked tokens, a chunk at a time; logits are None then.

        Raises:
            ValueError: ``chunked_loss`` without labels.
        """
        if chunked_loss and labels is None:
            raise ValueError("chunked_loss=True gives a loss and no logits, so labels must be given, got None.")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if chunked_loss and labels is not None:
            masked = labels != kwargs.get("ignore_index", IGNORED)
            hidden_states, labels = hidden_states[masked].unsqueeze(0), labels[masked].unsqueeze(0)
            kwargs["shift_labels"] = labels
        logits, loss = self.logits_and_loss(hidden_states, labels, logits_to_keep, chunked_loss, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class DiffTransformerForSequenceClassification(GenericForSequenceClassification, DiffTransformerPreTrainedModel):
    """One label a text, (B, num_labels): a linear map of the last token that is no padding; of an encoder, which has
    seen all from everywhere, of the mean of the tokens that ``attention_mask`` shows.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForSequenceClassification(config)(torch.arange(10)[None]).logits.shape
        torch.Size([1, 2])
    """

    accepts_loss_kwargs = False  # its loss is a mean, which the Trainer has to divide by the parts of a batch

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Compute the logits of each text, and the loss given ``labels`` (B,), or (B, num_labels) for several."""
        inputs = input_ids, attention_mask, position_ids, given_cache(past_key_values, kwargs), inputs_embeds
        if self.config.is_causal:
            return super().forward(*inputs, labels=labels, use_cache=use_cache, **kwargs)
        outputs = self.model(*inputs, **kwargs)
        logits = self.score(pooled(outputs.last_hidden_state, attention_mask))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class DiffTransformerForTokenClassification(GenericForTokenClassification, DiffTransformerPreTrainedModel):
    """One label a token: a linear map of every token, (B, N, num_labels).

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForTokenClassification(config)(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 2])
    """

    accepts_loss_kwargs = False


class DiffTransformerForQuestionAnswering(GenericForQuestionAnswering, DiffTransformerPreTrainedModel):
    """Scores the first and the last token of the answer in the text: two logits a token, each (B, N).

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForQuestionAnswering(config)(torch.arange(10)[None]).start_logits.shape
        torch.Size([1, 10])
    """

    accepts_loss_kwargs = False


LanguageModel = DiffTransformerForCausalLM | DiffTransformerForMaskedLM


def language_model_class(config: DiffTransformerConfig) -> type[LanguageModel]:
    """Return the class that is trained on text: of the next token if the model is causal, else of masked ones."""
    return DiffTransformerForCausalLM if config.is_causal else DiffTransformerForMaskedLM
