"""What a checkpoint layout is, and the plan of a conversion: every tensor to write, and what it is made of.

The table of a layout says how a source's parameters become ours, its target; read backwards it says how ours become
the source's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.nn import AnnealedLambda, annealed_lambda, fold_output
from diff_transformer.variants import head_dim

ATTENTION = "model.layers.{layer}.self_attn."
DEX = ".self_attn.dex."
OUTPUT_HEAD = "lm_head.weight"  # which a checkpoint with tied embeddings may leave out
# The tensor of the same layer whose dtype a constant gets; it has this key in every layout.
DTYPE_LIKE = ATTENTION + "v_proj.weight"


@dataclass(frozen=True)
class Header:
    """What is known of a tensor without reading it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def deinterleave_channels(rows: int, head_dim: int) -> Tensor:
    """Rotary channels in pairs (2i, 2i + 1) in the source, (i, i + d/2) here; heads in the same order."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def interleave_heads(rows: int, head_dim: int) -> Tensor:
    """The two heads of pair h are h and h + half of them in the source, 2h and 2h + 1 here."""
    return torch.arange(rows).view(2, -1, head_dim).transpose(0, 1).flatten()


def repeat_heads(rows: int, head_dim: int) -> Tensor:
    """Each head of the source becomes two equal ones here, 2h and 2h + 1: no permutation, and no way back."""
    return torch.arange(rows // 2).view(-1, 1, head_dim).expand(-1, 2, -1).flatten()


def inverse(permutation: Tensor) -> Tensor:
    """The permutation that undoes another.

    Raises:
        ValueError: it takes a row twice, or leaves one out.
    """
    if not torch.equal(permutation.sort().values, torch.arange(permutation.numel())):
        raise ValueError("Rows that are no permutation of the source's cannot be converted back.")
    return permutation.argsort()


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one parameter of ours stands in the source's layout, where it is not the same under the same key.

    Keys are patterns in which ``{layer}`` is the layer's number, counted from 0.

    Attributes:
        target: the key in our checkpoints.
        source: the key in the source's; None where it has no such parameter.
        source_rows: which of the source's rows each of the target's is, of a number of rows and a head's width; None
            where the rows are the same.
        scale: the target is the source times this.
        constant: what every entry of the target is where the source has none. With a key of the source as well, the
            parameter may be absent from the whole checkpoint.
        folded_into: the target's key of the output projection whose columns, head by head, take up a parameter that
            the source has no key for.
    """

    target: str
    source: str | None
    source_rows: Callable[[int, int], Tensor] | None = None
    scale: float = 1.0
    constant: float | None = None
    folded_into: str | None = None


