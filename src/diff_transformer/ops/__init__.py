"""The operator: tensors in, tensors out. Needs torch alone."""

from diff_transformer.ops.attention import diff_attention, diff_attention_maps
from diff_transformer.ops.lambdas import lambda_init_schedule, lambda_value
from diff_transformer.ops.norm import rms_norm
from diff_transformer.ops.rotary import apply_rotary, rotary_tables

__all__ = [
    "apply_rotary",
    "diff_attention",
    "diff_attention_maps",
    "lambda_init_schedule",
    "lambda_value",
    "rms_norm",
    "rotary_tables",
]
