"""Converts the folder of a model from or to the layout of another project, and a model that is loaded already."""

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file

from diff_transformer.convert.layout import CONFIG, INDEX, Header, Layout, Weights, plan, read_source_config
from diff_transformer.convert.layout_tables import LAYOUTS, read_config, write_settings
from diff_transformer.convert.phi4flash_attention import PHI4FLASH, WHAT_IS_COVERED
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.configuration import code_files
from diff_transformer.utils.files import atomic_directory, free_bytes, refuse_existing
from diff_transformer.utils.suggestions import quoted

MAX_SHARD_SIZE = "5GB"
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(|KB|MB|GB|TB)")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# Files that go along unchanged.
CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)

# Called with the bytes of weights that are done, and all.
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: its folder, tensors, bytes of weights, files of weights, and attention type.

    Examples:
        >>> Converted(Path("ours"), tensors=11, bytes=4096, shards=1, attention_type="diff").shards
        1
    """

    folder: Path
    tensors: int
    bytes: int
    shards: int
    attention_type: str


def convert_from(
    layout: str,
    source: str | Path,
    target: str | Path,
    *,
    attention_type: str | None = None,
    dex_heads: Sequence[Sequence[int]] | None = None,
    dex_lambda_start: float | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Converted:
    """Write somebody else's checkpoint as one of ours.

    Everything is checked from the headers before anything is written. The weights keep their dtype; tokenizer and
    generation settings go along. ``target`` appears when all of it is there.

    Args:
        layout: "microsoft", "microsoft-v2", "diffllama", "llama", "motif" or "motif-2".
        source: the folder with config.json and safetensors.
        target: the folder to make.
        attention_type: of the new model, if its layout leaves a choice: a "llama" becomes a "softmax", or a "diff_v2"
            or "dex" that computes the same.
        dex_heads, dex_lambda_start: of a "dex", as :class:`DiffTransformerConfig` has them.
        max_shard_size: most bytes of weights in a file, as a number or like "5GB"; so much memory is needed.
        progress: called with bytes done and bytes in all.

    Raises:
        ValueError: the folder does not fit the layout; one sentence lists every mismatch.
        FileNotFoundError: there is no such folder, or no weights in it.
        FileExistsError: ``target`` exists.
        OSError: the disk is full.

    Examples:
        >>> config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> transformers.LlamaForCausalLM(config).save_pretrained("llama")
        >>> convert_from("llama", "llama", "ours", attention_type="diff_v2").attention_type
        'diff_v2'
    """
    source, target, largest = Path(source), Path(target), shard_bytes(max_shard_size)
    choices = _layouts(layout)
    chosen = choices.get(attention_type or next(iter(choices)))
    if chosen is None:
        allowed = " or ".join(map(repr, choices))
        raise ValueError(f"A checkpoint in the layout {layout!r} can become {allowed}, not {attention_type!r}.")
    raw = read_source_config(source)
    with _single_line_errors(source):
        config = chosen.read(raw)
    if dex_heads is not None or dex_lambda_start is not None:
        if not config.spec.corrects_heads:
            raise ValueError(
                f"dex_heads and dex_lambda_start belong to the attention type 'dex', not to {config.attention_type!r}."
            )
        dex = {"dex_heads": dex_heads and list(dex_heads), "dex_lambda_start": dex_lambda_start}
        with _single_line_errors():
            config = DiffTransformerConfig.from_dict(config.to_dict() | dex)
    config.architectures = ["DiffTransformerForCausalLM"]
    settings = json.loads(config.to_json_string())
    return _write(chosen, source, target, config, settings, max_shard_size=largest, progress=progress, backwards=False)


def convert_to(
    layout: str,
    source: str | Path,
    target: str | Path,
    *,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Converted:
    """Write one of our checkpoints in somebody else's layout.

    Args and errors: as :func:`convert_from`; a ValueError also says why that layout cannot hold the model.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> DiffTransformerForCausalLM(config).save_pretrained("model")
        >>> convert_to("diffllama", "model", "diffllama").shards
        1
    """
    source, target, largest = Path(source), Path(target), shard_bytes(max_shard_size)
    choices = _layouts(layout)
    raw = read_source_config(source)
    with _single_line_errors(source):
        config = read_config(raw, DiffTransformerConfig)
    chosen = choices.get(config.attention_type)
    if chosen is None or chosen.write is None:
        holds = " or ".join(repr(kind) for kind, choice in choices.items() if choice.write is not None)
        raise ValueError(
            f"The layout {layout!r} has one kind of attention, our {holds}, and no place for the other weights of a "
            f"{config.attention_type!r} model like {str(source)!r}."
        )
    with _single_line_errors(source):
        settings = write_settings(chosen, config)
    return _write(chosen, source, target, config, settings, max_shard_size=largest, progress=progress, backwards=True)


def as_our_model(model: Any) -> DiffTransformerForCausalLM:
    """Convert transformers' DiffLlama into a model of ours, on the same device and in the same dtype.

    λ is in float32 at least. The weights are copied.

    Raises:
        ValueError: the model is no DiffLlama, or has settings that are not covered, such as biases.

    Examples:
        >>> config = transformers.DiffLlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1)
        >>> as_our_model(transformers.DiffLlamaForCausalLM(config)).config.attention_type
        'diff'
    """
    if model.config.model_type != "diffllama":
        raise ValueError(f"Only a DiffLlama is converted without a folder, got {type(model).__name__}.")
    layout = LAYOUTS["diffllama"]["diff"]
    config = layout.read(model.config.to_dict())
    weights = model.state_dict()
    headers = {key: Header(Path(key), tuple(weight.shape), weight.dtype) for key, weight in weights.items()}
    converted = {
        output.key: output.make(*(weights[key].cpu() for key in output.inputs))
        for output in plan(layout, config, headers, backwards=False)
    }
    with torch.random.fork_rng(devices=[]):  # the weights that are drawn here are replaced
        ours = DiffTransformerForCausalLM(config)
    ours.to(model.dtype).load_state_dict(converted)
    ours.generation_config = copy.deepcopy(model.generation_config)
    return ours.to(model.device).eval()


def _write(
    layout: Layout,
    source: Path,
    target: Path,
    config: DiffTransformerConfig,
    settings: dict[str, Any],
    *,
    max_shard_size: int,
    progress: Progress | None,
    backwards: bool,
) -> Converted:
    """Plan the conversion from the headers, then write the folder, one file of weights in memory at a time."""
    refuse_existing(target)
    weights = Weights(source)
    try:
        outputs = {output.key: output for output in plan(layout, config, weights.headers, backwards=backwards)}
    except ValueError as error:
        side = "ours" if backwards else repr(layout.name)
        raise ValueError(f"The weights in {str(source)!r} do not fit the layout {side}: {error}") from None
    split = split_state_dict_into_shards_factory(
        outputs,
        get_storage_size=lambda output: output.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    total, free = sum(output.bytes for output in outputs.values()), free_bytes(target)
    if total > free:
        raise OSError(f"The disk of {str(target)!r} has {free:,} bytes free, and the converted weights need {total:,}.")
    texts = {CONFIG: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}
    if "auto_map" in settings:
        texts |= code_files()
    if split.is_sharded:
        texts[INDEX] = json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}, indent=2) + "\n"
    done, report = 0, progress or (lambda done, total: None)
    with atomic_directory(target) as folder:
        report(done, total)
        for name, keys in split.filename_to_tensors.items():
            tensors = {key: outputs[key].make(*map(weights.read, outputs[key].inputs)).contiguous() for key in keys}
            assert all((x.shape, x.dtype) == (outputs[key].shape, outputs[key].dtype) for key, x in tensors.items())
            try:
                save_file(tensors, folder / name, metadata={"format": "pt"})
            except SafetensorError as error:  # what safetensors makes of a full disk
                raise OSError(f"{name} could not be written: {error}") from error
            del tensors
            done += sum(outputs[key].bytes for key in keys)
            report(done, total)
        for original in {file for pattern in CARRIED for file in source.glob(pattern) if file.is_file()}:
            carried = folder / original.relative_to(source)
            carried.parent.mkdir(exist_ok=True)
            shutil.copyfile(original, carried)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    return Converted(target, len(outputs), total, len(split.filename_to_tensors), config.attention_type)


def _layouts(name: str) -> dict[str, Layout]:
    if name == PHI4FLASH:
        raise ValueError(WHAT_IS_COVERED)
    if name not in LAYOUTS:
        raise ValueError(f"The layout must be one of {', '.join(map(repr, LAYOUTS))}, got {name!r}.")
    return LAYOUTS[name]


@contextmanager
def _single_line_errors(source: Path | None = None) -> Iterator[None]:
    """Turn a configuration class's error about settings, of a folder or not, into a ValueError in one line."""
    prefix = "" if source is None else f"{str(source / CONFIG)!r} cannot be converted: "
    try:
        yield
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(prefix + " ".join(str(error).split())) from None
    except ZeroDivisionError:  # how transformers takes a model of no heads
        raise ValueError(f"{prefix}a size that others are divided by, such as num_attention_heads, is 0.") from None


def shard_bytes(size: object) -> int:
    """Return the most bytes of weights in a file from a whole number, or text like "5GB" or "1.5GB".

    Raises:
        ValueError: it is neither, or less than a byte.
    """
    count = size
    if isinstance(size, str) and (parts := _SIZE.fullmatch(size)):
        count = int(float(parts[1]) * _UNITS[parts[2]])
    if type(count) is not int or count < 1:
        raise ValueError(f"A shard's size must be a number of bytes, 1 or more, or like '5GB', got {quoted(size)}.")
    return count