@dataclass(frozen=True)
class Output:
    """A tensor to write.

    Attributes:
        inputs: keys of the tensors that ``make`` takes, in their order; none where it is a constant.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...]
    make: Callable[..., Tensor]

    @property
    def bytes(self) -> int:
        """What it takes in a file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How somebody else keeps a model that is one of ours.

    Attributes:
        name: what ``--from`` and ``--to`` call it.
        attention_type: of our model that it corresponds to.
        rows: the table, of the parameters that differ. Any other has the same key and the same rows on both sides.
        read: the source's config.json → our configuration. Raises ValueError where we have no such model.
        write: our configuration → the source's config.json; None where there is no way back.
        ignored: endings of keys that hold no parameter.
    """

    name: str
    attention_type: str
    rows: tuple[Row, ...]
    read: Callable[[Mapping[str, Any]], DiffTransformerConfig]
    write: Callable[[DiffTransformerConfig], dict[str, Any]] | None = None
    ignored: tuple[str, ...] = ()


def plan(
    layout: Layout, config: DiffTransformerConfig, headers: Mapping[str, Header], *, backwards: bool
) -> list[Output]:
    """Every tensor of the converted checkpoint, layer by layer, from the headers of those to convert.

    Backwards our checkpoint is converted to the source's layout. Raises a ValueError that lists all keys that are
    unknown or missing, and all shapes that do not fit.
    """
    dex = DexParameters(config) if config.described.corrects_heads else None
    headers = {key: header for key, header in headers.items() if not key.endswith(layout.ignored)}
    mappings = parameter_mappings(layout, config, backwards=backwards)
    present = {mapping.row.target for mapping in mappings if mapping.input in headers}
    may_lack = {row.target for row in layout.rows if row.constant is not None and not backwards}
    if config.tie_word_embeddings:
        may_lack.add(OUTPUT_HEAD)
    needed = [mapping for mapping in mappings if mapping.row.target in present or mapping.row.target not in may_lack]
    expected = {mapping.input: mapping.input_shape for mapping in needed if mapping.input}
    _check(expected | (dex.shapes if dex and backwards else {}), headers)
    folded = {mapping.folded_into: mapping for mapping in mappings} if backwards else {}
    made = [mapping.make_output(headers, folded.get(mapping.target)) for mapping in mappings]
    outputs = [output for output in made if output is not None]
    if dex is None:
        return outputs
    return [dex.fold(output) for output in outputs] if backwards else outputs + dex.initial(headers)


def our_shapes(config: DiffTransformerConfig) -> dict[str, tuple[int, ...]]:
    """The keys of our checkpoints and their shapes, in the order of a forward pass."""
    with torch.device("meta"):
        model = DiffTransformerForCausalLM(config)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


def parameter_mappings(layout: Layout, config: DiffTransformerConfig, *, backwards: bool) -> "list[ParameterMapping]":
    """Where each of our parameters stands on both sides, but for those that DEX adds."""
    rows = {
        row.target.format(layer=layer): (row, layer) for layer in range(config.num_hidden_layers) for row in layout.rows
    }
    width = head_dim(config)
    return [
        ParameterMapping(*rows.get(key, (Row(target=key, source=key), 0)), shape, width, backwards)
        for key, shape in our_shapes(config).items()
        if DEX not in key
    ]


class ParameterMapping:
    """A parameter in one direction: from the key `input` to the key `output`, None where there is none."""

    def __init__(self, row: Row, layer: int, shape: tuple[int, ...], head_dim: int, backwards: bool) -> None:
        self.row = row
        self.target = row.target.format(layer=layer)
        self.folded_into = row.folded_into and row.folded_into.format(layer=layer)
        self.dtype_like = DTYPE_LIKE.format(layer=layer)
        self.rows = None if row.source_rows is None else row.source_rows(shape[0], head_dim)
        source_shape = shape if self.rows is None else (int(self.rows.max()) + 1, *shape[1:])
        target = self.target, shape
        source = row.source and row.source.format(layer=layer), source_shape
        self.input: str | None
        self.output: str | None
        (self.input, self.input_shape), (self.output, self.output_shape) = (
            (target, source) if backwards else (source, target)
        )
        if self.rows is not None and backwards:
            self.rows = inverse(self.rows)

    def make_output(self, headers: Mapping[str, Header], folded: "ParameterMapping | None") -> Output | None:
        """The tensor to write; None where the other layout has none, or this checkpoint."""
        if self.output is None:
            return None
        if self.input is None or self.input not in headers:
            constant, shape = self.row.constant, self.output_shape
            if constant is None:
                return None
            dtype = headers[self.dtype_like].dtype
            return Output(self.output, shape, dtype, (), partial(torch.full, shape, constant, dtype=dtype))
        dtype = headers[self.input].dtype
        if folded is None:
            return Output(self.output, self.output_shape, dtype, (self.input,), self._reordered)
        return Output(self.output, self.output_shape, dtype, (self.input, folded.target), self._scaled_by_head)

    def _reordered(self, weight: Tensor) -> Tensor:
        weight = weight if self.rows is None else weight[self.rows]
        return weight if self.row.scale == 1 else self._finite(weight * self.row.scale)

    def _scaled_by_head(self, output_weight: Tensor, norm_weight: Tensor) -> Tensor:
        """W_O whose columns take up a weight that the heads share."""
        rows = self._reordered(output_weight)
        if bool((norm_weight == 1).all()):
            return rows
        wide = torch.promote_types(torch.promote_types(rows.dtype, norm_weight.dtype), torch.float32)
        heads = rows.to(wide).unflatten(1, (-1, norm_weight.numel()))
        return self._finite((heads * norm_weight.to(wide)).flatten(1).to(rows.dtype))

    def _finite(self, made: Tensor) -> Tensor:
        if not made.isfinite().all():
            raise ValueError(f"{self.input} cannot be scaled in {made.dtype}: the result is not finite.")
        return made


class DexParameters:
    """What DEX adds to a Llama, in layers that have chosen heads: W_D, λ_learn and α.

    They are made for a conversion from a Llama and folded into W_O on the way back. Their shapes follow the chosen
    heads, layer by layer, so that no row of a table can hold them.

    Attributes:
        shapes: their keys in our checkpoints, and their shapes.
    """

    def __init__(self, config: DiffTransformerConfig) -> None:
        self.shapes = {key: shape for key, shape in our_shapes(config).items() if DEX in key}
        every = list(range(config.num_attention_heads))
        self._layers: dict[str, tuple[AnnealedLambda, list[int]]] = {}  # W_O's key → the initial λ, chosen heads
        for layer, heads in enumerate(config.dex_heads or [every] * config.num_hidden_layers):
            if heads:
                lam = AnnealedLambda(layer + 1, config.lambda_init_of(layer + 1), config.dex_lambda_start)
                self._layers[f"{ATTENTION}o_proj.weight".format(layer=layer)] = lam, list(heads)

    def initial(self, headers: Mapping[str, Header]) -> list[Output]:
        """The parameters of a model that computes what the source does: W_D = 0; λ's two numbers in float32."""
        outputs = []
        for key, (lam, _) in self._layers.items():
            weight, learned, progress = _dex_keys(key)
            shape, dtype = self.shapes[weight], headers[key].dtype
            outputs += [
                Output(weight, shape, dtype, (), partial(torch.zeros, shape, dtype=dtype)),
                Output(learned, (1,), torch.float32, (), lam.learned.detach().float),
                Output(progress, (), torch.float32, (), lam.progress.float),
            ]
        return outputs

    def fold(self, output: Output) -> Output:
        """W_O with the layer's correction taken up, λ as training left it; any other tensor as it is.

        Its ``make`` raises a ValueError where the result is too large for its dtype.
        """
        if output.key not in self._layers:
            return output
        initial, heads = self._layers[output.key]

        def make(output_weight: Tensor, weight: Tensor, learned: Tensor, progress: Tensor) -> Tensor:
            lam = annealed_lambda(initial.lambda_init, learned.double().squeeze(0), progress.double())
            folded = fold_output(output.make(output_weight), weight, lam, heads)
            if not folded.isfinite().all():
                raise ValueError(f"{output.key} with W_D folded in is too large for {folded.dtype}.")
            return folded

        return replace(output, inputs=(*output.inputs, *_dex_keys(output.key)), make=make)


def _dex_keys(output: str) -> tuple[str, str, str]:
    """W_D, λ_learn and α of the layer whose W_O has this key."""
    layer = output.removesuffix("o_proj.weight")
    return f"{layer}dex.weight", f"{layer}dex.lam.learned", f"{layer}dex.lam.progress"


def _check(expected: Mapping[str, tuple[int, ...]], headers: Mapping[str, Header]) -> None:
    shapes = {key: headers[key].shape for key in expected if key in headers}
    problems = {
        "unknown": sorted(headers.keys() - expected.keys()),
        "missing": sorted(expected.keys() - headers.keys()),
        "wrong shapes": [f"{key} is {got}, not {expected[key]}" for key, got in shapes.items() if got != expected[key]],
    }
    if any(problems.values()):
        raise ValueError("; ".join(f"{what}: {some(names)}" for what, names in problems.items() if names) + ".")


def some(names: list[str], most: int = 20) -> str:
    """Names for a message: all of them, unless there are very many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
