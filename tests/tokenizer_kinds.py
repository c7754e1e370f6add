"""Tokenizers of the two kinds that are in use, both with tokens for every byte."""

import functools
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from diff_lab.data import byte_tokenizer, train_bpe

# Tokens of several bytes, of a part of a character, and of spaces come of it.
_TEXT = "def f(x):\n    if x:\n        return 'é ☃ 日本'\n\u3000\u00a0to be, or not to be\n"


@functools.cache
def llama_tokenizer() -> Any:
    """As Llama 2's, which SentencePiece made: spaces are "▁", one is put before a text and left out where tokens are
    decoded, and what has no token falls back to bytes."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdefinorstuxy:()'é☃"]
    pairs = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "t"), ("▁t", "o"), ("▁", "b"), ("▁b", "e"), ("i", "f"), ("▁", "if")]
    vocabulary = {name: number for number, name in enumerate([*names, *map("".join, pairs)])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@functools.cache
def bpe_tokenizer() -> Any:
    """As GPT-2's, whose tokens are strings of bytes."""
    return train_bpe([_TEXT] * 20, 330)


KINDS = {"bytes": byte_tokenizer, "GPT-2's": bpe_tokenizer, "Llama 2's": llama_tokenizer}
