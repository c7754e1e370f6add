"""Differential attention (arXiv 2410.05258): the operator, the modules, the model and its twin.

The public names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from diff_transformer._registration import register_with_other_packages

if TYPE_CHECKING:
    from diff_transformer.model import (
        DiffTransformerConfig,
        DiffTransformerForCausalLM,
        DiffTransformerForQuestionAnswering,
        DiffTransformerForSequenceClassification,
        DiffTransformerForTokenClassification,
        DiffTransformerModel,
        attention_maps,
    )
    from diff_transformer.nn import DiffAttention, DiffAttentionV2, SoftmaxAttention
    from diff_transformer.ops import diff_attention, diff_attention_maps

__version__ = "0.1.0"
# Shown to users who lack the package, which is on no package index, or one of its extras.
CHECKOUT = "in a checkout of the diff-transformer repository"
INSTALL = f"pip install . {CHECKOUT}"

_ROOM_OF = {
    "diff_attention": "ops",
    "diff_attention_maps": "ops",
    "DiffAttention": "nn",
    "DiffAttentionV2": "nn",
    "SoftmaxAttention": "nn",
    "DiffTransformerConfig": "model",
    "DiffTransformerModel": "model",
    "DiffTransformerForCausalLM": "model",
    "DiffTransformerForQuestionAnswering": "model",
    "DiffTransformerForSequenceClassification": "model",
    "DiffTransformerForTokenClassification": "model",
    "attention_maps": "model",
}

__all__ = [
    "DiffAttention",
    "DiffAttentionV2",
    "DiffTransformerConfig",
    "DiffTransformerForCausalLM",
    "DiffTransformerForQuestionAnswering",
    "DiffTransformerForSequenceClassification",
    "DiffTransformerForTokenClassification",
    "DiffTransformerModel",
    "SoftmaxAttention",
    "__version__",
    "attention_maps",
    "diff_attention",
    "diff_attention_maps",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'diff_transformer' has no attribute {name!r}")
    return getattr(importlib.import_module(f"diff_transformer.{_ROOM_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_other_packages()
