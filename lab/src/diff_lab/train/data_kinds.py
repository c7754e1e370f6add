"""Defines a recipe's kinds of data: the settings of each, how it is made, and its words in plans and model cards.

A kind is a class here, listed in `AnyData`, and a file in `diff_lab.data` that makes its batches.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_lab.data import (
    ArithmeticBatches,
    Batches,
    Corpus,
    HubDataset,
    ManyShotBatches,
    MaskedTextBatches,
    RecallBatches,
    RetrievalBatches,
    Tell,
    TextBatches,
    TextFiles,
    byte_tokenizer,
    prepare,
    trained_bpe,
    with_mask_token,
)
from diff_lab.data.recall_task import PAIR
from diff_lab.train.distributed import broadcast_from_rank0

# Of whole numbers that tensors and generators of random numbers take.
LARGEST_INTEGER = (1 << 63) - 1
Count = Annotated[int, Field(ge=1, le=LARGEST_INTEGER)]
BatchSize = Annotated[int, Field(ge=1, le=1 << 20)]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no conversions ("3" is not 3), no changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True)
class Data:
    """Batches, and the tokenizer that made them (None for data that never was text)."""

    batches: Batches
    tokenizer: PreTrainedTokenizerFast | None = None


class TextData(Section):
    """Language modelling of real text; see `diff_lab.data.text_batches.TextBatches`.

    The text is in `paths` or a `dataset`, or it is the source of Python's standard library. docs/training.md explains
    each setting.
    """

    is_causal: ClassVar[bool] = True  # whether the model predicts the next token; else it is an encoder

    kind: Literal["text"] = "text"
    paths: Annotated[list[str], BeforeValidator(lambda path: [path] if isinstance(path, str) else path)] | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    text_field: str = "text"
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    vocab_size: Annotated[int, Field(gt=257, le=LARGEST_INTEGER)] | None = None
    length: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)]
    batch_size: BatchSize
    isolate_documents: bool = True
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    validation_tokens: Count | None = 100_000
    cache: str | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> "TextData":
        if (self.tokenizer == "bpe") != (self.vocab_size is not None):
            raise ValueError('vocab_size is given with tokenizer "bpe", and only then')
        if self.paths is not None and self.dataset is not None:
            raise ValueError("the text is either in paths or in a dataset, not in both")
        return self

    def describe(self) -> str:
        """Describe the data in a few words, for plans and model cards."""
        if self.dataset is not None:
            return f"the data set {self.dataset}"
        if self.paths is None:
            return "the source of Python's standard library"
        # Names alone: the folders that they lay in are in the recipe.
        return ", ".join(PurePath(path).name or path for path in self.paths)

    def vocabulary(self) -> int:
        """Return the size of the vocabulary, as far as the settings tell it; raises ValueError if they do not."""
        if self.tokenizer == "bytes":
            return len(byte_tokenizer())
        if self.vocab_size is not None:
            return self.vocab_size
        if not Path(os.path.expanduser(self.tokenizer)).is_dir():
            raise ValueError(
                f"a plan downloads nothing, and data.tokenizer {self.tokenizer!r} is no folder: give its number of "
                "tokens as model.vocab_size."
            )
        return len(self._tokenizer())

    def build(self, seed: int, tokenizer: PreTrainedTokenizerFast | None = None, tell: Tell | None = None) -> Data:
        """Find or make the data, with the seed of the training batches; see `diff_lab.train.run_setup.build_data`."""
        text: TextFiles | HubDataset = TextFiles(self.paths, self.text_field)
        if self.dataset is not None:
            text = HubDataset(self.dataset, self.dataset_config, self.dataset_split, self.text_field)
        corpus = replace(text, known=broadcast_from_rank0(text.fingerprint))  # rank 0 looks whether it has changed
        tokenizer = tokenizer or self._tokenizer(corpus)
        return Data(self._batches(corpus, tokenizer, seed, tell, self.batch_size), tokenizer)

    @property
    def _folder(self) -> Path | None:
        return None if self.cache is None else Path(os.path.expanduser(self.cache))

    def _tokenizer(self, corpus: Corpus | None = None) -> PreTrainedTokenizerFast:
        """Make the tokenizer, or load it from a folder or the Hub. A "bpe" is trained on the corpus."""
        if self.tokenizer == "bytes":
            return byte_tokenizer()
        if self.vocab_size is not None and corpus is not None:
            return trained_bpe(corpus, self.validation_fraction, self.vocab_size, self._folder)
        try:
            return AutoTokenizer.from_pretrained(os.path.expanduser(self.tokenizer))
        except Exception as error:  # of a damaged file: tokenizers raises nothing more specific
            raise ValueError(
                f'data.tokenizer is "bytes", "bpe", or the folder or name of a tokenizer, and {self.tokenizer!r} '
                f"cannot be loaded: {' '.join(str(error).split())}"
            ) from None

    def _batches(
        self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int, tell: Tell | None, batch_size: int
    ) -> Batches:
        return TextBatches(
            prepare(corpus, tokenizer, self._folder, tell),
            tokenizer,
            batch_size=batch_size,
            seed=seed,
            isolated=self.isolate_documents,
            **self.model_dump(include={"length", "validation_fraction", "validation_tokens"}),
        )


class NeedleData(TextData):
    """Text with needle documents among it, which version 0.2.0 made: the recipes of such models are only read."""

    kind: Literal["needles"] = "needles"  # type: ignore[assignment]  # what tells it from text
    share: Annotated[float, Field(gt=0, le=1)] = 0.2
    needles: Count = 4
    queried: Count = 2
    digits: Annotated[int, Field(ge=1, le=18)] = 7
    turns: Count = 1
    validation_documents: Count = 128

    def describe(self) -> str:
        return f"{super().describe()}, with needle documents among it"

    def build(self, *_: Any, **__: Any) -> Data:
        raise ValueError(
            "Data of kind 'needles' is no longer made: train on data.kind=recall, and name text for the evaluation of "
            "a model of such a run (--text)."
        )


class MaskedTextData(TextData):
    """Text of which an encoder finds hidden tokens; see `diff_lab.data.masked_text.MaskedTextBatches`.

    `mask_fraction` is the share of each sequence that is to be found. A tokenizer without a mask token gets one.
    """

    is_causal: ClassVar[bool] = False

    kind: Literal["masked_text"] = "masked_text"  # type: ignore[assignment]  # what tells it from text
    mask_fraction: Annotated[float, Field(gt=0, le=1)] = 0.3

    def describe(self) -> str:
        return f"{super().describe()}, with hidden tokens"

    def vocabulary(self) -> int:
        plain = super().vocabulary()  # of what `_tokenizer` loads it has the mask token already
        return plain + (self.tokenizer == "bytes" or self.vocab_size is not None)

    def _tokenizer(self, corpus: Corpus | None = None) -> PreTrainedTokenizerFast:
        return with_mask_token(super()._tokenizer(corpus))

    def _batches(
        self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int, tell: Tell | None, batch_size: int
    ) -> Batches:
        text: Any = super()._batches(corpus, tokenizer, seed, tell, batch_size)
        return MaskedTextBatches(text, tokenizer, mask_fraction=self.mask_fraction, seed=seed)


class GeneratedData(Section):
    """Data that a seeded generator makes as it is read; its settings are the arguments of the generator."""

    is_causal: ClassVar[bool] = True
    generator: ClassVar[Callable[..., Batches]]  # makes the batches; its `tokenizer`, if any, goes with the model
    summary: ClassVar[str]  # in a few words

    def describe(self) -> str:
        return self.summary

    def vocabulary(self) -> int:
        return self._generated().vocab_size

    def build(self, seed: int, *_: Any) -> Data:
        batches = self._generated(seed=seed)
        return Data(batches, getattr(batches, "tokenizer", None))

    def _generated(self, **arguments: int) -> Batches:
        return type(self).generator(**self.model_dump(exclude={"kind"}), **arguments)


class RetrievalData(GeneratedData):
    """Multi-needle retrieval among noise tokens; see `diff_lab.data.retrieval_task.RetrievalBatches`."""

    generator = RetrievalBatches
    summary = "multi-needle retrieval from a seeded generator"

    kind: Literal["retrieval"] = "retrieval"
    num_pairs: Count = 4
    length: Count = 128
    num_queries: Count | None = None
    repeats: bool = False
    vary: bool = False
    batch_size: BatchSize = 32
    num_keys: Count = 64
    num_values: Count = 64
    num_noise: Count = 128
    validation_sequences: Count = 1024


class RecallData(GeneratedData):
    """Recall among distractors of the same form; see `diff_lab.data.recall_task.RecallBatches`."""

    generator = RecallBatches
    summary = "associative recall among distractors, from a seeded generator"

    kind: Literal["recall"] = "recall"
    pairs: Count = 32
    questions: Count = 16
    tokens: Count = 16
    batch_size: BatchSize = 32
    validation_sequences: Count = 256

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return PAIR * (self.pairs + self.questions)


class ManyShotData(GeneratedData):
    """Words of classes shown with labels; see `diff_lab.data.many_shot_task.ManyShotBatches`."""

    generator = ManyShotBatches
    summary = "many-shot classification from a seeded generator"

    kind: Literal["many_shot"] = "many_shot"
    shots: Count = 48
    classes: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)] = 6
    labels: Count = 32
    words: Count = 36
    item_length: Count = 2
    noise: Annotated[float, Field(ge=0, lt=1)] = 0.1
    vary: bool = False
    batch_size: BatchSize = 32
    validation_sequences: Count = 512

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.shots * (self.item_length + 1)


class ArithmeticData(GeneratedData):
    """Sums worked out step by step, as text; see `diff_lab.data.arithmetic_task.ArithmeticBatches`."""

    generator = ArithmeticBatches
    summary = "sums worked out step by step, from a seeded generator"

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Count = 4
    length: Count = 48
    batch_size: BatchSize = 64
    largest: Count = 9
    validation_problems: Count = 512


AnyData = TextData | MaskedTextData | RetrievalData | RecallData | ManyShotData | ArithmeticData
KINDS: dict[str, type[TextData | GeneratedData]] = {
    section.model_fields["kind"].default: section for section in get_args(AnyData)
}
