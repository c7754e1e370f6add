"""Data: text as token windows, and the synthetic retrieval task."""

from diff_transformer.data.batches import Batches, TextBatches, split_documents
from diff_transformer.data.retrieval import RetrievalBatches, RetrievalSample
from diff_transformer.data.text import load_text
from diff_transformer.data.tokenizers import byte_tokenizer, bytes_of_tokens, encode_documents, train_bpe

__all__ = [
    "Batches",
    "RetrievalBatches",
    "RetrievalSample",
    "TextBatches",
    "byte_tokenizer",
    "bytes_of_tokens",
    "encode_documents",
    "load_text",
    "split_documents",
    "train_bpe",
]
