"""Defines checkpoint layouts, and plans a conversion: every tensor to write, and the tensors it is made of."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diff_transformer.attention_types import head_dim
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.utils.files import read_json
from diff_transformer.utils.suggestions import some

ATTENTION = "model.layers.{layer}.self_attn."
DEX = ".self_attn.dex."
OUTPUT_HEAD = "lm_head.weight"  # which a checkpoint with tied embeddings may leave out
QUERY, KEY, VALUE, OUTPUT = (f"{ATTENTION}{letter}_proj.weight" for letter in "qkvo")
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Names of dtypes in a safetensors header.
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Header(NamedTuple):
    """A tensor's file, shape and dtype, known without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def deinterleave_channels(rows: int, head_dim: int) -> Tensor:
    """Return the rows of rotary channels, paired (2i, 2i + 1) in the source, (i, i + d/2) here; same heads."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def interleave_heads(rows: int, head_dim: int) -> Tensor:
    """Return the rows in our order: the heads of pair h are h and h + half in the source, 2h and 2h + 1 here."""
    return torch.arange(rows).view(2, -1, head_dim).transpose(0, 1).flatten()


def repeat_heads(rows: int, head_dim: int) -> Tensor:
    """Return the rows of two equal heads here, 2h and 2h + 1, for each of the source: no permutation, no way back."""
    return torch.arange(rows // 2).view(-1, 1, head_dim).expand(-1, 2, -1).flatten()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A parameter of ours in the source's layout, if it is not the same under the same key.

    Keys are patterns in which ``{layer}`` is the layer's number, counted from 0.

    Attributes:
        target: the key in our checkpoints.
        source: the key in the source's; None if it has no such parameter, which on the way back goes into W_O.
        source_rows: which of the source's rows each of the target's is, of a number of rows and a head's width, if any.
        scale: the target is the source times this.
        constant: every entry of the target if the source has none, or a function of our configuration and the layer's
            number that gives it. With a key of the source as well, the whole checkpoint may lack the parameter.
    """

    target: str
    source: str | None
    source_rows: Callable[[int, int], Tensor] | None = None
    scale: float = 1.0
    constant: float | Callable[[DiffTransformerConfig, int], float] | None = None


