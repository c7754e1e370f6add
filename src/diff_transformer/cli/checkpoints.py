"""Finds and loads the model and tokenizer in a folder that the user names, or says why it cannot."""

import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

from diff_transformer import shipped_models
from diff_transformer.model import DiffTransformerForCausalLM, DiffTransformerPreTrainedModel
from diff_transformer.model.configuration import AUTO_CLASSES
from diff_transformer.utils.environment import check_device
from diff_transformer.utils.files import parse_json, read_json
from diff_transformer.utils.manifest import require_unchanged_weights
from diff_transformer.utils.suggestions import did_you_mean, some


def find_checkpoint(path: Path, ours: bool = True) -> Path:
    """Find the folder of a model: `path`, a run's `model/`, its newest checkpoint, or a shipped model of that name.

    The model must belong to this project, or (`ours` false) be any causal language model. Raises FileNotFoundError or
    ValueError if there is no such model, or it is not valid.
    """
    names = shipped_models.pretrained_names()
    if not path.exists() and str(path) in names:
        path = Path(shipped_models.pretrained(str(path)))
    if not path.exists():
        shipped = did_you_mean(str(path), names, f"; the package has {', '.join(names)}." if names else ".")
        raise FileNotFoundError(f"The checkpoint {str(path)!r} does not exist{shipped}")
    if not path.is_dir():
        raise ValueError(f"The checkpoint {str(path)!r} is a file; name the folder of a run or of a model.")
    # Steps have leading zeros up to a million; above, the longer name is the later step.
    steps = sorted(path.glob("checkpoints/step-*"), key=lambda folder: (len(folder.name), folder.name))
    for folder in (path, path / "model", *reversed(steps)):
        if (folder / "config.json").is_file():
            _check_model(folder, ours)
            return folder
    models = sorted(folder.parent for folder in path.glob("*/model") if (folder / "config.json").is_file())
    if models:
        raise ValueError(f"{str(path)!r} is not a run but holds runs; name one: {', '.join(map(str, models))}.")
    raise FileNotFoundError(f"{str(path)!r} holds no model: neither config.json nor model/ nor checkpoints/.")


def shown_folder(folder: Path) -> Path:
    """Return a model's folder as titles and results name it: a model that the package ships by its name alone."""
    return Path(folder.name) if folder.parent == shipped_models.WEIGHTS else folder


def auto_class_of(folder: Path) -> str:
    """Return transformers' Auto class of a model's folder: a causal language model's unless its config.json says."""
    named = read_json(folder / "config.json").get("architectures") or [""]
    return next((auto for auto, ours in AUTO_CLASSES.items() if ours == named[0]), "AutoModelForCausalLM")


def load_model(
    folder: Path,
    device: str | None,
    auto_class: str = "AutoModelForCausalLM",
    dtype: str | None = None,
    quantization: Any = None,
) -> Any:
    """Load the model in a folder that `find_checkpoint` found, in evaluation mode.

    It goes to the GPU, if there is one, unless a device is given; its dtype is the weights' own unless one is given.
    `quantization` is a quantization_config of transformers, in the place of the folder's own.
    Raises ValueError if the weights cannot be read, are not the model's, or differ from the checkpoint's manifest.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(device)
    require_unchanged_weights(folder)
    own = {} if quantization is None else {"quantization_config": quantization}  # None would count as given
    try:
        model, report = getattr(transformers, auto_class).from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=dtype or "auto", **own
        )
    except (SafetensorError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"The weights in {str(folder)!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if report["missing_keys"]:
        raise ValueError(f"The weights in {str(folder)!r} lack {some(sorted(report['missing_keys']))}.")
    if report["unexpected_keys"] and isinstance(model, DiffTransformerPreTrainedModel):
        unknown = some(sorted(report["unexpected_keys"]), 4)
        raise ValueError(f"{str(folder)!r} has weights that its config.json has not: {unknown}.")
    return model.eval().to(device)


def load_tokenizer(folder: Path, required: bool = True) -> Any:
    """Load a model's tokenizer; None if it is missing and not `required`. Raises ValueError if missing or not valid."""
    if not any(folder.glob("tokenizer*")):
        if not required:
            return None
        raise ValueError(f"{str(folder)!r} has no tokenizer (tokenizer.json), so the model in it cannot read text.")
    try:
        if (file := folder / "tokenizer.json").is_file():
            Tokenizer.from_file(str(file))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"The tokenizer in {str(folder)!r} is not valid: {' '.join(str(error).split())}") from None


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the files of a name that belong to a model: beside it, and in the run whose `model/` or checkpoint it is.

    A run's files did not make other models in its folder, such as one that was converted from its own.
    """
    path = folder.resolve()
    run = [path.parent] if path.name == "model" else []
    run += [path.parents[1]] if path.parent.name == "checkpoints" else []
    return [candidate / name for candidate in (folder, *run) if (candidate / name).is_file()]


def _check_model(folder: Path, ours: bool) -> None:
    config = folder / "config.json"
    content = _read_strictly(config)
    settings = content if isinstance(content, dict) else {}
    for name in ("generation_config.json", "tokenizer_config.json"):  # a broken one of the first is passed over later
        if (file := folder / name).is_file():
            _read_strictly(file)
    kind = settings.get("model_type")
    if ours and kind != DiffTransformerForCausalLM.config_class.model_type:
        raise ValueError(
            f"The model in {str(folder)!r} is not a model of this project: its model_type is {kind!r}. "
            "`diff-transformer convert --help` lists the layouts that become one."
        )
    try:
        loaded = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{str(config)!r} is not valid: {' '.join(str(error).split())}") from None
    if type(loaded) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"The model in {str(folder)!r} is no causal language model: its model_type is {kind!r}.")
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"{str(folder)!r} holds no weights: there is no .safetensors file in it.")
    for file in folder.glob("*.safetensors"):
        if not os.access(file, os.R_OK):  # safetensors would say that there is no such file
            raise PermissionError(f"The weights {str(file)!r} may not be read by this user: chmod a+r lets everybody.")


def _read_strictly(file: Path) -> Any:
    """Read a JSON file, without a byte order mark, which transformers, reading it after us, does not pass over."""
    data = file.read_bytes()
    if data.startswith(BOM_UTF8):
        raise ValueError(f"{str(file)!r} begins with a byte order mark, which transformers cannot read: remove it.")
    return parse_json(data, repr(str(file)))
