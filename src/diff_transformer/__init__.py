"""Gives the operator of differential attention (arXiv 2410.05258), the modules and the models.

The public names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from diff_transformer._registration import register_with_other_packages
from diff_transformer._version import __version__

if TYPE_CHECKING:
    from diff_transformer.explorer import explore
    from diff_transformer.model import (
        DiffTransformerConfig,
        DiffTransformerForCausalLM,
        DiffTransformerForMaskedLM,
        DiffTransformerForQuestionAnswering,
        DiffTransformerForSequenceClassification,
        DiffTransformerForTokenClassification,
        DiffTransformerModel,
        attention_maps,
        text_embeddings,
    )
    from diff_transformer.nn import DiffAttention, DiffAttentionV2, GroupedDiffAttention, SoftmaxAttention
    from diff_transformer.ops import diff_attention, diff_attention_maps
    from diff_transformer.shipped_models import pretrained, pretrained_names

__all__ = [
    "DiffAttention",
    "DiffAttentionV2",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForMaskedLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "GroupedDiffAttention",
    "SoftmaxAttention",
    "__version__",
    "attention_maps",
    "diff_attention",
    "diff_attention_maps",
    "explore",
    "pretrained",
    "pretrained_names",
    "text_embeddings",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for package in ("shipped_models", "ops", "nn", "model", "explorer"):  # the last three import those before them
            module = importlib.import_module(f"diff_transformer.{package}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'diff_transformer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_other_packages()
