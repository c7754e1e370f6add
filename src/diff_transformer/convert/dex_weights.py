"""The parameters that DEX adds to a Llama's: made for a conversion from a Llama, folded into W_O on the way back.

Their shapes follow the chosen heads, layer by layer, so no row of a table can hold them.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from diff_transformer.convert.layout import ATTENTION, Output
from diff_transformer.convert.weight_files import Header
from diff_transformer.model import DiffTransformerConfig
from diff_transformer.nn import AnnealedLambda, annealed_lambda, fold_output


class DexParameters:
    """W_D, λ_learn and α of every layer that has chosen heads.

    Attributes:
        shapes: their keys in our checkpoints, and their shapes.
    """

    def __init__(self, config: DiffTransformerConfig) -> None:
        width, every = config.head_dim, list(range(config.num_attention_heads))
        assert width is not None  # never None once it is constructed
        self._layers: dict[str, tuple[int, list[int]]] = {}  # W_O's key → layer from 1, chosen heads
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._config = config
        for layer, heads in enumerate(config.dex_heads or [every] * config.num_hidden_layers):
            if heads:
                output = f"{ATTENTION}o_proj.weight".format(layer=layer)
                self._layers[output] = layer + 1, list(heads)
                shapes = (len(heads), width, width), (1,), ()
                self.shapes |= dict(zip(_keys(output), shapes, strict=True))

    def initial(self, headers: Mapping[str, Header]) -> list[Output]:
        """The parameters of a model that computes what the source does: W_D = 0; λ's two numbers in float32."""
        return [output for key in self._layers for output in self._initial(key, headers[key].dtype)]

    def fold(self, output: Output) -> Output:
        """W_O with the layer's correction taken up, λ as training left it; any other tensor as it is.

        Its ``make`` raises a ValueError where the result is too large for its dtype.
        """
        if output.key not in self._layers:
            return output
        layer, heads = self._layers[output.key]
        lambda_init = self._lambda(layer).lambda_init

        def make(output_weight: Tensor, weight: Tensor, learned: Tensor, progress: Tensor) -> Tensor:
            lam = annealed_lambda(lambda_init, learned.double().squeeze(0), progress.double())
            folded = fold_output(output.make(output_weight), weight, lam, heads)
            if not folded.isfinite().all():
                raise ValueError(f"{output.key} with W_D folded in is too large for {folded.dtype}.")
            return folded

        inputs = (*output.inputs, *_keys(output.key))
        return Output(output.key, output.shape, output.dtype, inputs, make)

    def _initial(self, key: str, dtype: torch.dtype) -> list[Output]:
        weight, learned, progress = _keys(key)
        lam = self._lambda(self._layers[key][0]).state_dict()
        return [
            Output(weight, self.shapes[weight], dtype, (), partial(torch.zeros, self.shapes[weight], dtype=dtype)),
            Output(learned, (1,), torch.float32, (), lam["learned"].float),
            Output(progress, (), torch.float32, (), lam["progress"].float),
        ]

    def _lambda(self, layer: int) -> AnnealedLambda:
        """The initial λ of a layer, counted from 1."""
        return AnnealedLambda(layer, self._config.lambda_init_of(layer), self._config.dex_lambda_start)


def _keys(output: str) -> tuple[str, str, str]:
    """W_D, λ_learn and α of the layer whose W_O has this key."""
    layer = output.removesuffix("o_proj.weight")
    return f"{layer}dex.weight", f"{layer}dex.lam.learned", f"{layer}dex.lam.progress"
