"""Converts checkpoints from and to other layouts (docs/converting.md), and writes our models as folders to share."""

from diff_transformer.convert.conversion import (
    MAX_SHARD_SIZE,
    Converted,
    Progress,
    as_our_model,
    convert_from,
    convert_to,
)
from diff_transformer.convert.layout import Layout, Row
from diff_transformer.convert.layout_tables import LAYOUTS
from diff_transformer.convert.phi4flash_attention import Phi4FlashAttention, phi4flash_attention
from diff_transformer.convert.shared_folder import Exported, export_card, export_folder, export_onnx
from diff_transformer.convert.timm_attention import from_timm, timm_state_dict

__all__ = [
    "LAYOUTS",
    "MAX_SHARD_SIZE",
    "Converted",
    "Exported",
    "Layout",
    "Phi4FlashAttention",
    "Progress",
    "Row",
    "as_our_model",
    "convert_from",
    "convert_to",
    "export_card",
    "export_folder",
    "export_onnx",
    "from_timm",
    "phi4flash_attention",
    "timm_state_dict",
]
