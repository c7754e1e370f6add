"""Makes batches to train on: text in tokens, packed into blocks, and generated tasks."""

from diff_lab.data.arithmetic_task import ArithmeticBatches
from diff_lab.data.batches import Batches
from diff_lab.data.corpus import Corpus, HubDataset, TextFiles
from diff_lab.data.many_shot_task import Episode, LabelledText, ManyShotBatches, read_labelled
from diff_lab.data.masked_text import MaskedTextBatches, with_mask_token
from diff_lab.data.recall_task import RecallBatches
from diff_lab.data.retrieval_task import RetrievalBatches, RetrievalSample
from diff_lab.data.text_batches import TextBatches
from diff_lab.data.token_cache import Tell, prepare
from diff_lab.data.tokenizers import byte_tokenizer, train_bpe, trained_bpe

__all__ = [
    "ArithmeticBatches",
    "Batches",
    "Corpus",
    "Episode",
    "HubDataset",
    "LabelledText",
    "ManyShotBatches",
    "MaskedTextBatches",
    "RecallBatches",
    "RetrievalBatches",
    "RetrievalSample",
    "Tell",
    "TextBatches",
    "TextFiles",
    "byte_tokenizer",
    "prepare",
    "read_labelled",
    "train_bpe",
    "trained_bpe",
    "with_mask_token",
]
