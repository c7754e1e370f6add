"""From what the user names to one model, or the reason why it is none."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

from diff_transformer.data.manifest import require_unchanged_weights
from diff_transformer.files import parse_json
from diff_transformer.model import DiffTransformerForCausalLM

if TYPE_CHECKING:
    from diff_transformer.train import Recipe

# What other people's config.json says, and the layout that `convert` knows it by.
LAYOUT_OF_TYPE = {
    "llama": "llama",
    "diffllama": "diffllama",
    "microsoft_diff": "microsoft",
    "microsoft_diff_v2": "microsoft-v2",
}
# Files that transformers reads beside config.json without a sentence for what is wrong in them. `load_tokenizer` checks
# tokenizer.json, which is large.
READ_BY_TRANSFORMERS = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)


def find_checkpoint(path: Path, ours: bool = True) -> Path:
    """The folder that holds the model: `path` itself, a run folder's `model/`, or its newest checkpoint.

    Args:
        path: what the user names.
        ours: whether the model must be one of this project's, or may be any causal language model of transformers.

    Raises:
        FileNotFoundError: there is nothing at `path`, or no model in it.
        ValueError: it is a file or a folder of several runs; the model is not one of ours where it must be, no causal
            language model where it may be any, or its config.json is not valid.
    """
    if not path.exists():
        raise FileNotFoundError(f"The checkpoint {str(path)!r} does not exist.")
    if not path.is_dir():
        raise ValueError(f"The checkpoint {str(path)!r} is a file; name the folder of a run or of a model.")
    # Steps are counted with leading zeros up to a million; beyond, the longer name is the later one.
    steps = sorted(path.glob("checkpoints/step-*"), key=lambda folder: (len(folder.name), folder.name))
    for folder in (path, path / "model", *reversed(steps)):
        if (folder / "config.json").is_file():
            _check_model(folder, ours)
            return folder
    models = sorted(folder.parent for folder in path.glob("*/model") if (folder / "config.json").is_file())
    if models:
        raise ValueError(f"{str(path)!r} is not a run but holds runs; name one: {', '.join(map(str, models))}.")
    raise FileNotFoundError(f"{str(path)!r} holds no model: neither config.json nor model/ nor checkpoints/.")


def load_model(
    folder: Path, device: str | None, auto_class: str = "AutoModelForCausalLM", dtype: str | None = None
) -> Any:
    """The model in a folder that `find_checkpoint` found, in evaluation mode, on the device or on the GPU if any.

    Args:
        folder: the folder.
        device: torch's name of a device.
        auto_class: transformers' class that loads the model.
        dtype: the weights' own unless given.

    Raises:
        ValueError: the weights cannot be read, are not all there, or not what a checkpoint's manifest says; or the
            device cannot be used.
    """
    place = _device(device)
    require_unchanged_weights(folder)
    try:
        model, report = getattr(transformers, auto_class).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=dtype or "auto"
        )
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"The weights in {str(folder)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ValueError(f"The weights in {str(folder)!r} lack {', '.join(sorted(report['missing_keys']))}.")
    return model.eval().to(place)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer beside a model. Raises ValueError if there is none, or a broken one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{str(folder)!r} has no tokenizer (tokenizer.json), so the model in it cannot read text.")
    try:
        Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{str(file)!r} is not a valid tokenizer: {_one_line(error)}") from None
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def find_recipe(folder: Path) -> "Recipe | None":
    """The recipe of the run whose `model/` or checkpoint a folder is, or the one beside the model.

    Another model in a run's folder, such as one that was converted from the run's, was not made by the recipe.
    """
    from diff_transformer.train import load_recipe

    whole = folder.resolve()
    run = [whole.parent] if whole.name == "model" else []
    run += [whole.parents[1]] if whole.parent.name == "checkpoints" else []
    for place in (folder, *run):
        if (place / "recipe.yaml").is_file():
            return load_recipe(place / "recipe.yaml")
    return None


def _check_model(folder: Path, ours: bool) -> None:
    config = folder / "config.json"
    settings = parse_json(config.read_bytes(), repr(str(config)))
    for name in READ_BY_TRANSFORMERS:
        if (other := folder / name).is_file():
            parse_json(other.read_bytes(), repr(str(other)))
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if ours and kind != DiffTransformerForCausalLM.config_class.model_type:
        hint = _conversion(folder, settings)
        raise ValueError(f"The model in {str(folder)!r} is not one of ours: its model_type is {kind!r}.{hint}")
    try:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{str(config)!r} is not valid: {_one_line(error)}") from None
    if type(loaded) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"The model in {str(folder)!r} is no causal language model: its model_type is {kind!r}.")
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{str(folder)!r} holds no weights: there is no .safetensors file in it.")


def _conversion(folder: Path, settings: Any) -> str:
    """How a folder in a layout that `convert` reads becomes one of ours; nothing for any other."""
    if not isinstance(settings, dict):
        return ""
    # The authors' folders need not say what they are; `num_heads` is an argument of their modules.
    unnamed = "microsoft|microsoft-v2" if "model_type" not in settings and "num_heads" in settings else None
    layout = LAYOUT_OF_TYPE.get(str(settings.get("model_type")), unnamed)
    return f" `diff-transformer convert {shlex.quote(str(folder))} DST --from {layout}` makes it one." if layout else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # what torch raises for an unknown name, or a build without it
        raise ValueError(f"The device {name!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return name
