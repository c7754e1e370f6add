"""The model whose weights a run starts from: `model.start_from` of a recipe."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from diff_transformer.data.manifest import require_unchanged_weights
from diff_transformer.files import read_json
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.train.checkpoint import without_bars
from diff_transformer.train.recipe import Recipe, build_config

# What decides which number a weight stands for. Positions may be reached further, and told apart otherwise.
_SAME = (
    "attention_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "lambda_init",
    "lambda_init_offset",
    "has_headwise_norm",
    "rms_norm_eps",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
)
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def check_start(recipe: Recipe) -> None:
    """Say why a recipe's model cannot start from the weights it names, if so. Reads no weights, needs no data.

    Raises:
        FileNotFoundError: there is no model in the folder.
        ValueError: the model in it has other sizes; both are named.
    """
    if recipe.model.start_from is not None:
        _check_sizes(recipe, build_config(recipe, vocab_size=1))


def load_start(
    recipe: Recipe, config: DiffTransformerConfig, tokenizer: PreTrainedTokenizerFast | None
) -> DiffTransformerForCausalLM:
    """The model of `config`, a recipe's, in float32 with the weights in the folder that the recipe names.

    Raises:
        FileNotFoundError, ValueError: as :func:`check_start`; or another vocabulary, or weights that are not all there.
    """
    folder = _check_sizes(recipe, config)
    found = DiffTransformerConfig.from_pretrained(folder).vocab_size
    if found != config.vocab_size:
        raise ValueError(
            f"model.start_from {str(folder)!r} has a vocabulary of {found} and the recipe's model one of "
            f"{config.vocab_size}; data.tokenizer and model.vocab_size must be those it was trained with."
        )
    own = AutoTokenizer.from_pretrained(folder) if (folder / "tokenizer.json").is_file() else None
    if tokenizer is not None and own is not None and own.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"model.start_from {str(folder)!r} has a tokenizer of its own, with other tokens than the recipe's: "
            f"data.tokenizer={folder} takes it."
        )
    require_unchanged_weights(folder)
    try:
        with without_bars():
            model, report = DiffTransformerForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True
            )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"model.start_from {str(folder)!r}: the weights cannot be loaded: {str(error).splitlines()[0]}"
        ) from error
    if wrong := sorted({*report["missing_keys"], *report["unexpected_keys"]}):
        raise ValueError(f"model.start_from {str(folder)!r} does not hold the model's weights; wrong is {wrong[0]!r}.")
    return model.train()


def _check_sizes(recipe: Recipe, config: DiffTransformerConfig) -> Path:
    assert recipe.model.start_from is not None  # the callers' own check
    folder = Path(recipe.model.start_from)
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise FileNotFoundError(
            f"model.start_from {str(folder)!r} holds no model: it must be a folder with config.json and "
            "model.safetensors, such as RUN/model or a checkpoint of a run."
        )
    try:
        kind = read_json(folder / "config.json").get("model_type")
    except (ValueError, AttributeError):  # not JSON, or no dictionary
        raise ValueError(f"model.start_from {str(folder)!r} has a broken config.json.") from None
    if kind != DiffTransformerConfig.model_type:
        raise ValueError(
            f"model.start_from {str(folder)!r} holds a model of type {kind!r}, which `diff-transformer convert` may "
            "make one of ours."
        )
    found = DiffTransformerConfig.from_pretrained(folder)
    for name in _SAME:
        theirs, ours = getattr(found, name, None), getattr(config, name, None)
        if theirs != ours:
            raise ValueError(f"model.start_from {str(folder)!r} has {name} {theirs!r} and the recipe {ours!r}.")
    return folder
