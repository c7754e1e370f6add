"""Gives the operator of differential attention and its parts, as functions of tensors. Needs torch alone."""

from diff_transformer.attention_types import lambda_init_schedule
from diff_transformer.ops.functional import apply_rotary, lambda_value, rms_norm, rotary_tables
from diff_transformer.ops.operator import diff_attention, diff_attention_maps

__all__ = [
    "apply_rotary",
    "diff_attention",
    "diff_attention_maps",
    "lambda_init_schedule",
    "lambda_value",
    "rms_norm",
    "rotary_tables",
]
