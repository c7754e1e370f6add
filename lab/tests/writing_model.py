"""A stand-in for a language model whose texts a test decides."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from diff_lab.data import byte_tokenizer


class WritingModel:
    """Continues each prompt, of the byte tokenizer, with what `reply` makes of it and the end of the text."""

    device = torch.device("cpu")
    generation_config = SimpleNamespace(eos_token_id=256)

    def __init__(self, reply: Callable[[str], str], positions: int = 600) -> None:
        self.reply, self.tokenizer = reply, byte_tokenizer()
        self.config = SimpleNamespace(vocab_size=257, max_position_embeddings=positions)

    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any) -> Tensor:
        assert not generation_config.do_sample
        rows = []
        for row, mask in zip(input_ids, attention_mask, strict=True):
            answer = self.reply(self.tokenizer.decode(row[mask.bool()]))
            rows.append([*self.tokenizer.encode(answer), 256][: generation_config.max_new_tokens])
        width = max(map(len, rows))
        return torch.cat((input_ids, torch.tensor([row + [256] * (width - len(row)) for row in rows])), dim=1)
