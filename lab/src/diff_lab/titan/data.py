"""A recipe's batches as torchtitan's data loader: a batch is a function of the step, so there is no other state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from diff_lab.data.batches import IGNORED


@dataclass(kw_only=True, slots=True)
class RecipeTokenizer(BaseTokenizer.Config):
    """The recipe's tokenizer, which is saved with the model; its data are tokens already."""

    tokenizer: Any = None

    def build(self, **_: Any) -> Any:
        return self.tokenizer


class RecipeDataLoader(BaseDataLoader):
    """Gives a rank its rows of each step's batch, `local_batch_size` at a time, in one row (1, rows · length)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """The recipe's data, and the rows of a step on all ranks."""

        batches: Any = None
        rows: int = 0

        def to_dict(self) -> dict[str, Any]:
            return {"rows": self.rows}  # torchtitan would copy the tokens for its log

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        own = config.rows // dp_world_size
        self.batches, self.ranks, self.rank = config.batches, dp_world_size, dp_rank
        self.own, self.at_once = range(dp_rank * own, (dp_rank + 1) * own), local_batch_size
        self.step = 0  # that its batches are of, which the trainer sets

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        while True:
            for start in self.own[:: self.at_once]:
                yield in_one_row(self.batches.train_batch(self.step, slice(start, start + self.at_once)))


def in_one_row(batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    """Put rows (B, N) into one (1, B·N) with its documents, and with the token after each as its label."""
    tokens = batch["input_ids"]
    rows, length = tokens.shape
    labels = torch.cat((batch["labels"][:, 1:], tokens.new_full((rows, 1), IGNORED)), dim=1)
    numbers = torch.arange(length, device=tokens.device)
    positions = batch.get("position_ids", numbers.expand(rows, -1)).reshape(1, -1)
    documents = [*(positions[0] == 0).nonzero().squeeze(1).tolist(), rows * length]
    return {"input": tokens.reshape(1, -1), "positions": positions, "documents": documents}, labels.reshape(1, -1)
