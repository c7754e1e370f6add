"""Data: text in tokens, packed into blocks, and tasks of retrieval and many-shot classification."""

from diff_transformer.data.arithmetic import ArithmeticBatches, Problem
from diff_transformer.data.batches import Batches, TextBatches
from diff_transformer.data.cache import cache_folder
from diff_transformer.data.corpus import Corpus, Fingerprinted, HubDataset, Piece, TextFiles
from diff_transformer.data.labelled import LabelledText, read_labelled
from diff_transformer.data.many_shot import Episode, ManyShotBatches
from diff_transformer.data.needle_batches import NeedleBatches
from diff_transformer.data.needles import NeedleDocument, NeedleTask
from diff_transformer.data.retrieval import RetrievalBatches, RetrievalSample
from diff_transformer.data.split import training_text, validation_text
from diff_transformer.data.token_cache import Tell, TokenCache, prepare, token_dtype
from diff_transformer.data.tokenizers import byte_tokenizer, bytes_of_tokens, encode_documents, train_bpe, trained_bpe

__all__ = [
    "ArithmeticBatches",
    "Batches",
    "Corpus",
    "Episode",
    "Fingerprinted",
    "HubDataset",
    "LabelledText",
    "ManyShotBatches",
    "NeedleBatches",
    "NeedleDocument",
    "NeedleTask",
    "Piece",
    "Problem",
    "RetrievalBatches",
    "RetrievalSample",
    "Tell",
    "TextBatches",
    "TextFiles",
    "TokenCache",
    "byte_tokenizer",
    "bytes_of_tokens",
    "cache_folder",
    "encode_documents",
    "prepare",
    "read_labelled",
    "token_dtype",
    "train_bpe",
    "trained_bpe",
    "training_text",
    "validation_text",
]
