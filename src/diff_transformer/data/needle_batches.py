"""Batches of text and, among it, documents with needles, so that a small model can learn the template."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diff_transformer.data.batches import TextBatches
from diff_transformer.data.needles import TRAIN, VALIDATION, NeedleDocument, NeedleTask
from diff_transformer.data.packing import IGNORED


class NeedleBatches:
    """Sequences of text in which every token is learned, and of needle documents in which the answers are.

    Args:
        text: gives the text's sequences, as many as each batch has; None where all are needle documents.
        training: draws the needle documents to train on.
        validation: draws those to validate with, from a haystack that is not trained on.
        documents: needle documents in a batch.
        vocab_size: tokens of the tokenizer.
        seed: of the training documents; the validation documents do not depend on it.
        validation_documents: needle documents in `validation_batches`.

    Attributes:
        source: a fingerprint of the haystack's text.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(
        self,
        text: TextBatches | None,
        training: NeedleTask,
        validation: NeedleTask,
        *,
        documents: int,
        vocab_size: int,
        seed: int = 0,
        validation_documents: int = 128,
    ) -> None:
        if documents < 1 or validation_documents < 1:
            raise ValueError(
                "A batch and the validation have one needle document or more, "
                f"got documents={documents}, validation_documents={validation_documents}."
            )
        self.text, self.training, self.validation = text, training, validation
        self.documents, self.vocab_size, self.seed = documents, vocab_size, seed
        self.validation_documents = validation_documents
        self.source = hashlib.sha256(training.haystack.encode("utf-8", "surrogatepass")).hexdigest()

    def train_batch(self, step: int) -> dict[str, Tensor]:
        """The text's batch of a step and the needle documents of the step below it; see `Batches.train_batch`."""
        first = (step - 1) * self.documents
        drawn = [self.training.draw((self.seed, TRAIN, first + number)) for number in range(self.documents)]
        batch = padded(drawn, self.training.length)
        if self.text is None:
            return batch
        above = self.text.train_batch(step)
        if "position_ids" in above:
            positions = torch.arange(self.training.length).expand_as(batch["input_ids"])
            batch["position_ids"] = positions
        return {name: torch.cat((above[name], batch[name])) for name in batch}

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        """`validation_documents` fixed needle documents, without the text; the last batch may be smaller."""
        size = self.documents + (0 if self.text is None else self.text.batch_size)
        for start in range(0, self.validation_documents, size):
            stop = min(start + size, self.validation_documents)
            drawn = [self.validation.draw((0, VALIDATION, number)) for number in range(start, stop)]
            yield padded(drawn, self.validation.length)


def padded(documents: Sequence[NeedleDocument], length: int) -> dict[str, Tensor]:
    """Documents as a batch: `input_ids` and `labels`, both (documents, length) int64, with labels on answers alone.

    Behind the end of a document its last token is repeated, where nothing is learned.
    """
    input_ids = torch.empty(len(documents), length, dtype=torch.long)
    labels = torch.full_like(input_ids, IGNORED)
    for row, document in enumerate(documents):
        tokens = torch.tensor(document.tokens)
        input_ids[row, : len(tokens)] = tokens
        input_ids[row, len(tokens) :] = tokens[-1]
        labels[row, : len(tokens)] = torch.where(torch.tensor(document.learned), tokens, IGNORED)
    return {"input_ids": input_ids, "labels": labels}
