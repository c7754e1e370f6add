"""Makes the parts of a training: data, a model with its first weights, drawn or loaded, and examples of the task."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_lab.data import RetrievalBatches, Tell
from diff_lab.data.batches import GeneratedBatches
from diff_lab.data.retrieval_task import most_frequent
from diff_lab.train.checkpoint import without_progress_bars
from diff_lab.train.data_kinds import Data
from diff_lab.train.distributed import materialized
from diff_lab.train.recipe import ModelRecipe, Recipe, build_config
from diff_transformer.model import DiffTransformerConfig, LanguageModel, language_model_class
from diff_transformer.utils.files import read_json, write_atomically
from diff_transformer.utils.manifest import require_unchanged_weights

# Settings of a recipe that the model it starts from need not share: positions, and what no weight depends on.
_FREE_SETTINGS = {"init_from", "vocab_size", "max_position_embeddings", "rope_theta"}
_FREE_SETTINGS |= {"initializer_range", "residual_initializer_range", "attention_dropout", "fixed_lambda"}
_SHARED_SETTINGS = [name for name in ModelRecipe.model_fields if name not in _FREE_SETTINGS]
# Settings of a model that no recipe has.
_NOT_IN_RECIPES = ("lambda_init_offset", "hidden_act", "sliding_window", "layer_types")
EXAMPLES = "examples.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def build_data(recipe: Recipe, tokenizer: PreTrainedTokenizerFast | None = None, tell: Tell | None = None) -> Data:
    """Find or make a recipe's data. Called on every rank of a run; rank 0 looks whether text has changed.

    Args:
        tokenizer: a trained model's own, for text; made as the recipe says unless given.
        tell: is told how many documents and tokens are prepared so far.

    Raises:
        FileNotFoundError, ValueError: as the corpus, `prepare` and the batches of the data's kind.
        ConnectionError: another rank has ended meanwhile.
    """
    return recipe.data.build(recipe.train.seed, recipe.train.timeout_minutes, tokenizer, tell)


def build_model(recipe: Recipe, data: Data, *, init_from: bool = True, without_weights: bool = False) -> LanguageModel:
    """Build a recipe's model in float32 with its first weights, for the vocabulary of the recipe's data.

    It is a causal one, or the encoder that data with hidden tokens train.

    Args:
        init_from: whether to load the weights that the recipe names in `init_from`. Not if a checkpoint's are loaded
            afterwards: a run resumes without the model it was started from.
        without_weights: leave weights that would be drawn to a later :func:`draw_weights`: the model is on the meta
            device, so that no process holds all of one that is to be sharded.

    Raises:
        FileNotFoundError, ValueError: `init_from` holds no such model; or the vocabulary is larger than the recipe's.
    """
    config = build_config(recipe, data.batches.vocab_size, data.tokenizer)
    if init_from and (folder := check_init_from(recipe, config)):
        model = _load_initial_weights(folder, config, data.tokenizer)
    else:
        with torch.device("meta") if without_weights else nullcontext():
            model = language_model_class(config)(config)
        if recipe.model.fixed_lambda:
            for name, parameter in model.named_parameters():
                if any(f".{module}." in name for module in config.spec.lambda_modules):
                    parameter.requires_grad_(False)
        if not without_weights:
            draw_weights(model, recipe.train.seed)
    if data.tokenizer is not None and config.is_causal:
        model.generation_config.pad_token_id = data.tokenizer.pad_token_id
    return model


def draw_weights(model: LanguageModel, seed: int, modules: Iterable[tuple[str, torch.nn.Module]] | None = None) -> None:
    """Draw the first weights of each module from a stream of its own, named by the seed and the module.

    So modules that two models have in common start with identical numbers, although one of them has modules that the
    other lacks. If weights are sharded, every rank draws all of a module and keeps its part, module by module.
    `modules` are those of another engine's view of the model, by their names in it.
    """
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules() if modules is None else modules:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
            with materialized(module):
                model._init_weights(module)  # transformers' hook: the model's own rule for each kind of module
                for parameter in module.parameters(recurse=False):
                    if not parameter.requires_grad:  # λ stays at λ_init
                        torch.nn.init.zeros_(parameter)


def _load_initial_weights(
    folder: Path, config: DiffTransformerConfig, tokenizer: PreTrainedTokenizerFast | None
) -> LanguageModel:
    """Load a model in float32 with the weights in a folder."""
    vocab_size = DiffTransformerConfig.from_pretrained(folder).vocab_size
    if vocab_size != config.vocab_size:
        raise ValueError(
            f"model.init_from {str(folder)!r} has a vocabulary of {vocab_size} and the recipe's model one of "
            f"{config.vocab_size}; data.tokenizer and model.vocab_size must be those it was trained with."
        )
    saved_tokenizer = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None and saved_tokenizer is not None and saved_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"model.init_from {str(folder)!r} has a tokenizer of its own, with other tokens than the recipe's: "
            f"data.tokenizer={folder} takes it."
        )
    require_unchanged_weights(folder)
    try:
        with without_progress_bars():
            model, report = language_model_class(config).from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"model.init_from {str(folder)!r}: the weights cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise ValueError(f"model.init_from {str(folder)!r} does not hold the model's weights; wrong is {wrong[0]!r}.")
    return model.train()


def check_init_from(recipe: Recipe, config: DiffTransformerConfig | None = None) -> Path | None:
    """Raise an error if a recipe's model cannot start from its `init_from`, with the setting to change, or the reason.

    The model's configuration may be known already. Reads no weights, and needs no data. Returns the folder that the
    recipe names, if it names one.
    """
    if recipe.model.init_from is None:
        return None
    folder = Path(os.path.expanduser(recipe.model.init_from))
    config = config or build_config(recipe, vocab_size=1)
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise FileNotFoundError(
            f"model.init_from {str(folder)!r} holds no model: it must be a folder with config.json and "
            "model.safetensors, such as RUN/model or a checkpoint of a run."
        )
    try:
        kind = read_json(folder / "config.json").get("model_type")
    except (ValueError, AttributeError):  # not JSON, or no dictionary
        raise ValueError(f"model.init_from {str(folder)!r} has a broken config.json.") from None
    if kind != DiffTransformerConfig.model_type:
        raise ValueError(
            f"model.init_from {str(folder)!r} holds a model of type {kind!r}, which `diff-transformer convert` may "
            "make one of ours."
        )
    saved = DiffTransformerConfig.from_pretrained(folder)
    alone = {name: getattr(saved, name, None) for name in _NOT_IN_RECIPES}
    alone = {name: value for name, value in alone.items() if value != getattr(config, name, None)}
    if saved.spec.corrects_heads:
        alone["attention_type"] = saved.attention_type
    if saved.norm_eps_in_attention != saved.rms_norm_eps:
        alone["attention_norm_eps"] = saved.attention_norm_eps
    if (rope_type := (saved.rope_parameters or {}).get("rope_type", "default")) != "default":
        alone["rope_type"] = rope_type
    if alone:
        named = ", ".join(f"{name} {value!r}" for name, value in alone.items())
        raise ValueError(
            f"model.init_from {str(folder)!r} has {named}, which no recipe has; transformers' Trainer trains such a "
            "model."
        )
    needed = []
    for name in _SHARED_SETTINGS:
        # Left out, it is as the attention type has it.
        attribute = "has_headwise_norm" if name == "headwise_norm" else name
        there, here = getattr(saved, attribute), getattr(config, attribute)
        if there != here:
            # As a recipe and an override have it.
            there, here = (value if isinstance(value, str) else json.dumps(value) for value in (there, here))
            needed.append(f"model.{name}={there} (it has {here})")
    if needed:
        raise ValueError(
            f"model.init_from {str(folder)!r} is another model than the recipe's; to start from it the recipe needs "
            f"{', '.join(needed)}."
        )
    return folder


# Of examples.json: texts of a run's task, with which `explore` opens its model.
_MOST_SEQUENCES, _MOST_TOKENS = 512, 1 << 17  # of the retrieval task; so many tokens take half a megabyte
_RETRIEVAL_NOTE = (
    "This model learned one task. A key (k3) with its value (v5) right after it is a needle among noise (n0, n1, …). "
    'At the end "?" and a key ask for a value, and the model should write it. It learned nothing else, so its loss on '
    "all of the text is high."
)


def write_examples(folder: Path, data: Data) -> None:
    """Write the examples of a run's task into its folder, unless they are there; nothing for a run on text.

    The format is that of `diff_transformer.cli.explored_checkpoints`.
    """
    path = folder / EXAMPLES
    if not path.exists() and (examples := _examples(data)) is not None:
        write_atomically(path, json.dumps(examples, ensure_ascii=False) + "\n")


def _examples(data: Data) -> dict[str, Any] | None:
    batches, tokenizer = data.batches, data.tokenizer
    if isinstance(batches, RetrievalBatches):
        words = batches.words()
        # Cut after the first query, since the answers to earlier queries are in view of a later one.
        sample = batches.sample(max(1, min(_MOST_SEQUENCES, _MOST_TOKENS // batches.length)), seed=0)
        firsts = sample.query_positions[:, 0].tolist(), sample.answer_spans[:, 0].tolist()
        examples = []
        for number, (tokens, query, begin) in enumerate(zip(sample.input_ids, *firsts, strict=True), start=1):
            seen = [words[token] for token in tokens[: query + 1].tolist()]
            title = f"Needles {number}: what was the value of {seen[-1]}?"
            answer = {"query": query, "begin": begin, "end": begin + 1}
            examples.append({"title": title, "text": " ".join(seen), "answer": answer})
        floor = most_frequent(batches.num_pairs, batches.num_values)
        return {"words": words, "note": _RETRIEVAL_NOTE, "floor": floor, "examples": examples}
    if isinstance(batches, GeneratedBatches):
        tokens = next(batches.validation_batches())["input_ids"][0].tolist()
        # The text of a model without a tokenizer is the numbers of its tokens.
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        return {"examples": [{"title": "From the task of the training", "text": text}]}
    return None
