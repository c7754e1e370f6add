"""The tables of checkpoint layouts, and the plan of a conversion: every tensor to write, and what it is made of.

A table says how a source's parameters become ours, its target; read backwards it says how ours become the source's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from diff_transformer.convert.weight_files import Header, some
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.nn import AnnealedLambda, annealed_lambda, fold_output
from diff_transformer.variants import head_dim

LAYER = "model.layers.{layer}."
ATTENTION = LAYER + "self_attn."
# The tensor of the same layer whose dtype a constant gets; it has this key in every layout.
DTYPE_LIKE = ATTENTION + "v_proj.weight"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model, by the symbols that shapes are written in.

    Attributes:
        V, D, F: vocabulary, model width, width of the feed-forward network.
        A, K: the Transformer's query heads and key/value heads.
        d: width of a query or key.
        layers: how many layers.
    """

    V: int
    D: int
    F: int
    A: int
    K: int
    d: int
    layers: int

    @classmethod
    def of(cls, config: DiffTransformerConfig) -> "Sizes":
        """The sizes of a configuration."""
        return cls(
            V=config.vocab_size,
            D=config.hidden_size,
            F=config.intermediate_size,
            A=config.num_attention_heads,
            K=config.num_key_value_heads or config.num_attention_heads,
            d=head_dim(config),
            layers=config.num_hidden_layers,
        )

    def shape(self, symbols: tuple[str, ...]) -> tuple[int, ...]:
        """("2*A*d", "D") → numbers."""
        return tuple(
            prod(int(part) if part.isdigit() else getattr(self, part) for part in axis.split("*")) for axis in symbols
        )


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
    """One parameter in the source's layout and in ours, the target's.

    Keys are patterns in which ``{layer}`` is the layer's number, counted from 0.

    Attributes:
        target: the key in our checkpoints.
        source: the key in the source's; None where it has no such parameter.
        shape: the target's, in symbols of :class:`Sizes`.
        source_shape: the source's, where it is another.
        source_rows: which of the source's rows each of the target's is, of a number of rows and a head's width; None
            where the rows are the same.
        scale: the target is the source times this.
        constant: what every entry of the target is where the source has none. With a key of the source as well, the
            parameter may be absent from the whole checkpoint.
        folded_into: the target's key of the output projection whose columns, head by head, take up a parameter that
            the source has no key for.
        absent_if_tied: whether a checkpoint with tied embeddings may leave the parameter out.
    """

    target: str
    source: str | None
    shape: tuple[str, ...]
    source_shape: tuple[str, ...] | None = None
    source_rows: Callable[[int, int], Tensor] | None = None
    scale: float = 1.0
    constant: float | None = None
    folded_into: str | None = None
    absent_if_tied: bool = False

    @property
    def layered(self) -> bool:
        """Whether every layer has one."""
        return "{layer}" in self.target


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
        rows: the table.
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
    """Every tensor of the converted checkpoint, layer by layer.

    Args:
        layout: the table.
        config: of our model.
        headers: of the tensors to convert.
        backwards: whether our checkpoint is converted to the source's layout.

    Raises:
        ValueError: keys that the table does not know, or that are missing, or shapes that do not fit; all are listed.
    """
    sizes, tied = Sizes.of(config), config.tie_word_embeddings
    dex = DexParameters(config) if config.described.corrects_heads else None
    headers = {key: header for key, header in headers.items() if not key.endswith(layout.ignored)}
    places = [_Place(row, layer, sizes, backwards) for row, layer in _in_order(layout.rows, sizes.layers)]
    present = {place.row.target for place in places if place.input in headers}
    may_lack = {
        row.target
        for row in layout.rows
        if (row.absent_if_tied and tied) or (row.constant is not None and not backwards)
    }
    needed = [place for place in places if place.row.target in present or place.row.target not in may_lack]
    expected = {place.input: place.input_shape for place in needed if place.input}
    _check(expected | (dex.shapes if dex and backwards else {}), headers)
    folded = {place.folded_into: place for place in places} if backwards else {}
    outputs = [
        output for place in places if (output := place.make_output(headers, folded.get(place.target))) is not None
    ]
    if dex is None:
        return outputs
    return [dex.fold(output) for output in outputs] if backwards else outputs + dex.initial(headers)


def _in_order(rows: tuple[Row, ...], layers: int) -> Iterator[tuple[Row, int]]:
    """Each row for each layer, in the order of a forward pass."""
    for layered, group in groupby(rows, lambda row: row.layered):
        block = tuple(group)
        for layer in range(layers if layered else 1):
            for row in block:
                yield row, layer


class _Place:
    """A row in one layer, in one direction: from the key `input` to the key `output`, None where there is none."""

    def __init__(self, row: Row, layer: int, sizes: Sizes, backwards: bool) -> None:
        self.row, self.sizes, self.backwards = row, sizes, backwards
        self.target = row.target.format(layer=layer)
        target = self.target, sizes.shape(row.shape)
        source = row.source and row.source.format(layer=layer), sizes.shape(row.source_shape or row.shape)
        self.input: str | None
        self.output: str | None
        (self.input, self.input_shape), (self.output, self.output_shape) = (
            (target, source) if backwards else (source, target)
        )
        self.folded_into = row.folded_into and row.folded_into.format(layer=layer)
        self.dtype_like = DTYPE_LIKE.format(layer=layer)

    def make_output(self, headers: Mapping[str, Header], folded: "_Place | None") -> Output | None:
        """The tensor to write; None where the other layout has none, or this checkpoint."""
        if self.output is None:
            return None
        if self.input is None or self.input not in headers:
            constant, shape = self.row.constant, self.output_shape
            if constant is None:
                return None
            value, dtype = constant, headers[self.dtype_like].dtype
            return Output(self.output, shape, dtype, (), lambda: torch.full(shape, value, dtype=dtype))
        dtype = headers[self.input].dtype
        if folded is None:
            return Output(self.output, self.output_shape, dtype, (self.input,), self._reordered)
        return Output(self.output, self.output_shape, dtype, (self.input, folded.target), self._scaled_by_head)

    def _reordered(self, weight: Tensor) -> Tensor:
        if self.row.source_rows is not None:
            rows = self.row.source_rows(self.sizes.shape(self.row.shape)[0], self.sizes.d)
            weight = weight[inverse(rows) if self.backwards else rows]
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
        width = head_dim(config)
        every = list(range(config.num_attention_heads))
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._layers: dict[str, tuple[AnnealedLambda, list[int]]] = {}  # W_O's key → the initial λ, chosen heads
        for layer, heads in enumerate(config.dex_heads or [every] * config.num_hidden_layers):
            if heads:
                output = f"{ATTENTION}o_proj.weight".format(layer=layer)
                lam = AnnealedLambda(layer + 1, config.lambda_init_of(layer + 1), config.dex_lambda_start)
                self._layers[output] = lam, list(heads)
                shapes = (len(heads), width, width), (1,), ()
                self.shapes |= dict(zip(_dex_keys(output), shapes, strict=True))

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
    found = {
        "unknown": sorted(headers.keys() - expected.keys()),
        "missing": sorted(expected.keys() - headers.keys()),
        "wrong shapes": [f"{key} is {got}, not {expected[key]}" for key, got in shapes.items() if got != expected[key]],
    }
    if any(found.values()):
        raise ValueError("; ".join(f"{what}: {some(names)}" for what, names in found.items() if names) + ".")
