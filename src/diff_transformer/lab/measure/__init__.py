"""Measures trained models; each measurement also runs on a checkpoint alone, by `diff-transformer eval`."""

from diff_transformer.lab.measure.attention_heads import head_entropies, widest_heads
from diff_transformer.lab.measure.retrieval import AttentionMass, attention_mass, retrieval_answers
from diff_transformer.lab.measure.standard import (
    LanguageLoss,
    evaluate,
    language_loss,
    language_records,
    retrieval_records,
    validation_callback,
)

__all__ = [
    "AttentionMass",
    "LanguageLoss",
    "attention_mass",
    "evaluate",
    "head_entropies",
    "language_loss",
    "language_records",
    "retrieval_answers",
    "retrieval_records",
    "validation_callback",
    "widest_heads",
]
