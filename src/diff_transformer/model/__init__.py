"""The configuration and the models for transformers, one implementation for all attention types.

Importing this package registers the models with transformers' Auto classes and our operator with its attention
interface.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from diff_transformer.model.attention_masks import attends_by_document
from diff_transformer.model.configuration import DiffTransformerConfig, call_config_class
from diff_transformer.model.interface_attention import AttentionMaps, register_attention
from diff_transformer.model.modeling import (
    DiffTransformerForCausalLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    DiffTransformerModel,
    DiffTransformerPreTrainedModel,
    attention_maps,
)

register_attention()
AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
# The Auto classes ask for a configuration's very class, and some callers have what get_text_config() returned.
for config_class in (DiffTransformerConfig, call_config_class(DiffTransformerConfig)):
    AutoModel.register(config_class, DiffTransformerModel, exist_ok=True)
    AutoModelForCausalLM.register(config_class, DiffTransformerForCausalLM, exist_ok=True)
    AutoModelForQuestionAnswering.register(config_class, DiffTransformerForQuestionAnswering, exist_ok=True)
    AutoModelForSequenceClassification.register(config_class, DiffTransformerForSequenceClassification, exist_ok=True)
    AutoModelForTokenClassification.register(config_class, DiffTransformerForTokenClassification, exist_ok=True)

__all__ = [
    "AttentionMaps",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "DiffTransformerPreTrainedModel",
    "attends_by_document",
    "attention_maps",
]
