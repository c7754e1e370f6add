"""From a recipe to the things that are trained: data and a model with its first weights."""

import hashlib
from contextlib import nullcontext

import torch
from transformers import PreTrainedTokenizerFast

from diff_transformer.data import Tell
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.train.data_kinds import Data, DataRequest
from diff_transformer.train.distributed import materialized
from diff_transformer.train.initial_weights import load_initial_weights
from diff_transformer.train.recipe import Recipe, build_config


def build_data(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerFast | None = None,
    tell: Tell | None = None,
    workers: int | None = None,
) -> Data:
    """Find or make a recipe's data. Called on every process of a run: the first one looks whether text has changed.

    Args:
        recipe: the recipe.
        tokenizer: a trained model's own, for text; made as the recipe says unless given.
        tell: is told how many documents and tokens are prepared so far.
        workers: processes that tokenise, see :func:`diff_transformer.data.prepare`.

    Raises:
        FileNotFoundError, ValueError: as the corpus, `prepare` and the batches of the data's kind.
        ConnectionError: another process of the run has ended meanwhile.
    """
    return recipe.data.build(
        DataRequest(recipe.train.seed, recipe.train.timeout_minutes, tokenizer=tokenizer, tell=tell, workers=workers)
    )


def build_model(
    recipe: Recipe, data: Data, *, init_from: bool = True, without_weights: bool = False
) -> DiffTransformerForCausalLM:
    """A recipe's model in float32 with its first weights.

    Args:
        recipe: the recipe.
        data: its data, whose vocabulary the model gets.
        init_from: whether to load the weights that the recipe names in `init_from`. Not where a checkpoint's are loaded
            afterwards: a run goes on without what it was started from.
        without_weights: leave weights that would be drawn to a later :func:`draw_weights`: the model is on the meta
            device, so that one which is to be shared out is nowhere whole.

    Raises:
        FileNotFoundError, ValueError: `init_from` holds no such model; or the vocabulary is larger than the recipe's.
    """
    config = build_config(recipe, data.batches.vocab_size, data.tokenizer)
    if init_from and recipe.model.init_from is not None:
        model = load_initial_weights(recipe, config, data.tokenizer)
    else:
        with torch.device("meta") if without_weights else nullcontext():
            model = DiffTransformerForCausalLM(config)
        if not without_weights:
            draw_weights(model, recipe.train.seed)
    if data.tokenizer is not None:
        model.generation_config.pad_token_id = data.tokenizer.pad_token_id
    return model


def draw_weights(model: DiffTransformerForCausalLM, seed: int) -> None:
    """First weights, of each module from a stream of its own, named by the seed and the module.

    So whatever twins have in common starts with identical numbers, although one of them has modules that the other
    lacks. Where weights are sharded, every process draws a module's whole and keeps its part, module by module.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            with materialized(module):
                model._init_weights(module)  # transformers' hook: the model's own rule for each kind of module
