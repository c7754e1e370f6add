"""Gives the configuration and the models for transformers, one implementation for all attention types.

Importing it registers the models with transformers' Auto classes and the operator with its attention interface.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from diff_transformer.model.cache import DiffCache
from diff_transformer.model.configuration import AUTO_CLASSES, DiffTransformerConfig, cache_view_class
from diff_transformer.model.int8 import Int8Config
from diff_transformer.model.interface_attention import (
    AttentionMaps,
    attends_by_document,
    attention_maps,
    register_attention,
)
from diff_transformer.model.modeling import (
    DiffTransformerForCausalLM,
    DiffTransformerModel,
    DiffTransformerPreTrainedModel,
)
from diff_transformer.model.task_models import (
    DiffTransformerForMaskedLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    LanguageModel,
    language_model_class,
    pooled,
    text_embeddings,
)

register_attention()
for auto_class, name in AUTO_CLASSES.items():
    if auto_class == "AutoConfig":
        transformers.AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
        continue
    # The Auto classes ask for a configuration's very class, and some callers have what get_text_config() returned.
    for config_class in (DiffTransformerConfig, cache_view_class(DiffTransformerConfig)):
        getattr(transformers, auto_class).register(config_class, globals()[name], exist_ok=True)

# There the Trainer looks whether its own loss, as for label smoothing, is of the next token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DiffTransformerConfig.model_type] = DiffTransformerForCausalLM.__name__

__all__ = [
    "AttentionMaps",
    "DiffCache",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForMaskedLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "DiffTransformerPreTrainedModel",
    "Int8Config",
    "LanguageModel",
    "attends_by_document",
    "attention_maps",
    "language_model_class",
    "pooled",
    "text_embeddings",
]
