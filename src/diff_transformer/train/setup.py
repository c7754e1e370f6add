"""From a recipe to the things that are trained: data and a model with its first weights."""

import hashlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from diff_transformer.data.batches import Batches, TextBatches, split_documents
from diff_transformer.data.retrieval import RetrievalBatches
from diff_transformer.data.text import load_text
from diff_transformer.data.tokenizers import byte_tokenizer, train_bpe
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.train.recipe import Recipe, RetrievalData, build_config


@dataclass(frozen=True)
class Data:
    """Batches, and the tokenizer that made them (None for data that never was text)."""

    batches: Batches
    tokenizer: PreTrainedTokenizerFast | None = None


def build_data(recipe: Recipe, tokenizer: PreTrainedTokenizerFast | None = None) -> Data:
    """Load and encode a recipe's data.

    Args:
        recipe: the recipe.
        tokenizer: a trained model's own, for text; made as the recipe says unless given.

    Raises:
        FileNotFoundError, ValueError: as `load_text`, `TextBatches` and `RetrievalBatches`.
    """
    data, seed = recipe.data, recipe.train.seed
    if isinstance(data, RetrievalData):
        return Data(RetrievalBatches(**data.model_dump(exclude={"kind"}), seed=seed))
    documents = load_text(data.paths, field=data.text_field)
    if tokenizer is None:
        if data.vocab_size is None:
            tokenizer = byte_tokenizer()
        else:  # merges are learned from the training documents alone, so validation stays unseen
            tokenizer = train_bpe(split_documents(documents, data.validation_fraction)[0], data.vocab_size)
    batches = TextBatches(
        documents,
        tokenizer,
        length=data.length,
        batch_size=data.batch_size,
        seed=seed,
        validation_fraction=data.validation_fraction,
        validation_tokens=data.validation_tokens,
    )
    return Data(batches, tokenizer)


def build_model(recipe: Recipe, data: Data) -> DiffTransformerForCausalLM:
    """A recipe's model in float32 with its first weights.

    Every module draws its weights from a stream of its own, named by the seed and the module. So whatever twins have in
    common starts with identical numbers, although one of them has modules that the other lacks.
    """
    model = DiffTransformerForCausalLM(build_config(recipe, data.batches.vocab_size, data.tokenizer))
    if data.tokenizer is not None:
        model.generation_config.pad_token_id = data.tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{recipe.train.seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            model._init_weights(module)  # transformers' hook: the model's own rule for each kind of module
    return model