@dataclass(frozen=True)
class Output:
    """A tensor to write, which ``make`` makes of the tensors with the keys ``inputs``."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...]
    make: Callable[..., Tensor]

    @property
    def bytes(self) -> int:
        """Its size in a file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The checkpoint layout of another project for a model that is one of ours.

    Attributes:
        name: its name for ``--from`` and ``--to``.
        attention_type: of our model that it corresponds to.
        rows: the table, of the parameters that differ. Any other has the same key and the same rows on both sides.
        read: the source's config.json → our configuration. Raises ValueError if we have no such model.
        write: our configuration → the source's config.json; None if there is no way back.
        fold: our configuration, a layer's number, W_O and the layer's parameters that the source has no key for, in the
            order of a forward pass → the source's W_O.
        ignored: endings of keys that hold no parameter.
    """

    name: str
    attention_type: str
    rows: tuple[Row, ...]
    read: Callable[[Mapping[str, Any]], DiffTransformerConfig]
    write: Callable[[DiffTransformerConfig], dict[str, Any]] | None = None
    fold: Callable[..., Tensor] | None = None
    ignored: tuple[str, ...] = ()


def plan(
    layout: Layout, config: DiffTransformerConfig, headers: Mapping[str, Header], *, backwards: bool
) -> list[Output]:
    """Plan every tensor of the converted checkpoint, layer by layer, from the headers of those to convert.

    Backwards our checkpoint is converted to the source's layout. Raises a ValueError that lists all keys that are
    unknown or missing, and all shapes that do not fit.
    """
    headers = {key: header for key, header in headers.items() if not key.endswith(layout.ignored)}
    if config.num_hidden_layers > len(headers):  # before a model of so many is made
        raise ValueError(f"there are {len(headers)} tensors for num_hidden_layers {config.num_hidden_layers}.")
    mappings = parameter_mappings(layout, config, backwards=backwards)
    optional = {row.target for row in layout.rows if row.constant is not None and not backwards}
    if config.tie_word_embeddings:
        optional.add(OUTPUT_HEAD)
    present = {mapping.row.target for mapping in mappings if mapping.input in headers}
    needed = [mapping for mapping in mappings if mapping.row.target in present or mapping.row.target not in optional]
    check_headers({mapping.input: mapping.input_shape for mapping in needed if mapping.input}, headers)
    folded = defaultdict(list)
    for mapping in mappings:
        if mapping.output is None:
            folded[OUTPUT.format(layer=mapping.layer)].append(mapping)
    outputs = []
    for mapping in mappings:
        key, shape, layer, constant = mapping.output, mapping.output_shape, mapping.layer, mapping.row.constant
        if key is not None and mapping.input is not None and mapping.input in headers:
            others = folded[mapping.target]
            inputs = mapping.input, *(other.target for other in others)
            fold = partial(layout.fold, config, others[0].layer) if layout.fold and others else None
            outputs.append(Output(key, shape, headers[mapping.input].dtype, inputs, partial(_convert, mapping, fold)))
        elif key is not None and constant is not None:
            always_float32 = mapping.target.endswith(tuple(config.spec.float32_of(config)))
            # W_V has this key in every layout.
            dtype = torch.float32 if always_float32 else headers[VALUE.format(layer=layer)].dtype
            value = constant(config, layer) if callable(constant) else constant
            outputs.append(Output(key, shape, dtype, (), partial(torch.full, shape, value, dtype=dtype)))
    return outputs


class ParameterMapping(NamedTuple):
    """A parameter in one direction: from the key `input` to the key `output`, None if there is none.

    Attributes:
        target: its key in our checkpoints.
        rows: which of the input's rows each of the output's is; None if they are the same.
    """

    row: Row
    layer: int
    target: str
    input: str | None
    input_shape: tuple[int, ...]
    output: str | None
    output_shape: tuple[int, ...]
    rows: Tensor | None


def parameter_mappings(layout: Layout, config: DiffTransformerConfig, *, backwards: bool) -> list[ParameterMapping]:
    """Return the keys of each parameter on both sides, in the order of a forward pass; those of DEX come last."""
    with torch.device("meta"):
        parameters = DiffTransformerForCausalLM(config).state_dict()
    known = {
        row.target.format(layer=layer): (row, layer) for layer in range(config.num_hidden_layers) for row in layout.rows
    }
    mappings = []
    for key in sorted(parameters, key=lambda key: DEX in key):
        row, layer = known.get(key, (Row(target=key, source=key), 0))
        shape, source = tuple(parameters[key].shape), row.source and row.source.format(layer=layer)
        rows = None if row.source_rows is None else row.source_rows(shape[0], head_dim(config))
        theirs = source, shape if rows is None else (int(rows.max()) + 1, *shape[1:])
        if backwards:
            rows = None if rows is None else rows.argsort()
            mappings.append(ParameterMapping(row, layer, key, key, shape, *theirs, rows))
        else:
            mappings.append(ParameterMapping(row, layer, key, *theirs, key, shape, rows))
    return mappings


def _convert(mapping: ParameterMapping, fold: Callable[..., Tensor] | None, weight: Tensor, *folded: Tensor) -> Tensor:
    reordered = weight if mapping.rows is None else weight[mapping.rows]
    converted = reordered if mapping.row.scale == 1 else reordered * mapping.row.scale
    converted = converted if fold is None else fold(converted, *folded)
    if converted is not reordered and not converted.isfinite().all():
        raise ValueError(f"{mapping.input} cannot be converted in {converted.dtype}: the result is not finite.")
    return converted


def check_headers(expected: Mapping[str, tuple[int, ...]], headers: Mapping[str, Header]) -> None:
    """Refuse tensors with other keys or shapes than expected, with a ValueError that lists all of them."""
    problems = {
        "unknown": sorted(headers.keys() - expected.keys()),
        "missing": sorted(expected.keys() - headers.keys()),
        "wrong shapes": [
            f"{key} is {headers[key].shape}, not {shape}"
            for key, shape in expected.items()
            if key in headers and headers[key].shape != shape
        ],
    }
    if any(problems.values()):
        raise ValueError("; ".join(f"{kind}: {some(keys)}" for kind, keys in problems.items() if keys) + ".")


class Weights:
    """Keys, shapes and dtypes of a folder's tensors, and the tensors one at a time.

    Raises:
        FileNotFoundError: there are no weights, or a file of the index is absent.
        ValueError: a file is damaged or disagrees with the index, weights are pickled or not in floating point.
    """

    def __init__(self, folder: Path) -> None:
        files, listed = _files(folder)
        self.headers: dict[str, Header] = {}
        for file in files:
            self.headers |= _headers(file)
        if listed is not None and (wrong := sorted(self.headers.keys() ^ listed)):
            raise ValueError(f"{str(folder / INDEX)!r} and the files it names disagree on {some(wrong)}.")

    def read(self, key: str) -> Tensor:
        """Read one tensor, on the CPU."""
        file = self.headers[key].file
        try:
            with safe_open(file, framework="pt") as opened:
                return opened.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} cannot be read: {error}.") from None


def read_source_config(source: Path) -> dict[str, Any]:
    """Return the config.json of a folder. Raises FileNotFoundError, or ValueError if it holds anything else."""
    if not source.is_dir():
        raise FileNotFoundError(f"{str(source)!r} is no folder; name the one that holds {CONFIG} and the weights.")
    if not (source / CONFIG).is_file():
        raise FileNotFoundError(f"{str(source)!r} holds no {CONFIG}.")
    return read_json_object(source / CONFIG)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object. Raises FileNotFoundError, or ValueError if it holds anything else."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{str(file)!r} must hold a JSON object, got {type(content).__name__}.")
    return content


def _files(folder: Path) -> tuple[list[Path], set[str] | None]:
    """Return the files, and the keys that an index says are in them: as transformers, one file before all others."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS], None
    if (folder / INDEX).is_file():
        file_of_key = read_json_object(folder / INDEX).get("weight_map")
        if not isinstance(file_of_key, Mapping) or not all(isinstance(name, str) for name in file_of_key.values()):
            raise ValueError(f"{str(folder / INDEX)!r} must say under weight_map which file holds each tensor.")
        names = sorted(set(file_of_key.values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{str(folder / INDEX)!r} must name files of its own folder, got {some(outside)}.")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise FileNotFoundError(f"{str(folder)!r} lacks {some(absent)}, which {INDEX} names.")
        return [folder / name for name in names], set(file_of_key)
    if pickled := sorted(file.name for pattern in PICKLED for file in folder.glob(pattern)):
        raise ValueError(
            f"The weights in {str(folder)!r} are pickled ({some(pickled)}), and a pickle can run any code when it is "
            "read: save them as safetensors first."
        )
    raise FileNotFoundError(f"{str(folder)!r} holds no weights: neither {WEIGHTS} nor {INDEX}.")


def _headers(file: Path) -> dict[str, Header]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118  # not a mapping
            entries = {key: (tuple(part.get_shape()), part.get_dtype()) for key, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(file)!r} is no complete safetensors file: {error}.") from None
    if rejected := [f"{key} ({dtype})" for key, (_, dtype) in entries.items() if dtype not in DTYPES]:
        raise ValueError(f"Only {', '.join(DTYPES)} weights are converted, but {str(file)!r} holds {some(rejected)}.")
    return {key: Header(file, shape, DTYPES[dtype]) for key, (shape, dtype) in entries.items()}
