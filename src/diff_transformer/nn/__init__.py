"""Gives the modules that own parameters; each is usable alone in somebody's own model. Needs torch alone."""

from diff_transformer.nn.attention import Attention, KeyValueCache, SoftmaxAttention
from diff_transformer.nn.dex import (
    AnnealedLambda,
    DexAttention,
    DexCorrection,
    annealed_lambda,
    fold_output,
    set_dex_progress,
)
from diff_transformer.nn.differential import (
    DiffAttention,
    DiffAttentionV2,
    DiffAttentionV3,
    DifferentialAttention,
    GroupedDiffAttention,
    GroupedDiffAttentionV2,
)
from diff_transformer.nn.latent import LatentDiffAttention
from diff_transformer.nn.layers import (
    DecoderLayer,
    DualLambda,
    HeadwiseNorm,
    KeepsFloat32,
    Lambda,
    PolyNorm,
    PolyNormGLU,
    QueryKeyClip,
    QueryKeyNorm,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)

__all__ = [
    "AnnealedLambda",
    "Attention",
    "DecoderLayer",
    "DexAttention",
    "DexCorrection",
    "DiffAttention",
    "DiffAttentionV2",
    "DiffAttentionV3",
    "DifferentialAttention",
    "DualLambda",
    "GroupedDiffAttention",
    "GroupedDiffAttentionV2",
    "HeadwiseNorm",
    "KeepsFloat32",
    "KeyValueCache",
    "Lambda",
    "LatentDiffAttention",
    "PolyNorm",
    "PolyNormGLU",
    "QueryKeyClip",
    "QueryKeyNorm",
    "RMSNorm",
    "RotaryEmbedding",
    "SoftmaxAttention",
    "SwiGLU",
    "annealed_lambda",
    "fold_output",
    "set_dex_progress",
]
