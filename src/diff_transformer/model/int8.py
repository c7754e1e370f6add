"""Loads the linear layers of a model in eight bits, for decoding on a CPU, by transformers' ``quantization_config``.

Decoding reads every weight once a token, so half of bfloat16's bytes take little more than half the time. The kernel of
the CPU multiplies few tokens by them as they are; torchao unpacks its own at each call unless it is compiled.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from diff_transformer.nn.layers import KeepsFloat32
from diff_transformer.ops.backends import is_transformed
from diff_transformer.ops.cpu.cpu_backend import available_to_auto, token_step

METHOD = "diff_transformer_int8"
MOST_ROWS = 16  # with more, torch's product of unpacked weights is faster on some processors


@register_quantization_config(METHOD)
class Int8Config(QuantizationConfigMixin):
    """Configuration of eight-bit weights, for ``from_pretrained(..., quantization_config=Int8Config())``.

    λ, norms and embeddings stay as they are, so that an output head that was tied to them is not any more. The model
    computes in bfloat16, in which alone the product is fast, whatever dtype is asked for. Nothing trains such a model.

    Examples:
        >>> sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
        >>> DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).save_pretrained("checkpoint")
        >>> model = DiffTransformerForCausalLM.from_pretrained("checkpoint", quantization_config=Int8Config())
        >>> model.model.layers[0].self_attn.q_proj.weight.dtype
        torch.int8
    """

    def __init__(self, quant_method: str = METHOD) -> None:
        self.quant_method = quant_method


def _product(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor | None = token_step("multiplied_int8", x, weight, scale, MOST_ROWS)
    if out is None:  # sums that are not scaled yet may overflow in float16
        wide = torch.float32 if x.dtype == torch.float16 else x.dtype
        # The pattern of inductor for such products, which fails, asks for a factor in bfloat16.
        factor = scale if torch.compiler.is_compiling() else scale.to(wide)
        out = F.linear(x.to(wide), weight.to(wide)).mul_(factor).to(x.dtype)
    return out


# The kernel's product in a graph, in which torch.compile would unpack the weights for every token.
_OF_GRAPH = "diff_transformer_cpu::int8_product"
torch.library.define(_OF_GRAPH, "(Tensor x, Tensor weight, Tensor scale) -> Tensor")
torch.library.register_fake(_OF_GRAPH, lambda x, weight, _: x.new_empty(*x.shape[:-1], len(weight)))


class Int8Linear(KeepsFloat32):
    """Linear layer with eight-bit weights, (…, in) → (…, out); they have no gradient.

    A row's scale is its largest entry over 127, rounded up to eight significant bits, so that it is the same number in
    bfloat16. An entry is off by half a scale at most. Scales and bias stay in float32 when the model around is cast.

    Args:
        linear: the layer in whose place it is put, of which sizes, device and the dtype of scales are taken.

    Examples:
        >>> linear = nn.Linear(64, 32, dtype=torch.bfloat16)
        >>> Int8Linear.of(linear)(torch.randn(2, 64, dtype=torch.bfloat16)).shape
        torch.Size([2, 32])
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.zeros_like(linear.weight, dtype=torch.int8), requires_grad=False)
        self.weight_scale = nn.Parameter(linear.weight.new_ones(len(linear.weight)), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(torch.zeros_like(linear.bias), requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> "Int8Linear":
        """Return the layer with the weights of a linear layer, rounded. Raises ValueError for a NaN or infinity."""
        if linear.weight.is_meta:
            raise ValueError("weights on the disk cannot be held in eight bits: device_map must name devices.")
        weight = linear.weight.detach().float()
        if not weight.isfinite().all():
            raise ValueError("a weight with NaN or infinity cannot be held in eight bits.")
        mantissa, exponent = torch.frexp(weight.abs().amax(1).clamp(min=1e-30) / 127)
        scale = torch.ldexp((mantissa * 256).ceil() / 256, exponent)
        layer = cls(linear)
        with torch.no_grad():
            layer.weight.copy_((weight / scale.unsqueeze(1)).round())
            layer.weight_scale.copy_(scale)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias."""
        is_step_of_graph = torch.compiler.is_compiling() and self._is_step(x)
        product = torch.ops.diff_transformer_cpu.int8_product if is_step_of_graph else _product
        out: Tensor = product(x, self.weight, self.weight_scale)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def _is_step(self, x: Tensor) -> bool:
        if torch.compiler.is_exporting() or torch.is_grad_enabled() or is_transformed() or not x.is_cpu:
            return False
        known = x.dtype in (torch.float32, torch.bfloat16) and self.weight_scale.dtype == torch.float32
        return known and 0 < x.numel() <= MOST_ROWS * self.in_features and available_to_auto()

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


@register_quantizer(METHOD)
class Int8Quantizer(HfQuantizer):
    """Puts an :class:`Int8Linear` in the place of each linear layer, for transformers' ``from_pretrained``.

    Examples:
        >>> Int8Quantizer(Int8Config()).is_serializable()
        True
    """

    is_trainable, is_compileable = False, True

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return bfloat16, whatever is asked for."""
        return torch.bfloat16

    def is_serializable(self) -> bool:
        """Return True: ``save_pretrained`` writes the eight-bit weights, which load as such."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if self.pre_quantized:
            for parent, name, linear in _linear_layers(model):
                setattr(parent, name, Int8Linear(linear))

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for parent, name, linear in _linear_layers(model):
            setattr(parent, name, Int8Linear.of(linear))
        if isinstance(model.get_output_embeddings(), Int8Linear):
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop("lm_head.weight", None)
        available_to_auto()  # loads the kernel, if nothing has yet
        return model


def _linear_layers(model: Any) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return what is held in eight bits, with parents: the output head, linear layers but W_λ and absorbed ones."""
    found, head = [], model.get_output_embeddings()
    for path, module in model.named_modules():
        *parents, name = path.split(".")
        parent = model.get_submodule(".".join(parents))
        kept = ("lambda_proj", *getattr(parent, "absorbed", ()))
        if isinstance(module, nn.Linear) and (module is head or ("layers" in parents and name not in kept)):
            found.append((parent, name, module))
    return found
